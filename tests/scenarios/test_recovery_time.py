"""How long a killed worker's session stands still, with and without spare workers, in one run."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.scenarios.pool import LocalPool

KILLS = 3


def recovery(folder: Path, spares: int) -> list[float]:
    """Seconds from kill -9 of the worker to the next line that the program computed behind it."""
    found = []
    pool = LocalPool(folder, nodes=1)
    pool.environment["RGPU_SPARES"] = str(spares)
    with pool:
        expected = pool.heat("still", n=64, steps=200, report=50).finish()
        for number in range(KILLS):
            time.sleep(3.0)  # a spare is started while nobody waits
            program = pool.heat(f"kill-{number}", n=64, steps=4000, report=10)
            program.wait_lines(20)
            row = pool.wait_state(program.name, "running")
            if spares:
                _wait_spare(folder)
            os.kill(row["worker_pid"], signal.SIGKILL)
            began, seen = time.monotonic(), len(program.lines)
            # Lines whose answers were under way may still come; the first one behind a silence is the recovered one.
            last, longest = began, 0.0
            while program.process.poll() is None and longest < 0.3:
                if len(program.lines) > seen:
                    seen, now = len(program.lines), time.monotonic()
                    longest, last = max(longest, now - last), now
                time.sleep(0.001)
            found.append(last - began)
            program.finish()
            assert pool.session(program.name)["epoch"] > row["epoch"]
        assert expected
    return found


def _wait_spare(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while not list(folder.glob("pool/nodes/*/spares/*.sock")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spares_shorten_recovery(tmp_path: Path) -> None:
    without = recovery(tmp_path / "without", 0)
    with_spares = recovery(tmp_path / "with", 1)
    ratio = statistics.median(with_spares) / statistics.median(without)
    print(f"recovery without spares {[round(s, 2) for s in without]} s, with {[round(s, 2) for s in with_spares]} s, "
          f"ratio of medians {ratio:.2f}")
    assert ratio < 0.8, "a spare that saves nothing is not worth its memory"
