"""What bench/move/moves.py computes from what it saw, and the digests it expects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from bench.move import move_load, moves
from bench.move.move_rows import Pace, around, cost, judge, pace, stop_of, table


# -- pace -------------------------------------------------------------------------------
def test_an_undisturbed_program_loses_nothing() -> None:
    steps = [0.1 * n for n in range(100)]
    found = pace(steps, 5.0, 8.0)
    assert found is not None and found.before == pytest.approx(10.0) and found.slowdown < 0.04 and found.lost < 0.11


def test_half_speed_is_half_lost() -> None:
    steps = [0.1 * n for n in range(50)] + [5.0 + 0.2 * n for n in range(1, 21)]
    found = pace(steps, 5.0, 9.0)
    assert found is not None
    assert found.slowdown == pytest.approx(0.5, abs=0.03) and found.lost == pytest.approx(2.0, abs=0.11)


def test_too_few_steps_say_nothing() -> None:
    assert pace([1.0, 2.0], 3.0, 4.0) is None and pace([0.1 * n for n in range(50)], 4.0, 4.0) is None


def test_the_stop_is_found_wherever_the_verb_began_and_ended() -> None:
    """A move of 1 s with a stop of 0.5 s at its end; the verb itself took 0.4 s more before it and 0.3 s behind it."""
    steps = [0.01 * n for n in range(401)]  # to 4.0 s at full speed
    steps += [4.0 + 0.02 * n for n in range(1, 26)]  # half speed to 4.5 s while pages go
    steps += [5.0 + 0.01 * n for n in range(30)]  # after the stop
    assert stop_of(steps, 3.6, 5.3) == (pytest.approx(4.5), pytest.approx(5.0))
    found = around(steps, 3.6, 5.3, took=1.0, downtime=0.5)
    assert found is not None and found.before == pytest.approx(100, rel=0.01)
    assert found.slowdown == pytest.approx(0.5, abs=0.05) and found.lost == pytest.approx(0.25, abs=0.03)


def test_without_a_clear_stop_the_move_ends_with_the_verb() -> None:
    steps = [0.1 * n for n in range(100)]
    assert around(steps, 5.0, 8.0, took=1.0, downtime=0.05) == pace(steps, 8.0 - 0.05 - (1.0 - 0.05), 8.0 - 0.05)


# -- auto ---------------------------------------------------------------------------------
def row(asked: str, mode: str, downtime_ms: float, brownout_ms: float, **values: Any) -> dict[str, Any]:
    return {"name": "train", "size_gib": 10.0, "link": "10g", "asked": asked, "mode": mode,
            "downtime_ms": downtime_ms, "brownout_ms": brownout_ms, **values}


def test_auto_is_right_when_its_mode_cost_least() -> None:
    copy, replay = row("copy", "copy", 9000, 400), row("replay", "replay", 60, 9000)
    right, wrong = row("auto", "replay", 70, 9100), row("auto", "copy", 9000, 300)
    judge([copy, replay, right, wrong])
    assert cost(copy) == pytest.approx(180.4) and cost(replay) == pytest.approx(10.2)
    assert right["auto_right"] is True and "which was right" in right["verdict"]
    assert wrong["auto_right"] is False and "WRONG" in wrong["verdict"] and "copy 180.40 s" in wrong["verdict"]
    assert "auto_right" not in copy


def test_modes_that_cost_alike_are_both_right() -> None:
    rows = [row("copy", "copy", 100, 0), row("replay", "replay", 105, 0), row("auto", "replay", 100, 0)]
    judge(rows)
    assert rows[2]["auto_right"] is True


def test_nothing_is_judged_without_both_rivals() -> None:
    rows = [row("copy", "copy", 1, 1), row("auto", "copy", 1, 1), row("replay", "replay", 1, 1, link="25g"),
            row("replay", "-", 0, 0, error="failed")]
    judge(rows)
    assert "auto_right" not in rows[1]


def test_rows_are_shown() -> None:
    rows = [row("auto", "replay", 70, 9100, auto_right=False), {"name": "x", "error": "e" * 500}]
    shown = table(rows).splitlines()
    assert "NO" in shown[1] and "9100" in shown[1] and len(shown[2]) < 600 and shown[2].rstrip().endswith("e")


def test_links_by_name() -> None:
    assert [moves.gigabits(link) for link in ("loopback", "10g", "0.5g")] == [0.0, 10.0, 0.5]
    assert moves.host_of("0.5g") == "to-0-5g"


def test_a_pace_of_nothing_is_all_lost() -> None:
    assert Pace(10.0, 0.0, 3.0).slowdown == 1.0 and Pace(10.0, 11.0, 0.0).slowdown == 0.0


# -- digests ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", move_load.DETERMINISTIC)
@pytest.mark.parametrize("steps", [0, 1, 37])
def test_digests_are_those_of_running_it(kind: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step on plain arrays, as the kernels do it; several allocations, the last one shorter."""
    monkeypatch.setattr(move_load, "CHUNK", 3 << 18)
    counts = move_load.counts(2)
    assert sum(counts) * 4 == 2 << 20 and len(set(counts)) == 2
    chunks = [np.ones(count, np.uint32) for count in counts]

    def touch(data: np.ndarray[Any, Any], add: int) -> None:
        data[:] = data * np.uint32(1664525) + np.uint32(add) + np.arange(len(data), dtype=np.uint32)

    for data in chunks:
        touch(data, 7)
    for number in range(1, steps + 1):
        if kind == "weights":
            chunk, at, words = move_load.window(counts, number)
            touch(chunks[chunk][at:at + words], number)
        else:
            for data in chunks:
                touch(data, number)
    digest = blake3()
    for data in chunks:
        digest.update(data.view(np.uint8))
    assert move_load.expected_digest(kind, 2, steps) == digest.hexdigest()
