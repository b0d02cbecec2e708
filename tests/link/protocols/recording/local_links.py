"""Bodies of the links inside one host: shim and agent, a monitor, memory that is handed over."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rgpu.checkpoint.device import PAGE
from rgpu.client.data_link.host_link import Area
from rgpu.client.session.delivery import Deliveries
from rgpu.client.shim_link import local
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.client.shim_link.returns import Returns
from rgpu.link.local import shared
from rgpu.link.messages import data as to_data
from rgpu.link.messages import memory as to_memory
from rgpu.link.messages.shim import AGENT_PAGE_SIZE
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.facts import DeviceInfo, SessionFacts
from rgpu.session.journal.record import AWAITED
from rgpu.session.observed import Observation, Process
from tests.client.shim.conftest import Program
from tests.link.protocols.recording.book import Book
from tests.support.agent.fake_shim import FakeReader
from tests.support.building import libraries
from tests.support.shim.area import Area as OfferedArea
from tests.support.shim.fake_agent import FakeAgent

READ = BY_NAME["memcpy_d2h"].id
FACTS = SessionFacts("s", 3, 13000, 1 << 30, 1 << 20, True, (
    DeviceInfo("Fake", bytes(range(16)), 1 << 33, (0, 27, 0), attributes={75: 9, 16: 132}),))


def _split(stream: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(stream):
        length, kind = struct.unpack_from("<II", stream, at)
        yield kind, stream[at + 8:at + 8 + length]
        at += 8 + length


def _memfd(size: int) -> int:
    fd = os.memfd_create("recorded", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared.SEALS)
    return fd


def to_shim() -> tuple[dict[str, list[str]], str]:
    """What the agent says on the socket, and what stands in its page and ring."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peer = local.LocalPeer(ours)
    with open(os.devnull) as null:
        peer.send_welcome(FACTS.encode(), null.fileno())
    plain = Returns("s", peer, None, Deliveries())
    plain.watermark(memoryview(struct.pack("<QIIQQ", 9, 700, 1, 16, 8)))
    plain.printed(memoryview(struct.pack("<Q", 0) + b"printed"))
    peer.answer(5, -1, 1, b"reply", b"payload")
    peer.release(7)
    peer.state(1, "the journal is full")
    peer.refuse(100, "no place")
    peer.observed(Observation(FACTS, True, "580.65.06", (5,), (Process(1, 0, 5),)).encode())

    page, reader = AgentPage(1 << 16), FakeReader()
    deliveries = Deliveries()
    ring = AnswerRing(page, *reader.fds)
    returns = Returns("s", peer, ring, deliveries, area=True)

    class Told:
        ready = True

        def send(self, kind: int, body: bytes) -> None:
            assert kind == to_data.AREA_READY and body == struct.pack("<I", 4)

    fd = _memfd(1 << 16)
    returns.areas.attached(Area(4, 1 << 16, fd))
    returns.areas.step(Told())  # type: ignore[arg-type]
    returns.areas.mapped(4)
    returns.areas.step(Told())  # type: ignore[arg-type]

    def into(body: bytes) -> memoryview:
        room = ring.room(len(body) + 1)
        assert room is not None
        room[1:] = body
        return room[1:]

    head = struct.pack("<QiII", 1, 0, 0, 3) + b"abc"
    deliveries.sent(1, READ, AWAITED)
    deliveries.sent(2, READ, AWAITED)
    returns.answer(into(b"\x01" + head))
    returns.answer(into(b"\x00payload"))
    returns.answer_at(into(struct.pack("<BIQQ", 0, 4, 64, 128) + struct.pack("<QiII", 2, 0, 0, 0)))
    returns.watermark(memoryview(struct.pack("<QIIQQ", 3, 0, 1, 17, 2)))
    returns.printed(into(struct.pack("<Q", 0) + b"text"))
    page.set_sleeping(True)
    memory = bytes(page.view[:AGENT_PAGE_SIZE + ring.written])
    theirs.settimeout(5)
    stream = b""
    while peer.wants_write:
        peer.flush()
    ours.shutdown(socket.SHUT_WR)
    while data := theirs.recv(1 << 16):
        stream += data
    theirs.close()
    book = Book()
    for kind, body in _split(stream):
        book.note(kind, body)
    returns.close()
    peer.close()
    page.close()
    return book.told(), memory.rstrip(b"\0").hex()


class _Listening(FakeAgent):
    """An agent that keeps what a shim says."""

    heard: list[tuple[int, bytes]] = []

    @staticmethod
    def _message(sock: socket.socket) -> tuple[int, bytes, list[int]]:
        kind, body, fds = FakeAgent._message(sock)
        _Listening.heard.append((kind, body))
        return kind, body, fds


def from_shim() -> dict[str, Any]:
    """What the library says: pid, parent, start and name of the program are taken out of HELLO."""
    folder, book = libraries(), Book()
    _Listening.heard = []
    with tempfile.TemporaryDirectory() as where:
        with _Listening(Path(where)) as agent:
            program = Program(folder / "libcuda.so.1", agent, """
                context()
                alloc(1 << 20)
                cu.cuCheckpointProcessLock(0, None)
                tell(0)
                hear()
            """)
            program.hear()
            OfferedArea(agent, 1, 1 << 20).wait_mapped(agent)
            program.end()
            program.close()
        for kind, body in _Listening.heard:
            if kind == 1:
                body = body[:4] + bytes(8) + body[12:16] + bytes(8)
            if kind:
                book.note(kind, body)
        return {**book.told(), "observe": _observe(folder, Path(where))}


def _observe(folder: Path, where: Path) -> str:
    """The whole of the question that the monitoring library asks."""
    listener = socket.socket(socket.AF_UNIX)
    path = str(where / "observe.sock")
    listener.bind(path)
    listener.listen(1)
    listener.settimeout(20)
    code = f"import ctypes; ctypes.CDLL({str(folder / 'libnvidia-ml.so.1')!r}).nvmlInit_v2()"
    asking = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RGPU_AGENT": path})
    sock, _ = listener.accept()
    question = sock.recv(64)
    sock.close()
    listener.close()
    asking.wait(20)
    return question.hex()


def memory() -> list[str]:
    """The packets of the socket by which memory is handed over, as they stand on it."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, found = shared.Channel(near), []
    fd = _memfd(PAGE)
    for kind, number, size, data, given in (
            (to_memory.PROVE, 0, 0, bytes(32), -1), (to_memory.PROVEN, 4, PAGE, bytes(32), fd),
            (to_memory.MEMORY, 7, PAGE, b"", fd), (to_memory.DROP, 7, 0, b"", -1), (to_memory.MAPPED, 7, 0, b"", -1),
            (to_memory.REFUSED, 7, 0, b"why", -1)):
        channel.send(kind, number, size, data, given)
        data, fds, _, _ = socket.recv_fds(far, 1024, 4)
        for other in fds:
            os.close(other)
        found.append(data.hex())
    os.close(fd)
    channel.close()
    far.close()
    return found
