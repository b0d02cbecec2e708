"""Replays that do not come to the same bytes: found in samples before the last pause, repaired in it, or given up.

And globals whose addresses a program keeps in device memory, across moves of either kind and a death.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from bench import moves
from tests.scenarios.conftest import SWEEP
from tests.support.pools.pool import ROOT, LocalPool, Program
from tests.support.pools.staged import OTHER, Staged, moved_or_refused

PAGES = 64  #: of programs/unrepeatable.py that differ
#: 4 MiB take 0.7 s: long enough for `auto` to try a replay.
SLOW = "0.05g"


def unrepeatable(pool: LocalPool, name: str, released: Path, **options: tuple[str, ...]) -> Program:
    program = pool.run(sys.executable, str(ROOT / "tests/scenarios/programs/unrepeatable.py"), str(released), name=name,
                       **options)
    program.wait_lines(3)
    return program


def test_everything_that_a_replay_got_wrong_is_repaired_and_counted(pool: LocalPool, tmp_path: Path) -> None:
    """Whoever asks for a replay gets it: the program has what it had at the source, bit for bit."""
    program = unrepeatable(pool, "unrepeatable", tmp_path / "released")
    seen = 0
    for number in range(6):  # a sample may come before the program's next step
        result = pool.rgpu("migrate", "unrepeatable", OTHER[pool.wait_state("unrepeatable", "running")["host"]],
                           "--mode", "replay")
        assert (result["outcome"], result["mode"]) == ("committed", "replay") and "fell_back" not in result, result
        assert PAGES <= result["mismatched_pages"] <= PAGES + 4, result
        assert PAGES << 16 <= result["repaired_bytes"] <= (PAGES + 4) << 16, result
        assert result["sampled_mismatches"] <= result["sampled_pages"], result
        seen = max(seen, result["sampled_mismatches"])
        story = next(row for row in reversed(pool.rgpu("history", "unrepeatable")) if row["decision"] == "commit")
        assert f"by replay, {result['mismatched_pages']} of " in story["reason"], story
        program.wait_lines(len(program.lines) + 2)
        if number and seen >= PAGES:
            break
    assert seen >= PAGES, "no sample saw what the replays got wrong"
    (tmp_path / "released").touch()
    program.finish()


def test_auto_gives_a_useless_replay_up_early(tmp_path: Path) -> None:
    """Over a slow link a replay looks better, until the first sample: then the move copies, and says why."""
    released = tmp_path / "released"
    with moves.MovesPool(tmp_path / "pool-folder", ["cpu"], [SLOW]) as pool:
        program = unrepeatable(pool, "unrepeatable", released, options=("--host", "origin"))
        result = pool.rgpu("migrate", "unrepeatable", moves.host_of(SLOW), "--mode", "auto", timeout=120)
        assert (result["outcome"], result["mode"]) == ("committed", "copy"), result
        assert "sampled pages differ" in result["fell_back"], result
        program.wait_lines(len(program.lines) + 2)
        released.touch()
        program.finish()


@pytest.mark.slow
@pytest.mark.skipif(not SWEEP, reason="measures every mode: part of `make sweep`")
def test_every_mode_is_measured_and_autos_choice_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/moves scaled down: training over a slow link is replayed, what no replay can repeat is copied."""
    monkeypatch.setattr(sys, "argv", ["moves.py", "--device", "cpu", "--sizes-mib", "4", "--link-gbit", "0.05",
                                      "--loads", "train,timer", "--budget", "280"])
    rows, skipped = moves.run(moves.arguments())
    print(moves.move_rows.table(rows), *skipped, sep="\n")
    assert not [row["error"] for row in rows if "error" in row] and len(rows) == 6
    by = {(row["name"], row["asked"]): row for row in rows}
    assert by["train", "auto"]["mode"] == "replay" and by["train", "auto"]["auto_right"], by["train", "auto"]
    assert by["train", "replay"]["downtime_ms"] < by["train", "copy"]["downtime_ms"] / 2
    assert by["train", "replay"]["mismatched_pages"] == 0 < by["timer", "replay"]["mismatched_pages"]
    assert by["timer", "auto"]["mode"] == "copy" and "sampled" in by["timer", "auto"]["fell_back"]
    assert all(row["equal"] for row in rows if row["name"] == "train")


# -- addresses in device memory -----------------------------------------------------------
def test_addresses_of_globals_in_device_memory(pool: LocalPool, tmp_path: Path) -> None:
    """Modules come and go; whoever gets the session has every variable where the program's pointers lead."""
    expected = Staged(pool, tmp_path, "pointers", name="pointers-still")
    expected.open(9, 19, 29)
    digest = expected.finish()
    staged = Staged(pool, tmp_path, "pointers")
    for gate, mode in (("9", "copy"), ("19", "replay")):
        row = staged.reach(gate)
        moved_or_refused(pool, staged.name, OTHER[row["host"]], mode)
        staged.open(gate)
    row = staged.reach("29")
    os.kill(row["worker_pid"], signal.SIGKILL)
    staged.wait_epoch(row["epoch"] + 1)
    staged.open("29")
    assert staged.finish() == digest
