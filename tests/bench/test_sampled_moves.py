"""bench/moves.py: its pool over a slow link, where `auto` gives a replay up, and every mode measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.move import moves
from tests.support.pools.staged import unrepeatable
from tests.support.pools.sweep import SWEEP

#: 4 MiB take 0.7 s: long enough for `auto` to try a replay.
SLOW = "0.05g"


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
