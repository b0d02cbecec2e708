"""The throttle against model programs: one that copying slows, one that it does not, one that does hardly anything."""

from __future__ import annotations

import pytest

from rgpu.server.worker.copy_throttle import FEWEST, LEAST, TOLERATED, CopyThrottle

PIECE = 0.004  #: seconds that copying one frame takes


def run(before: float, costs: float, seconds: float = 20.0) -> tuple[CopyThrottle, float, float]:
    """(throttle, share of its speed that the program kept, pieces a second). The program loses ``costs`` while a piece
    is copied, nothing while the copying rests."""
    throttle, now, calls, pieces = CopyThrottle(before), 0.0, 0.0, 0
    while now < seconds:
        now += PIECE
        calls += before * (1 - costs) * PIECE
        rest = throttle.rest(now, int(calls), PIECE)
        now += rest
        calls += before * rest
        pieces += 1
    return throttle, calls / (before * now), pieces / now


def test_a_program_that_copying_slows_keeps_its_speed() -> None:
    _, kept, pieces = run(1000.0, 0.5)
    assert kept >= 1 - TOLERATED - 0.05, kept
    assert pieces * PIECE >= LEAST, "the copying goes on all the same"


@pytest.mark.parametrize("costs", [0.0, TOLERATED / 2])
def test_a_program_that_copying_does_not_slow_costs_no_rest(costs: float) -> None:
    throttle, _, pieces = run(1000.0, costs)
    assert throttle.rested == 0.0 and pieces == pytest.approx(1 / PIECE, rel=0.01)


def test_a_program_that_slows_by_itself_delays_the_copying_only_so_much() -> None:
    throttle, now = CopyThrottle(1000.0), 0.0
    for _ in range(2000):  # it stops calling altogether
        now += PIECE
        now += throttle.rest(now, 5, PIECE)
    assert throttle.share == LEAST and now <= 2000 * PIECE / LEAST * 1.01


def test_it_speeds_up_again() -> None:
    throttle, now, calls = CopyThrottle(1000.0), 0.0, 0.0
    for number in range(3000):
        now += PIECE
        calls += PIECE * (200 if number < 300 else 1000)
        rest = throttle.rest(now, int(calls), PIECE)
        now += rest
        calls += rest * (200 if number < 300 else 1000)
    assert throttle.share == 1.0


def test_hardly_any_calls_tell_nothing() -> None:
    throttle, now = CopyThrottle(FEWEST - 1), 0.0
    for _ in range(500):
        now += PIECE
        assert throttle.rest(now, 0, PIECE) == 0.0
