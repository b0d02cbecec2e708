"""What `rgpu ps` says of ranks that stand at a collective."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.server.node.gangs.waits import last_collective, read_figures, who_waits

CALL = "all_reduce sum of 6 x float32 (24 bytes)"


def figures(**last: object) -> list[dict[str, object]]:
    usual = {"rank": 0, "number": 7, "call": CALL, "complete": False, "seconds": 12.4, "missing": [], "differs": {}}
    return [{"communicator": "00", "ranks": 4, "last": [{**usual, **last}]}]


def waits(said: Any) -> list[str]:
    return who_waits(read_figures(said))


def test_a_rank_that_waits_is_told_with_whom_it_waits_for() -> None:
    assert waits(figures(missing=[2, 3], waits_for=["train-2", "train-3"])) == [
        f"rank 0 of 4 waits for 12 s in its {CALL} for ranks 2, 3 (sessions train-2, train-3)"]
    assert waits(figures(missing=[2], waits_for=["train-2"]))[0].endswith(" for rank 2 (session train-2)")
    assert waits(figures(missing=[2])) == [f"rank 0 of 4 waits for 12 s in its {CALL} for rank 2"]


def test_calls_that_do_not_agree_are_both_named() -> None:
    other = "broadcast of 6 x float32 root 1 (24 bytes)"
    assert waits(figures(differs={1: other}, missing=[3])) == [
        f"rank 0 of 4 waits for 12 s in its {CALL}: rank 1 called {other}"]


def test_what_goes_on_is_not_told() -> None:
    for last in ({"complete": True}, {"seconds": 9.9, "missing": [1]}, {}):
        assert waits(figures(**last)) == []
    assert waits(None) == waits([]) == waits([{"ranks": 2}]) == []


def test_ranks_that_wait_for_the_same_are_told_together() -> None:
    """Of several sessions, each with its own view of the communicator."""
    said = [*figures(missing=[2], waits_for=["train.2"]),
            *figures(rank=1, seconds=14.6, missing=[2], waits_for=["train.2"]), *figures(rank=3, missing=[0, 2]),
            *figures(rank=2, number=6, complete=True)]
    assert waits(said) == [
        f"ranks 0, 1 of 4 wait for 15 s in their {CALL} for rank 2 (session train.2)",
        f"rank 3 of 4 waits for 12 s in its {CALL} for ranks 0, 2"]
    other = [{**one, "communicator": "01"} for one in figures(rank=1, missing=[2])]
    assert len(waits(figures(missing=[2]) + other)) == 2, "another communicator is another matter"


def test_the_last_collective_is_what_began_last() -> None:
    said = figures(number=9, seconds=3.0, kind="broadcast", bytes=8) + figures(number=4, seconds=5.5)
    assert last_collective(read_figures(said)) == {"communicator": "00", "rank": 0, "number": 9, "kind": "broadcast",
                                                   "bytes": 8, "complete": False, "since_s": 3.0}
    assert last_collective(()) is last_collective(read_figures([{"ranks": 2}])) is None


@pytest.mark.parametrize("said", [3, {}, "x", [3], [{"last": 3}], figures(rank="x", missing=[1]),
                                  figures(missing=1), figures(seconds="soon", missing=[1]), figures(call=None)])
def test_what_a_worker_says_may_be_anything(said: Any) -> None:
    assert waits(said) == [] and last_collective(read_figures(said)) is None


def test_what_a_worker_says_is_shown_without_what_a_terminal_obeys() -> None:
    said = figures(call="\x1b[31mred" + "x" * 1000, kind="\x1b[0m", missing=[1], waits_for=["\x1b[1mbold"])
    (line,), last = waits(said), last_collective(read_figures(said))
    assert last is not None and "\x1b" not in line + last["kind"] and len(line) < 400
