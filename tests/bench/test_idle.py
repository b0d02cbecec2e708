"""An idle session costs next to nothing: agent, worker and daemon sleep, and wake for what comes."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import pytest

from bench.pool.idle import SLEEPER, measured, parts
from tests.support.pools.pool import LocalPool

#: Times a second that a process may go to sleep. What is counted, not what is timed: a busy machine makes a wake-up
#: dearer, and hardly any more of them. Before they were counted it was 21 (agent), 24 (worker) and 157 (daemon).
MOST = {"agent": 5.0, "worker": 12.0, "daemon": 25.0}


@pytest.mark.slow
def test_an_idle_session_wakes_hardly_anybody_and_goes_on(tmp_path: Path) -> None:
    with LocalPool(tmp_path, 1, 5.0) as pool:
        program = pool.run(sys.executable, str(SLEEPER), str(tmp_path / "end"), name="idle")
        program.wait_lines(1)
        pids = parts(pool, "idle")
        time.sleep(12)
        found = measured(pids, 15)
        assert {name: one.wakes for name, one in found.items() if one.wakes > MOST[name]} == {}
        log = pool.folder / "pool" / "nodes" / "node-a" / "workers" / "idle" / "worker.log"
        text = log.read_text()
        assert "made no progress" not in text and "was paused" not in text, "a rest was taken for a stop"
        (tmp_path / "end").touch()
        assert program.finish() == hashlib.sha256(bytes([7]) * (1 << 20)).hexdigest()
