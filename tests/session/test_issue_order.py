"""The states of catching up, from every prefix of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.session.calls.decoders import encode_args
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.issue_order import (
    EVER,
    FRESH,
    SHARE,
    SHORT,
    TABLE,
    UNBOUNDED,
    WORK,
    Attached,
    Behind,
    Dry,
    Event,
    Gap,
    IssueOrder,
    Lasting,
    Late,
    Replaying,
    Resumed,
    Settled,
    Stalled,
    State,
    Told,
    stream_of,
)

LIVE, ORDERED, OVERLAPPING = State.LIVE, State.ORDERED, State.OVERLAPPING


class World:
    """A program that publishes, a worker that applies and completes: positions only ever grow."""

    def __init__(self, enabled: bool) -> None:
        self.order = IssueOrder(enabled)
        self.enabled = enabled
        self.published = self.applied = self.done = 0
        self.began = 0  #: what was published when the catch-up began, as far as the worker was told
        self.replaying = False

    def move(self, publish: int, apply: int, complete: int) -> None:
        self.published += publish
        self.applied = min(self.applied + apply, self.published)
        self.done = min(self.done + complete, self.applied)

    def event(self, kind: int, usual: int, late: float) -> Event:
        applied, done = self.applied, self.done
        return (Attached(applied, self.published), Replaying(applied), Settled(applied), Resumed(applied, 0.1, usual),
                Gap(applied, "this worker", 2.0, usual), Told(applied, done, self.published, usual, late),
                Dry(applied, done), Stalled(applied, "launch at 7 waited, and call 5"),
                Behind(applied, usual), Lasting(applied, 6.0), Late(applied, 0.005, usual))[kind]

    def take(self, event: Event) -> None:
        order = self.order
        before, counts, reason, target = order.state, (order.catch_ups, order.stalls), order.reason, order.target
        changed = order.handle(event)
        assert changed == (order.state is not before)
        assert changed == (order.reason != reason) or not changed, "a transition without a reason of its own"
        assert order.catching_up == (order.state is not LIVE)
        begun, stalled = order.catch_ups - counts[0], order.stalls - counts[1]
        assert begun == (before is LIVE and order.state is not LIVE)
        assert stalled == (before is ORDERED and order.state is OVERLAPPING) == (begun == 0 and stalled == 1)
        if begun:
            assert order.state is (ORDERED if self.enabled else OVERLAPPING)
        if before is OVERLAPPING:
            assert order.state is not ORDERED, "what may wait for a later call is waited for again"
        if order.state is LIVE:
            assert order.target == 0
            if before is not LIVE and not isinstance(event, (Settled, Lasting)):
                assert self.done >= target, "it ended before what had been published was complete"
        else:
            assert order.target >= target
        if not changed and (order.state, type(event)) not in TABLE:
            assert order.reason == reason


steps = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9),
                           st.sampled_from([0, 3, UNBOUNDED]), st.sampled_from([0.0, FRESH, 9.0])), max_size=30)


@settings(max_examples=500, deadline=None)
@given(steps=steps, enabled=st.booleans())
def test_every_prefix(steps: list[tuple[int, int, int, int, int, float]], enabled: bool) -> None:
    world = World(enabled)
    for kind, publish, apply, complete, usual, late in steps:
        world.move(publish, apply, complete)
        world.take(world.event(kind, usual, late))
    # A program that waits for everything gets there, wherever it was.
    world.move(0, 1 << 30, 1 << 30)
    if world.order.target == EVER:
        world.take(Settled(world.applied))
    world.take(Dry(world.applied, world.done))
    assert world.order.state is LIVE, world.order.reason


def test_each_row_of_the_table_is_reached() -> None:
    """And what is not there changes nothing."""
    events = [Attached(3, 9), Replaying(3), Settled(3), Resumed(3, 0.1, 0), Gap(3, "x", 1.0, 0), Told(9, 9, 9, 0, 0.0),
              Dry(99, 99), Stalled(3, "x"), Behind(3, 0), Lasting(3, 6.0), Late(3, 0.005, 0)]
    for state in State:
        for event in events:
            order = IssueOrder()
            if state is not LIVE:
                order.handle(Attached(3, 9))
            if state is OVERLAPPING:
                order.handle(Stalled(3, "x"))
            before = vars(order).copy()
            order.handle(event)
            if (state, type(event)) not in TABLE:
                assert vars(order) == before, (state, event)


@pytest.mark.parametrize("applied, done, published, usual, late, state", [
    (20, 20, 20, 0, 0.0, LIVE), (20, 19, 20, 0, 0.0, ORDERED), (20, 19, 20, 1, 0.0, LIVE),
    (20, 20, 25, 5, 0.0, LIVE), (20, 20, 25, 4, 0.0, ORDERED), (20, 20, 25, 5, FRESH * 2, ORDERED),
    (20, 20, 900, UNBOUNDED, 9.0, LIVE), (9, 9, 9, UNBOUNDED, 0.0, ORDERED)])
def test_what_the_program_would_have_queued_ends_it(applied: int, done: int, published: int, usual: int, late: float,
                                                   state: State) -> None:
    order = IssueOrder()
    order.handle(Attached(0, 10))
    order.handle(Told(applied, done, published, usual, late))
    assert order.state is state


def test_a_program_that_is_fed_from_a_backlog_at_home() -> None:
    """It is always as far ahead as it may be: standing still changes nothing for it, a replay does."""
    order = IssueOrder()
    for event in (Resumed(5, 3.0, UNBOUNDED), Gap(5, "x", 3.0, UNBOUNDED), Late(5, 0.005, UNBOUNDED)):
        assert not order.handle(event) and not order.catching_up
    assert order.handle(Attached(0, 5)) and order.state is ORDERED


def test_a_program_that_stays_ahead_is_taken_to_be_so() -> None:
    """Where nothing but its distance began the catch-up: after an attach the backlog itself has to go."""
    order = IssueOrder()
    order.handle(Behind(5, 3))
    assert order.state is ORDERED and order.handle(Lasting(9, 6.0)) and order.state is LIVE
    for first, then in ((Behind(5, 3), Attached(5, 9)), (Attached(5, 9), Behind(7, 3))):
        order = IssueOrder()
        order.handle(first)
        order.handle(then)
        assert not order.handle(Lasting(9, 6.0)) and order.state is ORDERED


def test_one_stall_is_enough_for_calls_that_are_a_little_late() -> None:
    """A busy machine is late many times a second: work that waits for later calls is not waited for each time."""
    order = IssueOrder()
    order.handle(Late(5, 0.005, 3))
    assert order.state is ORDERED and "5.0 ms late" in order.reason
    order.handle(Stalled(5, "launch at 6"))
    order.handle(Told(9, 9, 9, 3, 0.0))
    assert order.state is LIVE and order.stalls == 1
    assert not order.handle(Late(9, 0.005, 3)) and order.state is LIVE
    assert order.handle(Gap(9, "this worker", 2.0, 3)) and order.state is ORDERED, "a real backlog is another matter"


def test_a_stall_of_another_backlog_says_nothing_of_lateness() -> None:
    for also in ([], [Late(5, 0.005, 3)]):
        order = IssueOrder()
        for event in (*also, Attached(5, 9), Stalled(5, "launch at 6"), Told(9, 9, 9, 3, 0.0)):
            order.handle(event)
        assert order.state is LIVE and order.handle(Late(9, 0.005, 3))


def test_which_calls_are_work() -> None:
    names = {name for name, call in BY_NAME.items() if call.id in WORK}
    assert names == {"memset", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memcpy2d_h2d", "memcpy2d_d2h", "memcpy2d_d2d",
                     "launch", "graph_launch", "event_record", "stream_wait_event", "imported_event_wait",
                     "host_function", "host_mirror_write", "stream_memory_operation",
                     "array_to_memory", "memory_to_array", "collective_group", "timed"}
    values: dict[str, Any] = dict(event=20, stream=18, flags=0)
    assert stream_of(BY_NAME["event_record"].id, encode_args("event_record", **values)) == 18
    assert stream_of(BY_NAME["host_function_done"].id, b"") is None


def test_a_little_lateness_is_worth_a_little_time() -> None:
    """Where sessions share a GPU all is late, and order makes it later: neither one catch-up nor all of them last."""
    order = IssueOrder()
    order.handle(Late(5, 0.005, 3))
    assert not order.handle(Lasting(5, SHORT)) and order.state is ORDERED
    assert order.handle(Lasting(5, SHORT + 0.05)) and order.state is LIVE and str(SHORT) in order.reason
    assert not order.handle(Late(6, 0.005, 3, share=SHARE + 0.01)) and order.state is LIVE
    assert order.handle(Late(6, 0.005, 3, share=SHARE)) and order.state is ORDERED
    order.handle(Attached(6, 9))  # a backlog of its own: that has to go
    assert not order.handle(Lasting(6, 60.0)) and order.state is ORDERED
