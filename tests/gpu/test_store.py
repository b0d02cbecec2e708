"""Checkpoints of a real GPU's memory: what the second one writes, and what a restore brings back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged

MEBIBYTES = int(os.environ.get("RGPU_STORE_MIB", "2048"))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_second_checkpoint_writes_what_changed_and_both_restore(tmp_path: Path) -> None:
    """`pytest -m gpu -s tests/gpu/test_store.py`; RGPU_STORE_MIB says how much memory (default 2048)."""
    with LocalPool(tmp_path, nodes=1, device="cuda:0") as pool:
        check_checkpoints(pool, MEBIBYTES)


def check_checkpoints(pool: LocalPool, mebibytes: int) -> None:
    """Two checkpoints with one page in a hundred changed between them, then the worker's death."""
    staged = Staged(pool, pool.folder / "gates", "memory", mebibytes, name="much",
                    options=("--memory", f"{mebibytes + 512}MiB"))
    staged.reach(1, 300)
    first = pool.rgpu("checkpoint", "much", timeout=300)
    shown = pool.rgpu("image", "show", first["image"])["statistics"]
    _print("first", shown)
    staged.open(1)
    row = staged.reach(2, 300)
    second = pool.rgpu("checkpoint", "much", timeout=300)
    again = pool.rgpu("image", "show", second["image"])["statistics"]
    _print("second", again)
    assert again["stored_bytes"] <= 0.015 * (mebibytes << 20), (shown, again)
    assert again["unchanged_pages"] >= 0.98 * again["pages"]
    began = time.monotonic()
    os.kill(row["worker_pid"], signal.SIGKILL)
    staged.wait_epoch(row["epoch"] + 1, 120)
    print(f"back after {time.monotonic() - began:.2f} s")
    staged.open(2)
    assert staged.finish(), staged.errors[-10:]
    assert pool.rgpu("image", "verify", second["image"], timeout=300)["pages"] == second["pages"]


def _print(which: str, statistics: dict[str, float]) -> None:
    rate = statistics["stored_bytes"] / max(1e-9, statistics["seconds"]) / 1e9
    print(f"{which}: pause {statistics['pause_ms']:.0f} ms, {statistics['stored_bytes']:,} bytes stored in "
          f"{statistics['seconds']:.2f} s ({rate:.2f} GB/s), {statistics['unchanged_pages']} of {statistics['pages']} "
          "pages unchanged")


@pytest.mark.timeout(300)
def test_the_same_on_the_cpu_device(tmp_path: Path) -> None:
    with LocalPool(tmp_path, nodes=1) as pool:
        check_checkpoints(pool, 48)
