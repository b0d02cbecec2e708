"""Pages of sessions and requests: what fits a question, in the order of names, whatever is asked."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.migrate.records import listing
from rgpu.migrate.records.schema import Program, QueueRecord, SessionRecord, Wants


def session(number: int, state: str = "running") -> SessionRecord:
    over = state in listing.OVER
    return SessionRecord(name=f"s{number:04}", state=state, owner=None if over else f"node-{'ab'[number % 2]}",
                         incarnation=1, epoch=1, quota=1 << 30, agent="", device="cpu:0", user=f"u{number % 3}",
                         program=Program(command=f"train --seed {number}"), wants=Wants(labels={"team": "A"}))


#: The last ones first: 101 that run, nine that are over, one that waits.
RECORDS: list[listing.Listed] = [*(session(n, "failed" if n > 105 else "ended") for n in range(109, 100, -1)),
                                 *(session(n) for n in range(100, -1, -1)),
                                 QueueRecord(name="r1", quota=1 << 30, user="u0", program=Program(command="later"))]


def names(**question: Any) -> list[str]:
    found = listing.page(RECORDS, question, lambda record: record.user)
    return [record.name for record in found.records]


@pytest.mark.parametrize(("asked", "number"), [(None, 1), ("1", 1), (3, 3), ("99", 3), ("0", 1), ("-1", 1), ("x", 1),
                                               ("²", 1), ("9" * 400, 1), ({"a": []}, 1)])
def test_the_page_or_the_nearest_one_that_there_is(asked: Any, number: int) -> None:
    found = listing.page(RECORDS, {"page": asked}, lambda record: record.user)
    assert (found.number, found.pages, found.total) == (number, 3, 102)
    assert len(found.records) == (2 if number == 3 else listing.PER_PAGE)
    assert found.states == ("queued", "running")


def test_what_is_looked_for() -> None:
    assert names()[:2] == ["r1", "s0000"] and names(page=3) == ["s0099", "s0100"]
    assert names(state="queued") == ["r1"] and names(all=True, state="failed") == ["s0106", "s0107", "s0108", "s0109"]
    assert names(state="failed") == [] and names(all=True, state="failed", user="u1") == ["s0106", "s0109"]
    assert names(q="SEED 77") == ["s0077"] and names(q="s0100") == ["s0100"]
    assert names(q="TEAM=a", host="node-b")[:2] == ["s0001", "s0003"] and names(q="team=b") == []
    assert names(host=["node-a"]) == [] and names(q=77) == ["s0077"]


def test_of_nothing_there_is_one_page() -> None:
    found = listing.page([], {"page": 4}, lambda record: "")
    assert (found.number, found.pages, found.total, found.states) == (1, 1, 0, ())
