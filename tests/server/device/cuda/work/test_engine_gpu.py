"""The engine on a real GPU, through the runtime: copies, launches, events, faults."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.cuda import fresh
from tests.support.cuda.compiled import compiled

pytestmark = pytest.mark.gpu

MODULE, STREAM, OTHER, EVENT = 30, 31, 32, 33


@pytest.fixture(scope="module")
def ptx() -> bytes:
    return compiled()


class Session:
    """A runtime on the GPU, fed with packed records in random cuts."""

    def __init__(self, device: Any, ptx: bytes) -> None:
        from rgpu.server.worker.apply.runtime import SessionRuntime
        from tests.support.fake_driver.support import BASE, SIZE, Journal

        self.base, self.size, self.journal, self.rng = BASE, SIZE, Journal(), random.Random(7)
        self.runtime = SessionRuntime("gpu", 1, device)
        self.runtime.attach(lambda *answer: None, 0)
        self.take = self.runtime.open_stream()
        make = self.journal
        self.feed(make("memory_map", address=BASE, size=SIZE, device=0)
                  + make("memory_allocate", address=BASE, size=SIZE)
                  + make("module_load", ptx, module=MODULE, context=16, library=0, options=b"")
                  + make("stream_create", stream=STREAM, context=16, flags=1, priority=0)
                  + make("stream_create", stream=OTHER, context=16, flags=1, priority=0)
                  + make("event_create", event=EVENT, context=16, flags=2))
        from rgpu.session.calls import decoders
        from rgpu.session.objects import module_table

        reply = self.runtime.retained.unobserved()[0][2]
        table = module_table.decode(decoders.decode_reply("module_load", reply).table)
        self.functions = {function.name: index for index, function in enumerate(table.functions)}

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = self.rng.choice([13, 4096, 100_000, 4 << 20])
            self.take(data[at:at + size])
            at += size

    def launch(self, name: str, parameters: bytes, stream: int = STREAM, blocks: int = 1, threads: int = 256) -> bytes:
        return self.journal.launch(self.functions[name], parameters, stream, module=MODULE, grid_x=blocks,
                                   block_x=threads)

    def answer(self) -> tuple[int, bytes]:
        from tests.support.fake_driver.support import collect

        return collect(self.runtime, {self.journal.seq})[self.journal.seq]

    def wait_retained(self, seq: int) -> None:
        """Until a call that Python applies is answered well."""
        end = time.monotonic() + 20
        while (found := {row[0]: row[1] for row in self.runtime.retained.unobserved()}).get(seq) is None:
            assert time.monotonic() < end, f"call {seq} is not answered"
            time.sleep(0.001)
        assert found[seq] == 0


@pytest.fixture
def session(ptx: bytes) -> Iterator[Session]:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    yield Session(device, ptx)
    device.close()


@pytest.mark.parametrize("size", [1, 3, 4096, 65537, 1 << 20, (5 << 20) + 3, 16 << 20])
def test_copies_both_ways(session: Session, size: int) -> None:
    data = session.rng.randbytes(size)
    session.feed(session.journal.write(data, session.base, STREAM) + session.journal.read(size, session.base, STREAM))
    assert session.answer() == (0, data), f"{size} bytes came back changed"


def test_kernels_in_order(session: Session) -> None:
    count = 1000
    session.feed(session.journal.write(bytes(4 * count), session.base, STREAM))
    session.feed(b"".join(session.launch("add_one", struct.pack("<QI", session.base, count), blocks=4)
                          for _ in range(5000)))
    session.feed(session.journal.read(4 * count, session.base, STREAM))
    result, data = session.answer()
    assert result == 0 and np.all(np.frombuffer(data, np.uint32) == 5000)
    assert session.runtime.executor.bugs == 0


def test_two_streams_and_an_event(session: Session) -> None:
    """The other stream reads only what the first wrote behind a slow kernel."""
    make = session.journal
    session.feed(make.write(bytes(4096), session.base, STREAM)
                 + session.launch("slow", struct.pack("<q", 50_000_000), threads=1)
                 + session.launch("add_one", struct.pack("<QI", session.base, 256))
                 + make("event_record", event=EVENT, stream=STREAM, flags=0)
                 + make("stream_wait_event", stream=OTHER, event=EVENT, flags=0)
                 + make.read(1024, session.base, OTHER))
    result, data = session.answer()
    assert result == 0 and np.all(np.frombuffer(data, np.uint32) == 1)
    session.feed(make("event_synchronize", event=EVENT))
    assert session.answer() == (0, b"")
    assert session.runtime.watermark()[0] == make.seq


def test_a_module_is_unloaded_behind_a_host_function(session: Session, ptx: bytes) -> None:
    """The driver's unload waits for the device, which waits for a later call: nothing may stand still."""
    make = session.journal
    session.feed(make("module_load", ptx, module=77, context=16, library=0, options=b""))
    session.wait_retained(make.seq)
    session.feed(make("host_function", stream=STREAM))
    function = make.seq
    session.feed(make("module_unload", module=77) + make.write(b"behind", session.base, STREAM))
    session.wait_retained(function)
    session.feed(make("host_function_done", call=function) + make.read(6, session.base, STREAM))
    assert session.answer() == (0, b"behind")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("patience", [20.0, 0.05])
