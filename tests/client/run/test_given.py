"""The line that says what a run was given."""

from __future__ import annotations

import pytest

from rgpu.client.run.given import given_line
from rgpu.session.errors import Corrupt

H200 = {"host": "node-a", "device": "NVIDIA H200", "kind": "cuda", "gpus": 1, "compute": 100,
        "memory_bytes": 139 << 30, "device_bytes": 139 << 30}


@pytest.mark.parametrize(("more", "said"), [
    ({}, "1 GPU (NVIDIA H200, 139 GiB)"),
    ({"gpus": 2}, "2 GPUs (NVIDIA H200, 139 GiB each)"),
    ({"compute": 25, "memory_bytes": 139 << 28}, "0.25 of a GPU (NVIDIA H200, 34.8 GiB of its memory)"),
    ({"compute": 0, "memory_bytes": 1 << 29}, "memory of a GPU (NVIDIA H200, 512 MiB of its memory)"),
    ({"compute": 0, "kind": "cpu", "device": "rgpu CPU device", "memory_bytes": 1 << 30},
     "memory of a device (rgpu CPU device, 1 GiB of its memory)"),
])
def test_what_was_given_and_where(more: dict[str, object], said: str) -> None:
    assert given_line("job", {**H200, **more}) == f"rgpu: job: {said} on node-a"


def test_a_pool_that_does_not_say() -> None:
    assert given_line("job", None) == ""
    with pytest.raises(Corrupt):
        given_line("job", {"host": "node-a"})
