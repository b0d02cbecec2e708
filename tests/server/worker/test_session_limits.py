"""Bounds on what calls make a worker keep: the table, and a session on the cpu device that comes to one."""

from __future__ import annotations

import pytest

from rgpu.server.device.spec import make_device
from rgpu.server.worker import session_limits
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.session_limits import ANSWERS_FREE, MOST_OBJECTS, above
from rgpu.session.addresses import PINNED_FIRST
from rgpu.session.answers import MAX_ANSWERS
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import DeviceError
from rgpu.session.journal.record import pack

GIB = 1 << 30


@pytest.mark.parametrize(("call", "objects", "answers", "answer_bytes", "memory", "word"), [
    ("event_create", MOST_OBJECTS - 1, 0, 0, GIB, ""),
    ("event_create", MOST_OBJECTS, 0, 0, GIB, "live objects"),
    ("event_destroy", MOST_OBJECTS, 0, 0, GIB, ""),
    ("memcpy_d2h", 0, 9, ANSWERS_FREE + 4 * GIB, GIB, ""),
    ("memcpy_d2h", 0, 9, ANSWERS_FREE + 4 * GIB + 1, GIB, "not confirmed"),
    ("memcpy_d2h", 0, MAX_ANSWERS, 0, GIB, "not confirmed"),
    ("memcpy_d2h", 0, 9, 1 << 50, 0, ""),  # nobody said how much the session may have
    ("memcpy_h2d", 0, 9, 1 << 50, GIB, ""),
])
def test_the_table(call: str, objects: int, answers: int, answer_bytes: int, memory: int, word: str) -> None:
    found = above(BY_NAME[call].id, objects, answers, answer_bytes, memory)
    assert (word in found) if word else not found


def test_a_session_of_too_many_objects_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_limits, "MOST_OBJECTS", 10)
    device = make_device("cpu:0", 64 << 20)
    try:
        session = SessionRuntime("s", 1, device)
        calls = [("session_open", {"version": 1, "pid": 1, "environment": b""}),
                 ("context_create", {"context": 16, "device": 0, "flags": 0, "primary": 1}),
                 *(("event_create", {"event": 20 + n, "context": 16, "flags": 0}) for n in range(30))]
        session.loop.take(b"".join(pack(seq, BY_NAME[name].id, decoders.encode_args(name, **args))
                                   for seq, (name, args) in enumerate(calls, 1)))
        assert session.executor.error == 2 and "live objects" in session.executor.broken_detail
        assert session.live.count == 10 and session.applied == len(calls)
        device.limit_host(1 << 20)  # type: ignore[attr-defined]
        device.host_allocate(PINNED_FIRST, 1 << 20)
        with pytest.raises(DeviceError, match="pinned") as refused:
            device.host_allocate(PINNED_FIRST + (2 << 20), 4096)
        assert refused.value.result == 2
        device.host_free(PINNED_FIRST)
        device.host_allocate(PINNED_FIRST + (2 << 20), 4096)
    finally:
        device.close()
