"""A backlog in the order of issue on the cpu device, whose calls all go through Python."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.apply import ordering, slow_path
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import pack
from tests.support.eventually import eventually

FIRST, SECOND = 18, 19


class Session:
    """Records with growing positions, and a runtime that may be catching up to ``published``."""

    def __init__(self, published: int) -> None:
        self.device = CpuDevice(0, 64 << 20)
        self.runtime = SessionRuntime("s", 1, self.device)
        self.answers: dict[int, Any] = {}
        self.runtime.attach(lambda seq, result, reply, data: self.answers.update({seq: data}), published)
        self.seq = 0
        self.feed = self.runtime.open_stream()
        self.feed(self("session_open", version=1, pid=1, environment=b"")
                  + self("context_create", context=16, device=0, flags=0, primary=1)
                  + self("memory_map", address=DEVICE_BASE, size=GRANULE, device=0)
                  + self("memory_allocate", address=DEVICE_BASE, size=GRANULE)
                  + b"".join(self("stream_create", stream=number, context=16, flags=1, priority=0)
                             for number in (FIRST, SECOND)))

    def __call__(self, name: str, payload: bytes = b"", **args: Any) -> bytes:
        self.seq += 1
        return pack(self.seq, BY_NAME[name].id, decoders.encode_args(name, **args), payload)

    def fill(self, stream: int, value: int) -> bytes:
        return self("memset", destination=DEVICE_BASE, pitch=16, width=16, height=1, element=1, value=value,
                    stream=stream)

    @property
    def order(self) -> dict[str, Any]:
        return self.runtime.order.describe()


@pytest.fixture
def make() -> Iterator[Callable[[int], Session]]:
    made: list[Session] = []

    def one(published: int) -> Session:
        made.append(Session(published))
        return made[-1]

    yield one
    for session in made:
        session.runtime.stop()
        session.device.close()


def test_a_slow_stream_is_waited_for(make: Callable[[int], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    session = make(1 << 30)
    work = session.device._copies.fill_work

    def slow(*args: Any) -> Callable[[], None]:
        run = work(*args)
        return lambda: (time.sleep(0.1 if args[-1] == 1 else 0.0), run())[1]

    monkeypatch.setattr(session.device._copies, "fill_work", slow)
    for pair in range(3):
        session.feed(session.fill(FIRST, 1) + session.fill(SECOND, 2 + pair))
    assert session.device.drain(5) and session.device.read(DEVICE_BASE, 1) == b"\4"
    assert session.order["state"] == "ordered" and session.order["stalls"] == 0


@pytest.mark.parametrize("cut", [1 << 20, 100, 13])
def test_a_host_function_is_let_go_by_what_lies_behind(make: Callable[[int], Session], cut: int) -> None:
    """Work on the other stream waits for it; the word that it returned comes after that, in the same message or not."""
    session = make(1 << 30)
    data = session("host_function", stream=FIRST)
    function = session.seq
    data += session.fill(FIRST, 1) + session.fill(SECOND, 2)
    if cut < 1 << 20:  # what is read ahead stands behind what was fed
        rest = session("host_function_done", call=function) + session.fill(FIRST, 3)
        pieces = iter([rest[at:at + cut] for at in range(0, len(rest), cut)])
        kept: list[bytes] = []

        def read_ahead(seconds: float) -> bytes:
            kept.extend(itertools.islice(pieces, 1))
            return kept[-1] if len(kept) * cut < len(rest) + cut else b""

        session.runtime.loop.read_ahead = read_ahead
        session.feed(data)
        session.feed(rest)
    else:
        session.feed(data + session("host_function_done", call=function) + session.fill(FIRST, 3))
    assert session.device.drain(5) and session.device.read(DEVICE_BASE, 1) == b"\3"
    assert session.order["stalls"] == 0 and session.runtime.executor.bugs == 0


@pytest.mark.parametrize("read", [False, True], ids=["in the same message", "in one behind it"])
def test_a_full_queue_waits_for_no_function_that_has_returned(make: Callable[[int], Session], read: bool,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Live: more calls than may be under way stand behind the function, and the word that it returned behind those."""
    monkeypatch.setattr(slow_path, "PATIENCE", 1e6)
    session = make(0)
    data = session("host_function", stream=FIRST)
    function = session.seq
    data += b"".join(session.fill(FIRST, number) for number in range(3 * slow_path.AHEAD))
    rest = session("host_function_done", call=function) + session.fill(FIRST, 77)
    if read:
        come = [rest]
        session.runtime.loop.read_ahead = lambda seconds: come.pop() if come else b""
        session.feed(data)
        session.feed(rest)
    else:
        session.feed(data + rest)
    assert session.device.drain(5) and session.device.read(DEVICE_BASE, 1) == bytes([77])
    assert session.order["stalls"] == 0 and session.runtime.executor.bugs == 0


def test_work_begins_beside_a_function_that_does_not_return(make: Callable[[int], Session]) -> None:
    """It may need that work, and at home it would run beside it: that is no stall, and the rest stays in order."""
    session = make(1 << 30)
    data = session("host_function", stream=FIRST)
    function = session.seq
    session.feed(data + session.fill(SECOND, 2))
    eventually(lambda: session.device.read(DEVICE_BASE, 1) == b"\2")
    assert session.order["state"] == "ordered" and session.order["stalls"] == 0
    session.feed(session("host_function_done", call=function))
    assert session.device.drain(5) and session.runtime.executor.bugs == 0


def test_a_stream_that_waits_for_a_later_call_is_a_stall(make: Callable[[int], Session],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A word in memory that only work on the other stream writes: the waiting call is named, and all overlaps."""
    monkeypatch.setattr(ordering, "STALL", 0.2)
    session = make(1 << 30)
    data = session("stream_memory_operation", stream=FIRST, kind=2, address=DEVICE_BASE, value=0x02020202, flags=1)
    waiting = session.seq
    session.feed(data + session.fill(SECOND, 2))
    assert session.order["state"] == "overlapping" and f"call {waiting}" in session.order["reason"]
    assert session.device.drain(5) and session.runtime.executor.bugs == 0 and session.order["stalls"] == 1


def test_a_free_behind_the_replay_waits_for_it(make: Callable[[int], Session]) -> None:
    """SEMANTICS 21: the free was published by a side that knows the watermark of the worker before."""
    session = make(7)
    waiting = session("host_function", stream=FIRST)
    session.feed(waiting)
    free = session("memory_free", address=DEVICE_BASE)
    gate = session.runtime.gate
    assert [type(command).__name__ for command in gate.feed(next(iter(_records(free))))] == ["WaitAll", "Apply"]
    gate.position -= 1
    session.runtime.loop.open_functions.clear()  # it stands for a kernel from here on
    session.device.host_function_done(session.seq - 1)
    session.feed(free)
    assert session.runtime.applied == session.seq and gate.replay_until == 0


def test_a_free_behind_an_open_function_does_not_wait_for_it(make: Callable[[int], Session]) -> None:
    """Its end stands behind the free: the program freed in the order of another stream (cuMemFreeAsync)."""
    session = make(1 << 30)
    data = session.fill(SECOND, 2) + session("host_function", stream=FIRST)
    function = session.seq
    session.feed(data + session("memory_free", address=DEVICE_BASE))
    assert session.runtime.applied == session.seq and session.order["stalls"] == 0
    session.feed(session("host_function_done", call=function))
    assert session.device.drain(5) and session.runtime.executor.bugs == 0


def _records(data: bytes) -> Any:
    from rgpu.session.journal.record import RecordReader

    return RecordReader().feed(data)
