"""The rules of order for applying records."""

from __future__ import annotations

import pytest

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME
from rgpu.session.errors import Corrupt
from rgpu.session.journal.apply_order import ENDS_MEMORY, Apply, ApplyGate, Drop, WaitAll, WaitFor
from rgpu.session.journal.record import Record


def _record(seq: int, name: str, **values: object) -> Record:
    return Record(seq, BY_NAME[name].id, decoders.encode_args(name, **values))


def test_plain_calls_pass_and_repeated_ones_are_dropped() -> None:
    gate = ApplyGate(position=4)
    call = _record(5, "stream_synchronize", stream=0)
    assert gate.feed(call) == (Apply(call),)
    assert gate.feed(call) == (Drop(5),)
    assert gate.position == 5


def test_an_observation_waits_for_what_it_names() -> None:
    gate = ApplyGate()
    launch = _record(1, "stream_synchronize", stream=0)
    seen = _record(2, "completed", observed=1)
    assert gate.feed(launch) == (Apply(launch),)
    assert gate.feed(seen) == (WaitFor(1), Apply(seen))


@pytest.mark.parametrize("observed", [0, 1, 2, 1 << 60])
def test_the_future_is_not_observed(observed: int) -> None:
    with pytest.raises(Corrupt):
        ApplyGate().feed(_record(1, "completed", observed=observed))


@pytest.mark.parametrize("seq", [2, 7, 1 << 60])
def test_a_gap_is_corrupt(seq: int) -> None:
    gate = ApplyGate()
    with pytest.raises(Corrupt) as caught:
        gate.feed(_record(seq, "completed", observed=1))
    assert caught.value.detail["reason"] == "gap" and gate.position == 0


def test_memory_ends_in_replay_when_all_is_complete() -> None:
    gate = ApplyGate(replay_until=2)
    first, second, third = (_record(n, "memory_free", address=n << 30) for n in (1, 2, 3))
    assert gate.replaying
    assert gate.feed(first) == (WaitAll(0), Apply(first))
    assert gate.feed(second) == (WaitAll(1), Apply(second))
    assert not gate.replaying
    assert gate.feed(third) == (WaitAll(2), Apply(third)), "the shim looked at the watermark of a worker that is gone"
    gate.complete(1)
    fourth, fifth = (_record(n, "memory_free", address=n << 30) for n in (4, 5))
    assert gate.feed(fourth) == (WaitAll(2), Apply(fourth)), "what was replayed may be unfinished"
    gate.complete(2)
    assert gate.feed(fifth) == (Apply(fifth),), "live, the shim has looked already"


def test_a_texture_of_a_replay_is_made_when_no_work_is_under_way() -> None:
    """A driver gives its handle to nobody else, nor again, while earlier work may use it."""
    made = [Record(n, BY_NAME["texture_create"].id, b"") for n in (1, 2)]
    gate = ApplyGate(replay_until=1)
    assert gate.feed(made[0]) == (WaitAll(0), Apply(made[0]))
    gate.complete(1)
    assert gate.feed(made[1]) == (Apply(made[1]),), "live, nothing of the program's is waited for"


def test_the_table_of_calls_that_end_memory() -> None:
    assert {BY_ID[n].name for n in ENDS_MEMORY} == {
        "memory_unmap", "memory_free", "host_free", "array_destroy", "texture_destroy"}


def test_two_threads_ordered_on_the_host_only() -> None:
    """Thread 1 waits for its stream, tells thread 2, which launches on another: the launch may not overtake."""
    calls = [
        Record(1, BY_NAME["memset"].id, b"", thread=1),
        Record(2, BY_NAME["stream_synchronize"].id, decoders.encode_args("stream_synchronize", stream=16), thread=1),
        _record(3, "completed", observed=2),
        Record(4, BY_NAME["launch"].id, b"", thread=2),
    ]
    gate, submitted = ApplyGate(replay_until=4), []
    for call in calls:
        for command in gate.feed(call):
            submitted.append(("wait", command.seq) if isinstance(command, WaitFor) else call.seq)
    assert submitted == [1, 2, ("wait", 2), 3, 4]