def test_a_call_that_waits_behind_a_host_function(session: Session, ptx: bytes, monkeypatch: pytest.MonkeyPatch,
                                                  patience: float) -> None:
    """Loads and pinned memory: the function's return comes later, once while the call is put off, once inside it.

    Standing still here means that the record is not looked for, or that the driver holds a lock over its wait
    that the poller of streams needs (then only the patient case ends).
    """
    from rgpu.server.worker.apply import lookahead
    from rgpu.session.addresses import PINNED_BASE

    monkeypatch.setattr(lookahead, "PATIENCE", patience)
    make = session.journal
    session.feed(make("host_allocate", address=PINNED_BASE, size=1 << 20, flags=0))
    calls = {"module_load": lambda: make("module_load", ptx, module=78, context=16, library=0, options=b""),
             "host_free": lambda: make("host_free", address=PINNED_BASE)}
    for name, call in calls.items():
        session.feed(make.write(b"before", session.base, STREAM) + make("host_function", stream=STREAM))
        function = make.seq
        session.wait_retained(function)
        session.feed(make.write(b"behind", session.base, STREAM))
        waits = call()
        rest = make("host_function_done", call=function) + make.read(6, session.base, STREAM)
        due = time.monotonic() + 0.5

        def later(seconds: float, due: float = due, rest: bytes = rest) -> bytes:
            time.sleep(seconds)
            return rest if time.monotonic() > due else b""

        session.runtime.loop.read_ahead = later
        began = time.monotonic()
        session.take(waits)
        print(f"{name} with patience {patience}: applied after {time.monotonic() - began:.2f} s (0.5: it waited)")
        session.runtime.loop.read_ahead = None
        session.feed(rest)
        assert session.answer() == (0, b"behind")
    assert session.runtime.executor.bugs == 0


def test_a_wild_copy_is_an_error_code(session: Session) -> None:
    session.feed(session.journal.read(16, 0x10, STREAM))
    assert session.answer()[0] == 1
    session.feed(session.journal("context_synchronize", context=16))
    assert session.answer()[0] == 0, "an argument error must not stick"


def illegal_address() -> None:
    from rgpu.server.device.cuda.device import CudaDevice

    session = Session(CudaDevice(0), compiled())
    session.feed(session.launch("wild", struct.pack("<Q", 0x10), threads=32)
                 + session.journal("stream_synchronize", stream=STREAM))
    assert session.answer()[0] == 700
    session.feed(session.journal.read(16, session.base, STREAM))
    assert session.answer()[0] == 700 and session.runtime.executor.error == 700


def test_an_illegal_address_sticks() -> None:
    """In a process of its own: there is no context in it any more after it."""
    fresh.run(illegal_address)
