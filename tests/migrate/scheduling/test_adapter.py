"""The adapter answers where ``placement.place`` would, and refuses as it does."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rgpu.migrate.scheduling.adapter import MIB, place_by_fragmentation
from rgpu.migrate.scheduling.placement import Request, Snapshot, place
from rgpu.session.errors import NotFound, Refused
from tests.support.leader.records import node, session


def test_a_small_session_goes_where_it_spoils_nothing() -> None:
    pool = Snapshot((node("a", 100 * MIB), node("b", 100 * MIB)),
                    (session("x", "b", 50 * MIB), session("y", "b", 1 * MIB).replace(state="ended", owner=None)))
    choice = place_by_fragmentation(pool, Request("s", 50 * MIB))
    assert (choice.host, choice.device, choice.free) == ("b", "cpu:0", 50 * MIB) and "fragments" in choice.reason
    assert place(pool, Request("s", 50 * MIB)).host == "a"
    assert place_by_fragmentation(pool, Request("s", 1, host="a")).host == "a"
    assert place_by_fragmentation(pool, Request("s", 1, avoid_hosts={"b"})).host == "a"


def test_refusals_are_the_same() -> None:
    pool = Snapshot((node("a", 100),), ())
    for request in (Request("s", 101), Request("s", 1, host="z")):
        with pytest.raises((Refused, NotFound)) as old:
            place(pool, request)
        with pytest.raises((Refused, NotFound)) as new:
            place_by_fragmentation(pool, request)
        assert old.value.as_dict() == new.value.as_dict()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40 * MIB), max_size=10), st.integers(0, 40 * MIB))
def test_never_promises_more_than_is_free(quotas: list[int], wanted: int) -> None:
    sessions = tuple(session(f"s{n}", "ab"[n % 2], quota) for n, quota in enumerate(quotas))
    pool = Snapshot((node("a", 100 * MIB), node("b", 100 * MIB + 5)), sessions)
    try:
        place(pool, Request("new", wanted))
    except Refused:
        with pytest.raises(Refused):
            place_by_fragmentation(pool, Request("new", wanted))
    else:
        assert place_by_fragmentation(pool, Request("new", wanted)).free >= wanted
