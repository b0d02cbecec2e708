"""An image goes to a node once, and only the part of it that the device can run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.pool import LocalPool
from tests.scenarios.staged import Staged

NOISE = 300_000  #: bytes of each entry that this device cannot use (programs/images.py)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(tmp_path, nodes=2) as running:
        yield running


def cached(pool: LocalPool, host: str) -> list[Path]:
    return sorted((pool.folder / "pool" / "nodes" / host / "modules").glob("[0-9a-f]*"))


def wait_cached(pool: LocalPool, host: str) -> Path:
    deadline = time.monotonic() + 10
    while not (found := [path for path in cached(pool, host) if len(path.name) == 64]):
        assert time.monotonic() < deadline, f"{host} keeps no image"
        time.sleep(0.02)
    assert len(found) == 1
    return found[0]


def wait_row(staged: Staged, wanted: Any) -> dict[str, Any]:
    """The session's row once its figures, which come every second, are as wanted."""
    deadline = time.monotonic() + 15
    while not wanted(row := staged.pool.session(staged.name)):
        assert time.monotonic() < deadline, row
        time.sleep(0.2)
    return row


def run(pool: LocalPool, name: str, host: str = "node-a") -> Staged:
    return Staged(pool, pool.folder / "gates", "images", name=name, options=("--host", host))


def finish(staged: Staged) -> str:
    staged.open(1, 2)
    return staged.finish()


def test_images_go_once(pool: LocalPool) -> None:
    first = run(pool, "first")
    first.reach(1)
    row = wait_row(first, lambda row: row["module_bytes"])
    assert 16_384 < row["module_bytes"] < NOISE and row["module_bytes_saved"] == 0  # the PTX alone
    image = wait_cached(pool, "node-a")
    assert image.stat().st_size == row["module_bytes"]
    expected = finish(first)

    second = run(pool, "second")
    second.reach(1)
    again = wait_row(second, lambda row: row["module_bytes_saved"])
    assert (again["module_bytes"], again["module_bytes_saved"]) == (0, row["module_bytes"])
    assert again["modules"]["hits"] == 1 and again["modules"]["misses"] == 0
    assert finish(second) == expected

    image.write_bytes(image.read_bytes()[:-1])
    third = run(pool, "third")
    third.reach(1)
    assert wait_row(third, lambda row: row["module_bytes"])["modules"]["damaged"] == 1
    assert finish(third) == expected
    assert wait_cached(pool, "node-a").stat().st_size == row["module_bytes"]  # repaired by what was sent

    # The node dies; the other one has never seen the image, and gets it from the client's journal.
    fourth = run(pool, "fourth")
    before = fourth.reach(1)
    wait_row(fourth, lambda row: row["module_bytes_saved"])
    assert not cached(pool, "node-b")
    for pid in (pool.node("node-a")["pid"], before["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    fourth.wait_epoch(before["epoch"] + 1)
    fourth.open(1)
    row = fourth.reach(2)
    assert row["host"] == "node-b"
    assert wait_row(fourth, lambda row: row["module_bytes"])["modules"]["misses"] == 1
    wait_cached(pool, "node-b")
    assert finish(fourth) == expected
