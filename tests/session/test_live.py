"""Live objects: what is kept of a session's modules, memory, contexts and graphs, call by call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Effect
from rgpu.session.errors import Corrupt, RecoveryFailed
from rgpu.session.journal.record import Record
from rgpu.session.objects import ahead, graphs, module_table
from rgpu.session.objects.live import LiveObjects
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable
from rgpu.session.objects.object_calls import HANDLERS
from tests.support.naive_device import NaiveDevice, call

MIB2 = 2 << 20


def _objects(*records: Record) -> LiveObjects:
    live = LiveObjects()
    for record in records:
        live.apply(record)
    return live


def _load(seq: int, number: int, content: bytes = b"first", context: int = 1) -> Record:
    return call(seq, "module_load", content, module=number, context=context, library=0, options=b"")


def _answer(place: int, name: str = "g", functions: int = 1) -> bytes:
    table = ModuleTable((FunctionInfo("f", (), (0,) * 16),) * functions, (GlobalVariable(name, place, 8),))
    return decoders.encode_reply("module_load", table=module_table.encode(table), log=b"")


def test_every_call_that_changes_objects_is_handled() -> None:
    assert set(HANDLERS) == {c.id for c in BY_ID.values() if c.effect not in (Effect.NONE, Effect.WRITES)}


def test_a_long_session_stays_small() -> None:
    live, seq = LiveObjects(), 0
    for _ in range(500):
        for record in (call(seq + 1, "stream_create", stream=16, context=1, flags=0, priority=0),
                       call(seq + 2, "memory_map", address=1 << 45, size=MIB2, device=0),
                       call(seq + 3, "memory_allocate", address=1 << 45, size=512),
                       call(seq + 4, "memory_free", address=1 << 45),
                       call(seq + 5, "memory_unmap", address=1 << 45, size=MIB2),
                       call(seq + 6, "stream_destroy", stream=16)):
            live.apply(record)
            seq = record.seq
    assert live.structural_calls() == [] and live.position == seq


def test_modules_are_held_once_by_content() -> None:
    live = LiveObjects()
    content = bytes(100_000)
    for n in range(20):
        live.apply(_load(2 * n + 1, 16 + n, content))
        live.answered(2 * n + 1, 0, _answer(5))
        live.apply(call(2 * n + 2, "module_unload", module=16 + n))
    assert len(live.structural_calls()) == 40 and live.payload_bytes == 100_000
    assert len(msgspec.msgpack.encode(live.to_dict())) < 110_000
    assert [alive for *_, alive in live.module_history()] == [False] * 20


def test_a_dead_context_stays_while_a_module_was_loaded_into_it() -> None:
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0), _load(2, 16),
                    call(3, "context_destroy", context=1))
    assert [r.seq for r in live.structural_calls()] == [1, 2, 3]
    live.answered(2, 209, b"")  # the load failed after all
    assert live.structural_calls() == []
    live.check()


def test_allocations_outlive_contexts_that_leave_no_trace() -> None:
    """Context 2 kept the memory alive, and is not replayed: context 1 must not take the memory with it."""
    def create(seq: int, number: int) -> Record:
        return call(seq, "context_create", context=number, device=0, flags=0, primary=0)

    records = [create(1, 1), _load(2, 16), create(3, 2), call(4, "memory_allocate", address=1 << 45, size=512),
               call(5, "context_destroy", context=1), create(6, 3), call(7, "context_destroy", context=2)]
    live, first, second = LiveObjects(), NaiveDevice(), NaiveDevice()
    for record in records:
        live.apply(record)
        if answer := first.apply(record):
            live.answered(record.seq, *answer)
    assert [r.seq for r in live.structural_calls()] == [1, 2, 5, 6, 4]
    for record in live.structural_calls():
        second.apply(record)
    assert second.state() == first.state() and first.memory


def test_settings_end_with_their_module() -> None:
    live = _objects(_load(1, 16), *(call(seq, "function_attribute", module=16, function=0, attribute=seq % 2, value=seq)
                                    for seq in range(2, 9)))
    live.answered(1, 0, _answer(5))
    assert [r.seq for r in live.structural_calls()] == [1, 7, 8]
    live.apply(call(9, "module_unload", module=16))
    assert [r.seq for r in live.structural_calls()] == [1, 9]


def test_a_session_opens_once() -> None:
    live = _objects(*(call(seq, "session_open", version=1, pid=seq, environment=b"") for seq in (1, 2)))
    assert [r.seq for r in live.structural_calls()] == [1]


def test_a_replayed_load_is_compared() -> None:
    live = _objects(_load(1, 16))
    live.answered(1, 0, _answer(0x400))
    assert live.load_differs(1, 0, _answer(0x400)) is None
    moved = live.load_differs(1, 0, _answer(0x800))
    assert moved is not None and "0x400" in moved.what and "0x800" in moved.what
    assert live.load_differs(1, 0, _answer(0x400, name="h")) is not None
    assert live.load_differs(1, 0, _answer(0x400, functions=2)) is not None
    failed = live.load_differs(1, 218, b"")
    assert failed is not None and "218" in failed.what
    live.apply(call(2, "module_unload", module=16))
    assert live.load_differs(1, 0, _answer(0x400)) is None
    assert live.load_differs(1, 0, _answer(0x800)) is not None, "dead modules decide addresses too"


def test_a_graph_comes_after_what_its_updates_name() -> None:
    """The updated node names a module that was loaded after the graph was made."""
    kernel = graphs.KernelNode(16, 0, (1, 1, 1), (1, 1, 1), 0, False, b"x", b"")
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0),
                    call(2, "graph_instantiate", graphs.encode([kernel]), exec=20, context=1, flags=0), _load(3, 17))
    live.answered(3, 0, _answer(5))
    other = graphs.KernelNode(17, 0, (1, 1, 1), (1, 1, 1), 0, False, b"y", b"")
    for seq in range(4, 200):
        live.apply(call(seq, "graph_exec_update", graphs.encode_changes({0: other}), exec=20))
    _, load, graph = live.structural_calls()
    assert (load.seq, graph.seq) == (3, 2) and graphs.decode(graph.payload) == [other]
    live.apply(call(200, "graph_exec_destroy", exec=20))
    assert [r.seq for r in live.structural_calls()] == [1, 3]


def test_an_unknown_kind() -> None:
    with pytest.raises(KeyError):
        LiveObjects().handles("graph")


def test_hostile_dictionaries() -> None:
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0), _load(2, 16))
    live.answered(2, 0, _answer(5))
    good = live.to_dict()
    assert LiveObjects.from_dict(good).to_dict() == good
    row, answer = good["calls"][1], good["answers"][0]
    for change in (
        {"version": 2}, {"position": "9"}, {"position": 0}, {"payloads": None}, {"payloads": ["text"]},
        {"payloads": []},
        {"calls": [1]}, {"calls": [row, row]}, {"calls": [[0, *row[1:]]]}, {"calls": [[2, 23, 0, 0, b"", -1]]},
        {"calls": [[*row[:4], b"short", 0]]}, {"calls": [[*row[:5], 7]]}, {"calls": [[*row[:5], -1]]},
        {"calls": [[*row[:3], "flags", *row[4:]]]}, {"answers": [[9, *answer[1:]]]}, {"answers": [[1, *answer[1:]]]},
        {"answers": [answer, answer]}, {"answers": [[2, 1, "digest", None]]}, {"answers": [[2, 1, b"", None]]},
        {"answers": [[2, 1, b"", [["g", 1]]]]}, {"answers": 5},
    ):
        with pytest.raises(Corrupt):
            LiveObjects.from_dict({**good, **change})
    for data in (None, [], "x", 5, {}):
        with pytest.raises(Corrupt):
            LiveObjects.from_dict(data)


# -- objects ahead ----------------------------------------------------------------------------


def _session() -> LiveObjects:
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0), _load(2, 16),
                    call(3, "stream_create", stream=16, context=1, flags=0, priority=0), _load(4, 17, b"second"),
                    _load(5, 18))
    for seq in (2, 4, 5):
        live.answered(seq, 0, _answer(seq))
    return live


def test_contents_go_ahead_once_and_are_numbers_then() -> None:
    live = _session()
    sent = ahead.of(live)
    assert sent.contents == [b"first", b"second"] and [row.seq for row in sent.rows] == [1, 2, 4, 5]
    live.apply(_load(6, 19, b"third"))
    live.answered(6, 0, _answer(6))
    assert sent.shorten(live.to_dict())["payloads"] == [0, 1, b"third"]
    made = ahead.Ahead.decode(sent.encode())
    assert made.lengthen(sent.shorten(live.to_dict())) == (live.to_dict(), [*made.digests, b""])
    assert [record.seq for record in made.rest(live.structural_calls())] == [3, 6]


def test_a_rebuild_knows_where_variables_stood() -> None:
    live = _session()
    there = live.variables()
    assert set(there) == {2, 4, 5} and all(there.values())
    assert LiveObjects.from_dict(live.to_dict()).variables() == there
    assert ahead.Ahead.decode(ahead.of(live).encode()).variables() == there
    older = msgspec.msgpack.decode(ahead.of(live).encode())
    older[1] = [row[:6] for row in older[1]]
    assert ahead.Ahead.decode(msgspec.msgpack.encode(older)).variables() == {}, "an older source does not tell"
    live.apply(call(6, "module_unload", module=17))
    assert set(live.variables()) == {2, 5}


def test_what_comes_behind_a_load_that_is_not_answered_is_made_in_its_order() -> None:
    live = _session()
    live.apply(_load(6, 19, b"third"))
    live.apply(_load(7, 20, b"fourth"))
    live.answered(7, 0, _answer(7))
    assert [row.seq for row in ahead.of(live).rows] == [1, 2, 4, 5]


def test_a_context_that_is_gone_without_a_trace_ends_the_move() -> None:
    live = _session()
    live.apply(call(6, "context_create", context=2, device=0, flags=0, primary=0))
    made = ahead.of(live)
    live.apply(call(7, "context_destroy", context=2))
    with pytest.raises(RecoveryFailed, match="context of call 6 was destroyed while"):
        made.rest(live.structural_calls())


@pytest.mark.parametrize("rows", [
    [[1, 9999, 0, 0, b"", -1]], [[0, ahead._CONTEXT, 0, 0, b"", -1]], [[1, ahead.LOAD, 0, 0, b"", -1]],
    [[1, ahead.LOAD, 0, 0, b"", 2]], [[1, ahead._CONTEXT, 0, 0, b"", 0]], [[1, ahead._CONTEXT, 0, 0, b"", -2]],
    [[2, ahead._CONTEXT, 0, 0, b"", -1], [2, ahead._CONTEXT, 0, 0, b"", -1]], [[1]], "rows",
    [[1, BY_NAME["launch"].id, 0, 0, b"", -1]]])
def test_what_is_no_list_of_objects_is_refused(rows: Any) -> None:
    with pytest.raises(Corrupt):
        ahead.Ahead.decode(msgspec.msgpack.encode([[b"one", b"two"], rows]))


@pytest.mark.parametrize("payloads", [[2], [-1], ["x", 7], None])
def test_contents_that_nobody_sent_are_refused(payloads: Any) -> None:
    made = ahead.Ahead.decode(ahead.of(_session()).encode())
    with pytest.raises(Corrupt):
        LiveObjects.from_dict(*made.lengthen({**_session().to_dict(), "payloads": payloads}))
