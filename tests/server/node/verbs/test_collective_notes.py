"""What `rgpu ps` says of ranks that stand at a collective."""

from __future__ import annotations

from rgpu.server.node.verbs.rows import waits

CALL = "all_reduce sum of 6 x float32 (24 bytes)"


def figures(**last: object) -> list[dict[str, object]]:
    usual = {"rank": 0, "number": 7, "call": CALL, "complete": False, "seconds": 12.4, "missing": [], "differs": {}}
    return [{"communicator": "00", "ranks": 4, "last": [{**usual, **last}]}]


def test_a_rank_that_waits_is_told_with_whom_it_waits_for() -> None:
    assert waits(figures(missing=[2, 3], waits_for=["train-2", "train-3"])) == [
        f"rank 0 of 4 waits for 12 s in its {CALL} for ranks 2, 3 (sessions train-2, train-3)"]
    assert waits(figures(missing=[2])) == [f"rank 0 of 4 waits for 12 s in its {CALL} for rank 2"]


def test_calls_that_do_not_agree_are_both_named() -> None:
    other = "broadcast of 6 x float32 root 1 (24 bytes)"
    assert waits(figures(differs={1: other}, missing=[3])) == [
        f"rank 0 of 4 waits for 12 s in its {CALL}: rank 1 called {other}"]


def test_what_goes_on_is_not_told() -> None:
    for last in ({"complete": True}, {"seconds": 9.9, "missing": [1]}, {}):
        assert waits(figures(**last)) == []
    assert waits(None) == waits([]) == waits([{"ranks": 2}]) == []
