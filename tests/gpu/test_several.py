"""One session on two GPUs of this machine: `pytest -m gpu tests/gpu/test_several.py`, on a machine that has them.

The program (tests/scenarios/programs/several.py) knows nothing of rgpu: its digest is that of a native run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import gpu_count
from tests.support.pools.pool import DIGEST, LocalPool
from tests.support.pools.staged import Staged, line

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU"),
              pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")]
TWO = ("--gpus", "2", "--memory", "1GiB")
GATES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """Three nodes that have both GPUs."""
    with LocalPool(tmp_path_factory.mktemp("pairs"), nodes=3, device="cuda:0,cuda:1") as running:
        yield running


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("native")
    for gate in GATES:
        (folder / str(gate)).touch()
    done = subprocess.run(line("several", folder), capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(DIGEST.pattern, done.stdout, re.M)
    assert found, done.stdout
    return found[1]


def test_as_on_the_spot(pairs: LocalPool, tmp_path: Path, native: str) -> None:
    staged = Staged(pairs, tmp_path, "several", "remote", name="plain", options=TWO)
    staged.open(*GATES)
    assert staged.finish() == native


def test_moved_killed_and_restored(pairs: LocalPool, tmp_path: Path, native: str) -> None:
    staged = Staged(pairs, tmp_path, "several", "remote", name="disturbed", options=TWO)
    for gate, how in zip(GATES, ("move", "kill", "checkpoint", "move"), strict=True):
        staged.disturb(gate, how)
    assert staged.finish() == native


@pytest.mark.parametrize("mode", ["copy", "replay"])
def test_both_ways_of_moving(pairs: LocalPool, tmp_path: Path, native: str, mode: str) -> None:
    staged = Staged(pairs, tmp_path, "several", "remote", name=f"by-{mode}", options=TWO)
    row = staged.reach(1)
    there = next(host for host in ("node-a", "node-b", "node-c") if host != row["host"])
    found = pairs.rgpu("migrate", staged.name, there, "--mode", mode, timeout=300)
    assert found["outcome"] == "committed" and found["verified"] is True, f"{found}\n{pairs.logs()}"
    print({key: found.get(key) for key in ("mode", "downtime_ms", "total_ms", "mismatched_pages", "pages_by")})
    staged.open(*GATES)
    assert staged.finish() == native
