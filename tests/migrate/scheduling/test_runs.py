"""The sessions of one run share what its first was promised, and go where it is."""

from __future__ import annotations

import pytest

from rgpu.migrate.records.schema import Wants
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.migrate.scheduling.placement import Request, Snapshot
from rgpu.migrate.scheduling.runs import beside, check_run, kept_together
from rgpu.session.errors import AlreadyExists, Refused
from tests.support.leader.records import node, session

WHOLE = Wants(compute=100)
FIRST = session("job", "a", 100).replace(run="job", wants=WHOLE)
SECOND = session("job/2", "a", 100).replace(run="job", wants=WHOLE)


def test_a_run_is_counted_once_on_a_device() -> None:
    pool = Snapshot((node("a", 150), node("b", 150)), (FIRST, SECOND, session("other", "a", 20)))
    assert pool.promised("a", "cpu:0") == 120 and pool.compute_promised("a", "cpu:0") == 100
    assert pool.promised("a", "cpu:0", without="job/3") == 20, "what its run has is its own"
    assert pool.promised("a", "cpu:0", without="other") == 100
    alone = Snapshot(pool.nodes, tuple(one.replace(run="") for one in pool.sessions))
    assert alone.promised("a", "cpu:0") == 220, "sessions of an earlier version share with nobody"


def test_a_further_process_goes_beside_the_others() -> None:
    pool = Snapshot((node("a", 100), node("b", 400)), (FIRST,))
    found = place_by_fragmentation(pool, Request("job/2", 100, compute=100, kept={("a", "cpu:0"): "q"}))
    assert (found.host, found.device) == ("a", "cpu:0") and "a process of the same run" in found.reason
    assert place_by_fragmentation(pool, Request("other", 100, compute=100)).host == "b"
    with pytest.raises(Refused, match="cpu:0 of a is full"):
        place_by_fragmentation(pool, Request("other", 100, host="a"))


def test_where_the_others_are_gone_it_needs_a_place_of_its_own() -> None:
    lost = Snapshot((node("b", 400),), (FIRST,))
    assert beside(lost, Request("job/2", 100)) is None
    assert place_by_fragmentation(lost, Request("job/2", 100, compute=100)).host == "b"
    sick = Snapshot((node("a", 100, state="draining"), node("b", 400)), (FIRST,))
    assert place_by_fragmentation(sick, Request("job/2", 100)).host == "b"


def test_a_run_belongs_to_one_user() -> None:
    check_run((FIRST,), "job/2", FIRST.agent)
    with pytest.raises(AlreadyExists, match="somebody else's"):
        check_run((FIRST,), "job/2", "another key")
    with pytest.raises(AlreadyExists, match="rgpu kill job/2"):
        check_run((SECOND,), "job", SECOND.agent)
    check_run((SECOND.replace(state="ended", owner=None),), "job", "another key")


def test_those_that_share_are_not_moved_to_make_room() -> None:
    assert kept_together((FIRST, session("x", "a", 1).replace(run="x"))) == {}
    assert set(kept_together((FIRST, SECOND))) == {"job", "job/2"}
