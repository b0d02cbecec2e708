"""Memory and events of several sessions on the engine: exported, mapped at another address, waited for, let go.

One session opens its own here, as another's: a process has one device.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from typing import Any

import pytest

from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.sharing.sharing import Sharing
from rgpu.session.addresses import GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.objects.handle_tokens import TokenKind
from tests.support.fake_driver.support import BASE, SIZE, WAIT_FLAG, Journal, collect

ANSWERS: queue.SimpleQueue[tuple[int, int, bytes]] = queue.SimpleQueue()  #: that Python made
THERE = BASE + 1024 * GRANULE
FLAG = BASE + SIZE - 4


@pytest.fixture
def runtime(device: Any, journal: Journal) -> SessionRuntime:
    runtime = SessionRuntime("s", 1, device)

    def ask(number: int, token: bytes) -> bool:
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=runtime.sharing.serve, args=(one.detach(), "t"), daemon=True).start()
        runtime.sharing.linked(two.detach(), number, "t")
        return True

    runtime.share(Sharing("s", ask, lambda: False, lambda peer: None, lambda peer: None))
    runtime.attach(lambda seq, result, reply, payload: ANSWERS.put((seq, result, reply)), 0)
    runtime.loop.take(journal.opened())
    return runtime


def made(wanted: int) -> tuple[int, bytes]:
    """(result, reply) of a call that Python applies, which is the next but for others' before it."""
    while True:
        seq, result, reply = ANSWERS.get(timeout=20)
        if seq == wanted:
            return result, reply


def done(runtime: SessionRuntime, journal: Journal, name: str, **args: Any) -> Any:
    """Apply an awaited call; its reply, or the error."""
    runtime.loop.take(journal(name, **args))
    result, reply = collect(runtime, {journal.seq})[journal.seq] if name == "memcpy_d2h" else made(journal.seq)
    return result or (decoders.decode_reply(name, reply) if BY_NAME[name].reply else reply)


def opened(runtime: SessionRuntime, journal: Journal) -> bytes:
    token = bytes(done(runtime, journal, "memory_export", address=BASE, size=SIZE, secret=bytes(range(16))).token)
    assert done(runtime, journal, "memory_import", address=THERE, size=SIZE, device=0, token=token) == b""
    runtime.loop.take(journal("memory_allocate", address=THERE, size=SIZE))
    return token


def test_what_is_written_at_one_address_is_read_at_the_other(runtime: SessionRuntime, journal: Journal) -> None:
    before = len(os.listdir("/proc/self/fd"))
    token = opened(runtime, journal)
    runtime.loop.take(journal.write(b"to be seen there", BASE + 4096))
    assert done(runtime, journal, "memcpy_d2h", source=THERE + 4096, size=16, stream=18) == b"to be seen there"
    runtime.loop.take(journal.write(struct.pack("<4I", 1, 2, 3, 4), THERE) + journal.add_one(THERE))
    assert struct.unpack("<4I", done(runtime, journal, "memcpy_d2h", source=BASE, size=16, stream=18)) == (2, 3, 4, 5)
    assert {region.address for region in runtime.device.regions()} & {THERE} == set(), "it is the exporter's state"
    assert runtime.pins()
    runtime.loop.take(journal("memory_free", address=THERE) + journal("memory_unimport", address=THERE))
    assert done(runtime, journal, "memcpy_d2h", source=THERE, size=16, stream=18) == 1
    assert runtime.executor.error == 0 and runtime.executor.bugs == 0
    runtime.loop.take(journal("memory_free", address=BASE))
    assert done(runtime, journal, "memory_import", address=THERE, size=SIZE, device=0, token=token) == 1
    runtime.sharing.over()
    for _ in range(100):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        threading.Event().wait(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_memory_outlives_the_exporters(runtime: SessionRuntime, journal: Journal) -> None:
    opened(runtime, journal)
    runtime.loop.take(journal.write(b"kept"))
    assert done(runtime, journal, "memcpy_d2h", source=BASE, size=4, stream=18) == b"kept"
    runtime.loop.take(journal("memory_free", address=BASE) + journal("memory_unmap", address=BASE, size=SIZE))
    assert done(runtime, journal, "memcpy_d2h", source=THERE, size=4, stream=18) == b"kept"
    assert runtime.executor.bugs == 0


@pytest.mark.parametrize("wrong", [dict(size=SIZE - GRANULE), dict(address=THERE + 512), dict(address=BASE),
                                   dict(token=bytes(64))])
def test_imports_that_do_not_fit(runtime: SessionRuntime, journal: Journal, wrong: dict[str, Any]) -> None:
    token = bytes(done(runtime, journal, "memory_export", address=BASE, size=SIZE, secret=bytes(16)).token)
    assert done(runtime, journal, "memory_export", address=BASE, size=SIZE - 1, secret=bytes(16)) == 1
    assert done(runtime, journal, "memory_export", address=BASE, size=SIZE, secret=bytes(15)) == 1
    token = bytes(done(runtime, journal, "memory_export", address=BASE, size=SIZE, secret=bytes(16)).token)
    values = dict(address=THERE, size=SIZE, device=0, token=token) | wrong
    assert done(runtime, journal, "memory_import", **values) in (1, 2)
    assert done(runtime, journal, "memory_import", address=THERE, size=SIZE, device=0, token=token) == b""


def test_a_stream_waits_for_another_sessions_event(runtime: SessionRuntime, journal: Journal) -> None:
    runtime.loop.take(journal("memset", destination=FLAG, pitch=4, width=1, height=1, element=4, value=0, stream=18))
    assert runtime.device.drain(20)  # else it may come behind the write that lets the kernel go
    runtime.loop.take(journal.launch(WAIT_FLAG, struct.pack("<Q", FLAG)) + journal.write(b"after")
                      + journal("event_record", event=20, stream=18, flags=0))
    token = bytes(done(runtime, journal, "event_export", event=20, context=16, secret=bytes(16)).token)
    runtime.loop.take(journal("event_mark", event=20))
    assert token[8] == TokenKind.EVENT
    assert done(runtime, journal, "event_import", event=40, context=16, token=token) == b""
    assert done(runtime, journal, "imported_event_query", event=40).complete == 0
    runtime.loop.take(journal("imported_event_wait", stream=19, event=40) + journal.read(5, stream=19))
    behind = journal.seq
    runtime.loop.take(journal("imported_event_synchronize", event=40))
    waits = journal.seq
    assert done(runtime, journal, "applied") == b"", "nothing waits with the streams"
    assert runtime.fast is not None and not runtime.device.is_complete(behind)
    runtime.device.write(FLAG, struct.pack("<I", 1))
    assert collect(runtime, {behind})[behind] == (0, b"after")
    assert made(waits)[0] == 0
    assert done(runtime, journal, "imported_event_query", event=40).complete == 1
    runtime.loop.take(journal("imported_event_wait", stream=19, event=40) + journal("event_destroy", event=20)
                      + journal("event_unimport", event=40))
    assert done(runtime, journal, "event_import", event=41, context=16, token=token) == 1
    assert done(runtime, journal, "imported_event_query", event=40) == 400
    assert runtime.executor.bugs == 0 and runtime.executor.error == 0
