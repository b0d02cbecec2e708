"""A worker's log stays small, and its newest lines can be asked for all the while."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rgpu.server.node.workers.logs import LOG_LIMIT, WorkerLogs
from rgpu.session.errors import NotFound


def test_a_log_that_grows_is_cut_under_the_worker_that_writes_it(tmp_path: Path) -> None:
    logs, folder = WorkerLogs("a", tmp_path), tmp_path / "workers" / "s"
    folder.mkdir(parents=True)
    writer = os.open(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    for _ in range(6):  # 24 MB in all, as a worker writes that is told to log much
        for _ in range(4000):
            os.write(writer, b"%07d %s\n" % (number, b"x" * 991))
            number += 1
        logs.rotate()
        sizes = [path.stat().st_size for path in folder.iterdir()]
        assert sum(sizes) <= 2 * LOG_LIMIT
        found = asyncio.run(logs.newest(session="s", lines=50))["lines"]
        assert [int(line.split()[0]) for line in found[-40:]] == list(range(number - 40, number))
    os.write(writer, b"the last\n")
    assert asyncio.run(logs.newest(session="s", lines=10))["lines"][-1] == "the last"
    os.close(writer)


def test_small_ones_stay_and_unknown_ones_are_said_so(tmp_path: Path) -> None:
    logs, folder = WorkerLogs("a", tmp_path), tmp_path / "workers" / "s"
    folder.mkdir(parents=True)
    (folder / "worker.log").write_text("one\n")
    logs.rotate()
    assert [path.name for path in folder.iterdir()] == ["worker.log"]
    with pytest.raises(NotFound):
        asyncio.run(logs.newest(session="other"))
