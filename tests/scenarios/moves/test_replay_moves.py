"""Moves by replay on a real local pool: the program's digest is that of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pools.fire import HEAT, OTHER, PACED, Fire
from tests.support.pools.pool import ROOT, LocalPool, Program, VerbError


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("replay"), lease=8.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(heat_digest: Callable[..., str]) -> str:
    return heat_digest(**HEAT)


def paced(pool: LocalPool, name: str, released: Path) -> Program:
    program = pool.run(sys.executable, "-W", "ignore", str(PACED), str(released),
                       *(part for key, value in HEAT.items() for part in (f"--{key}", str(value))), name=name)
    program.wait_lines(4)
    return program


def test_a_replay_moves_a_running_program(pool: LocalPool, expected: str, tmp_path: Path) -> None:
    """There and on, by replay: every page of a deterministic program is right without being sent again."""
    program = paced(pool, "replayed", tmp_path / "released")
    for number in range(2):
        host = pool.wait_state("replayed", "running")["host"]
        result = pool.rgpu("migrate", "replayed", OTHER[host], "--mode", "replay")
        assert (result["outcome"], result["mode"]) == ("committed", "replay"), result
        assert result["verified"] and "fell_back" not in result, (result, pool.logs())
        assert result["mismatched_pages"] == 0, "the program is deterministic: its replay is, too"
        assert result["epoch"] == 2 + number and 0 < result["downtime_ms"] < result["total_ms"]
        assert pool.session("replayed")["host"] == OTHER[host]
    (tmp_path / "released").touch()
    assert program.finish() == expected


def test_what_a_replay_gets_wrong_is_repaired(pool: LocalPool, tmp_path: Path) -> None:
    """Kernels that write the device's timer: the replay differs, the program sees what it saw, events keep their time.

    It goes to and fro, so that events recorded before, between and after the moves stand side by side.
    """
    released = tmp_path / "released"
    program = pool.run(sys.executable, str(ROOT / "tests/scenarios/programs/witness.py"), str(released), name="witness")
    program.wait_lines(6)
    wrong = 0
    for _ in range(2):
        host = pool.wait_state("witness", "running")["host"]
        result = pool.rgpu("migrate", "witness", OTHER[host], "--mode", "replay")
        assert (result["outcome"], result["mode"]) == ("committed", "replay") and "fell_back" not in result, result
        wrong += result["mismatched_pages"]
        program.wait_lines(len(program.lines) + 2)
    assert wrong > 0, "no page differed: the replay cannot have written the same times"
    released.touch()
    program.finish()


def test_a_replay_that_fails_falls_back_to_copying(expected: str) -> None:
    """The destination's replay breaks at its end: its worker is thrown away, another one gets a copy."""
    with Fire("fallback", "replay.compare:fail", "replay") as fire:
        fire.arm()
        move = fire.start_move()
        out, err = move.communicate(timeout=120)
        assert move.returncode == 0, err
        result = json.loads(out)
        assert (result["outcome"], result["mode"], result["epoch"]) == ("committed", "copy", 2), result
        assert "fault point replay.compare" in result["fell_back"]
        fire.released.touch()
        assert fire.program.finish() == expected


def test_a_plan_changes_nothing(pool: LocalPool, expected: str, tmp_path: Path) -> None:
    program = paced(pool, "planned", tmp_path / "released")
    before = pool.session("planned")
    plan = pool.rgpu("migrate", "planned", OTHER[before["host"]], "--dry-run")
    assert plan["forecast"]["copy"]["downtime_ms"] > 0 and plan["forecast"]["mode"] in ("copy", "replay"), plan
    with pytest.raises(VerbError) as refused:
        pool.rgpu("migrate", "planned", before["host"], "--dry-run")
    assert refused.value.code == 5 and "already" in refused.value.text
    after = pool.session("planned")
    assert (after["host"], after["epoch"]) == (before["host"], before["epoch"])
    assert pool.rgpu("migrate", "status", "planned")["move"] is None
    (tmp_path / "released").touch()
    assert program.finish() == expected


def test_a_move_is_aborted_from_anywhere(pool: LocalPool, expected: str, tmp_path: Path) -> None:
    """`migrate abort` while pages stream: the session runs where it was, at its epoch."""
    program = paced(pool, "aborted", tmp_path / "released")
    row = pool.session("aborted")
    # Nothing to abort is no error either.
    asked, aborted = pool.rgpu("migrate", "status", "aborted"), pool.rgpu("migrate", "abort", "aborted")
    assert asked == aborted and asked["move"] is None
    assert pool.rgpu("migrate", "aborted", "--status").keys() == pool.rgpu("migrate", "aborted", "--abort").keys()
    deadline = time.monotonic() + 60
    while True:  # a move here lasts some hundred milliseconds: try until an abort comes in time
        assert time.monotonic() < deadline, "no abort came in time"
        move = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "migrate", "aborted", OTHER[row["host"]], "--mode", "replay",
             "-o", "json"], env=pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = ""
        while move.poll() is None and not said:
            status = pool.rgpu("migrate", "status", "aborted")
            if status["move"] is not None and status["move"]["state"] == "preparing":
                pool.rgpu("migrate", "abort", "aborted")
                said = "asked"
        move.communicate(timeout=60)
        if move.returncode:
            assert move.returncode == 11, "MoveFailed"
            break
        row = pool.wait_state("aborted", "running")
    after = pool.wait_state("aborted", "running")
    assert (after["host"], after["epoch"]) == (row["host"], row["epoch"])
    (tmp_path / "released").touch()
    assert program.finish() == expected
