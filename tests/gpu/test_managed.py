"""Managed memory of a GPU, moved and killed: `pytest -m gpu tests/gpu/test_managed.py`.

The program (tests/scenarios/programs/managed.py) compares every byte with a model of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU")]
GATES = ("host", "device", "both", "busy", "list", "variable", "attached")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=3, device="cuda:0", lease=8.0) as running:
        yield running


def test_undisturbed(pool: LocalPool, tmp_path: Path) -> None:
    staged = Staged(pool, tmp_path, "managed", name="plain")
    staged.open(*GATES)
    staged.finish()
    assert pool.session("plain")["managed_faults"] > 0


@pytest.mark.parametrize("how", ["copy", "replay", "kill", "checkpoint"])
def test_disturbed_at_each_gate(pool: LocalPool, tmp_path: Path, how: str) -> None:
    staged = Staged(pool, tmp_path, "managed", name=f"managed-{how}")
    for gate in GATES:
        staged.disturb(gate, how)
    staged.finish()
