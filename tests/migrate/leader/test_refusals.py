"""How many lines of history the refusals of one user make."""

from __future__ import annotations

from rgpu.migrate.leader.capacity.refusals import MOST, USERS, WINDOW, Refusals


def test_a_flood_makes_a_few_lines_and_the_next_one_counts_it() -> None:
    refusals = Refusals()
    written = [refusals.line("ada", f"no place {n}", 100.0 + n / 1000) for n in range(5000)]
    assert written[:MOST] == [f"no place {n}" for n in range(MOST)] and not any(written[MOST:])
    assert refusals.line("bob", "full", 101.0) == "full", "another user's are written"
    after = refusals.line("ada", "full", 100.0 + WINDOW)
    assert after == f"full ({5000 - MOST} refusals before this one were not written down)"
    assert refusals.line("ada", "again", 101.0 + WINDOW) == "again"


def test_what_is_remembered_is_bounded() -> None:
    refusals = Refusals()
    for number in range(USERS + 10):
        refusals.line(f"user{number}", "full", 1.0)
    assert len(refusals._users) == USERS
