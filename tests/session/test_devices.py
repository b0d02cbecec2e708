"""How a session's devices are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.session.addresses import DEVICE_STRIDE, device_base, device_of
from rgpu.session.devices import MAX_GPUS, join, parts
from rgpu.session.errors import UsageError


@given(st.sampled_from(["cpu", "cuda"]), st.lists(st.integers(0, 9999), min_size=1, max_size=6, unique=True))
def test_there_and_back(kind: str, numbers: list[int]) -> None:
    names = tuple(f"{kind}:{number}" for number in numbers)
    assert parts(join(names)) == names


def test_what_is_no_such_name_stands_for_itself() -> None:
    for name in ("", "cpu", "cuda:", "cuda:0+", "cuda:+1", "cuda:0+1 ", "cuda:0+cuda:1", "CUDA:0+1", "cuda:99999"):
        assert parts(name) == (name,)


def test_what_cannot_be_joined() -> None:
    for names in ((), ("cpu:0", "cuda:1"), ("cpu:1", "cpu:1")):
        with pytest.raises(UsageError):
            join(names)


def test_addresses_say_which() -> None:
    for number in range(MAX_GPUS):
        base = device_base(number)
        assert device_of(base) == device_of(base + DEVICE_STRIDE - 1) == number
    assert device_of(device_base(0) - 1) is None and device_of(device_base(MAX_GPUS)) is None
