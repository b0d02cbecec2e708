"""kill -9 and freezing of the coordinator at each step of a recovery and of a drain; the next one goes on from the
registry alone. Whole in `make sweep`, a seeded sample otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pools.fire import FROZEN_SECONDS, HEAT, Fire
from tests.support.pools.move_cases import COMMANDS
from tests.support.pools.pool import ROOT, LocalPool
from tests.support.pools.sweep import sample

RECOVERY = ("recovery.place", "recovery.place.done", "recovery.start", "recovery.start.done")
DRAIN = ("drain.move", *(f"mover.{command}{after}" for command in COMMANDS for after in ("", ".done")),
         "drain.move.done", "drain.finish")
RECOVERY_CASES = [f"{point}:{action}" for point in RECOVERY for action in ("kill", "stop")]
DRAIN_CASES = [f"{point}:{action}" for point in DRAIN for action in ("kill", "stop")]


@pytest.fixture(scope="module")
def expected(heat_digest: Callable[..., str]) -> str:
    """The digest of an undisturbed run."""
    return heat_digest(**HEAT)


def after(fire: Fire, case: str) -> None:
    """The fault happened; a frozen leader wakes up when others have acted."""
    assert fire.wait_fired(60), "the step was not reached: nothing was tested"
    if case.endswith(":stop"):
        time.sleep(FROZEN_SECONDS)
        fire.thaw()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", sample(RECOVERY_CASES, 1, seed=6))
def test_in_a_recovery(case: str, expected: str) -> None:
    with Fire(case, case) as fire:
        fire.arm()
        (worker,) = fire.workers()
        os.kill(worker, signal.SIGKILL)
        after(fire, case)
        fire.survive(expected, workers=case.endswith(":stop"))  # a killed daemon leaves orphans that serve nobody
        assert "recover" in [event["decision"] for event in fire.pool.rgpu("history", "fire")]


@pytest.mark.parametrize("action", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_while_a_session_is_made(tmp_path: Path, expected: str, action: str) -> None:
    """The record is there, its worker not yet: the program asks again, and gets its session from the next leader."""
    pool = LocalPool(tmp_path, nodes=3, lease=3.0)
    pool.environment["RGPU_FAULT_FILE"] = str(tmp_path / "fault")
    with pool:
        (tmp_path / "fault").write_text(f"create.start:{action}")
        program = pool.heat("made", rest=0, **HEAT)
        assert program.finish(100) == expected
        assert (tmp_path / "fault.create.start.fired").exists(), "nothing was tested"
        for daemon in (tmp_path / "pool" / "nodes").glob("*/server.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(daemon.read_text())["pid"], signal.SIGCONT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", sample(DRAIN_CASES, 1, seed=7))
def test_in_a_drain(case: str, expected: str) -> None:
    with Fire(case, case) as fire:
        host = fire.row["host"]
        fire.arm()
        drain = subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "drain", host, "-o", "json"],
                                 env=fire.pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True)
        after(fire, case)
        out, err = drain.communicate(timeout=120)
        assert drain.returncode == 0 and json.loads(out)["drained"], err
        assert fire.pool.session("fire")["host"] != host
        kept = [event["decision"] for event in fire.pool.rgpu("history", "--host", host)]
        assert kept.count("drained") == 1
        fire.survive(expected, workers=case.endswith(":stop"))  # a killed daemon leaves orphans that serve nobody
