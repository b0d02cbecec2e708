"""From the death of a worker to a successor that may be attached to, with and without warm workers, in one run.

This is the part of a recovery that warm workers shorten: processes started, device
made. Behind it come attaching and the replay, which take as long either way.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.pools.pool import LocalPool

KILLS = 3
TAKEN = "a warm worker takes the session"


def recovery(folder: Path, warm: int) -> list[float]:
    """Seconds between the daemon's two log lines, for each kill."""
    pool = LocalPool(folder, nodes=1)
    pool.environment["RGPU_SPARES"] = str(warm)
    found = []
    with pool:
        for number in range(KILLS):
            name = f"kill-{number}"
            program = pool.heat(name, n=64, steps=10**6, report=50)
            program.wait_lines(2)
            row = pool.wait_state(name, "running")
            if warm:  # also when the session has just taken one
                _wait(program, lambda: len(_events(folder, "a warm worker is ready")) > len(_events(folder, TAKEN)))
            os.kill(row["worker_pid"], signal.SIGKILL)
            _wait(program, lambda name=name: len(_events(folder, "session starts here", name)) == 2)
            (died,), (_, back) = _events(folder, "a worker died", name), _events(folder, "session starts here", name)
            found.append((_time(back) - _time(died)).total_seconds())
            program.stop()
        if warm:
            assert len(_events(folder, TAKEN)) >= KILLS
    return found


def _wait(program: Any, what: Any) -> None:
    while not what():
        assert program.process.poll() is None, "the program was over before the fault"
        time.sleep(0.02)


def _events(folder: Path, event: str, session: str = "") -> list[dict[str, Any]]:
    text = (folder / "pool" / "nodes" / "node-a" / "server.log").read_text()
    rows = [json.loads(line) for line in text.splitlines(True) if line.startswith("{") and line.endswith("}\n")]
    return [row for row in rows if row.get("event") == event and (not session or row.get("session") == session)]


def _time(row: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(row["timestamp"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_warm_workers_shorten_recovery(tmp_path: Path) -> None:
    without = recovery(tmp_path / "without", 0)
    with_warm = recovery(tmp_path / "with", 1)
    ratio = statistics.median(with_warm) / statistics.median(without)
    print(f"a successor stood ready without warm workers after {without} s, with them after {with_warm} s, "
          f"ratio of medians {ratio:.2f}")
    assert ratio < 0.5, "a warm worker that saves nothing is not worth its memory"
