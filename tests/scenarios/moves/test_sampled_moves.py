"""Replays that do not come to the same bytes: found in samples before the last pause, repaired in it, or given up.

And globals whose addresses a program keeps in device memory, across moves of either kind and a death.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import OTHER, Staged, moved_or_refused, unrepeatable

PAGES = 64  #: of programs/unrepeatable.py that differ


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
