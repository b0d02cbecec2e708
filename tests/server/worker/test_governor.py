"""The governor against model programs: one that copying slows, one that it does not, one that does hardly anything."""

from __future__ import annotations

import pytest

from rgpu.server.worker.governor import FEWEST, LEAST, TOLERATED, Governor

PIECE = 0.004  #: seconds that copying one frame takes


def run(before: float, costs: float, seconds: float = 20.0) -> tuple[Governor, float, float]:
    """(governor, share of its speed that the program kept, pieces a second). The program loses ``costs`` while a piece
    is copied, nothing while the copying rests."""
    governor, now, calls, pieces = Governor(before), 0.0, 0.0, 0
    while now < seconds:
        now += PIECE
        calls += before * (1 - costs) * PIECE
        rest = governor.rest(now, int(calls), PIECE)
        now += rest
        calls += before * rest
        pieces += 1
    return governor, calls / (before * now), pieces / now


def test_a_program_that_copying_slows_keeps_its_speed() -> None:
    _, kept, pieces = run(1000.0, 0.5)
    assert kept >= 1 - TOLERATED - 0.05, kept
    assert pieces * PIECE >= LEAST, "the copying goes on all the same"


@pytest.mark.parametrize("costs", [0.0, TOLERATED / 2])
def test_a_program_that_copying_does_not_slow_costs_no_rest(costs: float) -> None:
    governor, _, pieces = run(1000.0, costs)
    assert governor.rested == 0.0 and pieces == pytest.approx(1 / PIECE, rel=0.01)


def test_a_program_that_slows_by_itself_delays_the_copying_only_so_much() -> None:
    governor, now = Governor(1000.0), 0.0
    for _ in range(2000):  # it stops calling altogether
        now += PIECE
        now += governor.rest(now, 5, PIECE)
    assert governor.share == LEAST and now <= 2000 * PIECE / LEAST * 1.01


def test_it_speeds_up_again() -> None:
    governor, now, calls = Governor(1000.0), 0.0, 0.0
    for number in range(3000):
        now += PIECE
        calls += PIECE * (200 if number < 300 else 1000)
        rest = governor.rest(now, int(calls), PIECE)
        now += rest
        calls += rest * (200 if number < 300 else 1000)
    assert governor.share == 1.0


def test_hardly_any_calls_tell_nothing() -> None:
    governor, now = Governor(FEWEST - 1), 0.0
    for _ in range(500):
        now += PIECE
        assert governor.rest(now, 0, PIECE) == 0.0
