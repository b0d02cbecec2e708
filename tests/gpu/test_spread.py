"""One process that uses the GPUs of two nodes, with its sessions moved and lost. It checks all that it computes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import gpu_count
from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400),
              pytest.mark.skipif(gpu_count() < 2, reason="needs two CUDA GPUs")]
HALF = max(1, gpu_count() // 2)  #: GPUs of a node
OPTIONS = ("--gpus", str(2 * HALF), "--spread", "--memory", "4GiB")
FIRST = ",".join(f"cuda:{number}" for number in range(HALF))
SECOND = ",".join(f"cuda:{number}" for number in range(HALF, 2 * HALF))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """Three nodes; the third shares the GPUs of the first."""
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=3, lease=8.0, devices=(FIRST, SECOND, FIRST)) as running:
        yield running


@pytest.mark.parametrize("program", ["spread", "spread_nccl"])
def test_moved_and_lost(pool: LocalPool, tmp_path: Path, program: str) -> None:
    name = program.replace("_", "-")
    staged = Staged(pool, tmp_path, program, name=name, session=f"{name}.0", options=OPTIONS)
    staged.reach(1)
    other = f"{name}.{HALF}"
    hosts = {one: pool.session(one)["host"] for one in (staged.name, other)}
    assert len(set(hosts.values())) == 2, hosts
    free = next(node["host"] for node in pool.living() if node["host"] not in hosts.values())
    assert pool.rgpu("migrate", other, free)["outcome"] == "committed"
    staged.open(1)
    os.kill(staged.reach(2)["worker_pid"], signal.SIGKILL)
    staged.open(2, 3, 4)
    assert len(staged.finish()) == 64, staged.errors[-20:]
