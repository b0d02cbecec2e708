"""What the cases share: a device on the fake driver, a session's records, the agent's end of a link."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.data import PIECE_AT_LAYOUT, PLACE_LAYOUT
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import pack
from tests.support.worker.links import linked, linked_here

__all__ = ["linked", "linked_here"]

BASE = DEVICE_BASE
BINARY = b"add_one 12\nslow 4\nwild 0\nwait_flag 8\n.global .b8 counter[64];\n"
ADD_ONE, SLOW, WILD, WAIT_FLAG = range(4)
SIZE = 16 << 20  #: bytes of the one allocation
RECORDED = 12345  #: ns that each kernel takes by the records of the CUPTI of tests


def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    driver().fake_reset()
    device = CudaDevice(0)
    yield device
    for thread in threading.enumerate():  # those of a closed link end by themselves, and use the device until then
        if thread.name in ("agent-link", "agent-send"):
            thread.join(1)
    device.close()
    driver().fake_reset()


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUPTI of tests, which the device finds."""
    path = Path(os.environ["RGPU_ENGINE_DIR"]) / "libcupti.so.13"
    monkeypatch.setenv("RGPU_CUPTI", str(path))
    library = ctypes.CDLL(str(path))
    library.fake_cupti_lose(0)
    return library


class Journal:
    """Packed records with growing positions."""

    def __init__(self) -> None:
        self.seq = 0

    def __call__(self, name: str, payload: Any = b"", **args: Any) -> bytes:
        self.seq += 1
        return pack(self.seq, BY_NAME[name].id, decoders.encode_args(name, **args), payload)

    def opened(self) -> bytes:
        return b"".join([
            self("session_open", version=1, pid=1, environment=b""),
            self("context_create", context=16, device=0, flags=0, primary=1),
            self("memory_map", address=BASE, size=max(SIZE, GRANULE), device=0),
            self("memory_allocate", address=BASE, size=SIZE),
            self("module_load", BINARY, module=17, context=16, library=0, options=b""),
            self("stream_create", stream=18, context=16, flags=1, priority=0),
            self("stream_create", stream=19, context=16, flags=1, priority=0),
            self("event_create", event=20, context=16, flags=2)])

    def timed(self, name: str, **args: Any) -> bytes:
        """A call with a stream whose times a profiler is to see."""
        return self("timed", call=BY_NAME[name].id, stream=args["stream"], arguments=decoders.encode_args(name, **args))

    def launch(self, function: int, parameters: bytes, stream: int = 18, **changes: Any) -> bytes:
        return self("launch", **{**dict(module=17, function=function, grid_x=1, grid_y=1, grid_z=1, block_x=1,
                                        block_y=1, block_z=1, shared=0, flags=0, stream=stream,
                                        parameters=parameters, attributes=b""), **changes})

    def add_one(self, at: int = BASE, count: int = 4, stream: int = 18) -> bytes:
        return self.launch(ADD_ONE, struct.pack("<QI", at, count), stream)

    def write(self, data: Any, at: int = BASE, stream: int = 18) -> bytes:
        return self("memcpy_h2d", data, destination=at, stream=stream)

    def read(self, size: int, at: int = BASE, stream: int = 18) -> bytes:
        return self("memcpy_d2h", source=at, size=size, stream=stream)


@pytest.fixture
def journal() -> Journal:
    return Journal()


def collect(runtime: SessionRuntime, wanted: set[int], seconds: float = 20) -> dict[int, tuple[int, bytes]]:
    """Take the engine's answers to the calls ``wanted``."""
    from rgpu.server.fast_path import Piece

    fast, found, parts = runtime.fast, {}, {}  # type: ignore[var-annotated]
    assert fast is not None
    import time
    end = time.monotonic() + seconds
    while not wanted <= found.keys():
        assert time.monotonic() < end, f"answers {wanted - found.keys()} did not come"
        piece = fast.take(0.1)
        if not isinstance(piece, Piece):
            continue
        parts.setdefault(piece.seq, []).append(bytes(fast.plaintext(piece, b"")))
        if not piece.more:
            found[piece.seq] = (piece.result, b"".join(parts.pop(piece.seq)))
        fast.release(piece)
    return found


class Agent:
    """The agent's end: sends records, gathers answers and watermarks in a thread of its own."""

    def __init__(self, connection: SealedConnection) -> None:
        self.connection = connection
        self.offset = 0
        self.answers: dict[int, tuple[int, int, bytes]] = {}
        self.done = 0
        self.sticky = 0
        self.area: memoryview | None = None  #: the worker's, mapped
        self.placed = 0  #: pieces of answers that came in it
        self._parts: list[bytes] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, data: Any, cut: int = 4 << 20) -> None:
        view = memoryview(data)
        for at in range(0, len(view), cut):
            piece = view[at:at + cut]
            self.connection.send(2, struct.pack("<Q", self.offset), piece)
            self.offset += len(piece)

    def send_placed(self, before: bytes, memory: int, offset: int, length: int) -> None:
        """Records, and where in shared memory the payload of the last one is."""
        self.connection.send(10, PLACE_LAYOUT.pack(self.offset, memory, 0, offset, length), before)
        self.offset += len(before) + length

    def answer(self, seq: int, seconds: float = 20) -> tuple[int, int, bytes]:
        with self._changed:
            assert self._changed.wait_for(lambda: seq in self.answers, seconds), f"no answer to {seq}"
            return self.answers.pop(seq)

    def watermark(self, seq: int, seconds: float = 10) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.done >= seq, seconds), f"the watermark stays at {self.done}"

    def _receive(self) -> None:
        from rgpu.session.errors import LinkError

        head: tuple[int, int, int, int] | None = None
        try:
            while True:
                kind, body = self.connection.recv()
                with self._changed:
                    if kind == 18:
                        done, self.sticky = struct.unpack_from("<QI", body)
                        assert done >= self.done, "the watermark went back"
                        self.done = done
                    elif kind in (17, 24):
                        more, rest = body[0], body[1:]
                        if kind == 24:
                            assert self.area is not None
                            _, _, offset, length = PIECE_AT_LAYOUT.unpack_from(body)
                            rest = bytes(body[PIECE_AT_LAYOUT.size:]) + bytes(self.area[offset:offset + length])
                            self.placed += 1
                        if head is None:
                            head = struct.unpack_from("<QiII", rest)
                            rest = rest[20 + head[3]:]
                        self._parts.append(bytes(rest))
                        if not more:
                            self.answers[head[0]] = (head[1], head[2], b"".join(self._parts))
                            self._parts, head = [], None
                    self._changed.notify_all()
        except LinkError:
            pass
