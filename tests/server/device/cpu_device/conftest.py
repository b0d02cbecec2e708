"""A device on the stub engine, and a small client for it."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.checkpoint.device import GRANULE, Launch
from rgpu.server.device.cpu import CpuDevice
from rgpu.session.addresses import DEVICE_BASE
from tests.support.cpu import stub

WAIT = 10.0


class Client:
    """Numbers calls as a journal would, and waits for answers."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self.seqs = itertools.count(1)
        self.base = DEVICE_BASE
        device.create_context(16, 0, True)
        device.map(self.base, GRANULE)
        device.allocate(self.base, 1 << 20)
        self.table, _ = device.load(17, stub.text(), b"", False)

    def launch(self, kernel: str, first: int, second: int = 0, stream: int = 0, **options: Any) -> int:
        seq = next(self.seqs)
        values = {"grid": (1, 1, 1), "block": (1, 1, 1), "shared": 0, **options}
        self.device.launch(seq, Launch(module=17, function=stub.INDEX[kernel], stream=stream,
                                       parameters=struct.pack("<QQ", first, second), **values))
        return seq

    def write(self, address: int, data: bytes, stream: int = 0) -> int:
        seq = next(self.seqs)
        self.device.copy_in(seq, stream, address, len(data), len(data), 1, data)
        return seq

    def answer(self, give: Any) -> tuple[int, Any]:
        """Call ``give(seq, done)`` and wait for what it is answered."""
        arrived = threading.Event()
        answers: list[tuple[int, Any]] = []

        def done(result: int, data: Any) -> None:
            answers.append((result, data))
            arrived.set()

        give(next(self.seqs), done)
        assert arrived.wait(WAIT), "no answer"
        assert len(answers) == 1
        return answers[0]

    def read(self, address: int, size: int, stream: int = 0) -> bytes:
        result, data = self.answer(lambda seq, done: self.device.copy_out(seq, stream, address, size, size, 1, done))
        assert result == 0
        return bytes(data)

    def word(self, address: int, stream: int = 0) -> int:
        return struct.unpack("<I", self.read(address, 4, stream))[0]

    def synchronize(self, stream: int | None = None) -> int:
        return self.answer(lambda seq, done: self.device.synchronize(seq, stream, done))[0]


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(0, 64 << 20, 2, engine=stub, host="test")  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def client(device: CpuDevice) -> Client:
    return Client(device)
