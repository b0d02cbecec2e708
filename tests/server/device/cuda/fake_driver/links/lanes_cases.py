"""Long messages over the lanes of a link: into the engine's pinned frames, and out of its memory for answers."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from rgpu.client.session.shipping import LANE_CHUNK
from rgpu.link.data import lanes
from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.link.data.lanes import WORTH, Lane
from rgpu.link.messages.data import FROM_NODE, LANE, LANED, LANED_BACK, LANES, MARK_LAYOUT, TO_NODE
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.worker.agent import answer_sender
from rgpu.server.worker.agent.agent_link import AgentLink
from rgpu.server.worker.agent.rounds import Rounds
from rgpu.server.worker.apply.runtime import SessionRuntime
from tests.support.fake_driver.support import Journal

MIB = 1 << 20
COUNT = 3


def connected() -> tuple[SealedConnection, SealedConnection]:
    """(agent's end, worker's end) over loopback TCP."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    keys = os.urandom(32), os.urandom(32)
    return (Handover(keys[0], keys[1], TO_NODE, "s", 1, "calls").connection(near),
            Handover(keys[1], keys[0], FROM_NODE, "s", 1, "calls").connection(far))


class Attached:
    """The agent's end of a link with lanes. ``over``: messages that came and went by them."""

    def __init__(self, runtime: SessionRuntime) -> None:
        self.connection, theirs = connected()
        self.link = AgentLink(theirs, runtime, lambda event, values: None)
        self.link.start()
        self.connection.send(1, msgspec.msgpack.encode({"session": "s", "epoch": 1, "delivered": 0, "client": "t"}))
        kind, body = self.connection.recv(20)
        said = msgspec.msgpack.decode(body)
        assert kind == 16 and said["lanes"]["most"] == COUNT
        self.lanes: list[Lane] = []
        for number in range(COUNT):
            mine, theirs = connected()
            mine.send(LANE, msgspec.msgpack.encode({"key": said["lanes"]["key"], "number": number}))
            self.link.add_lane(theirs)
            self.lanes.append(Lane(mine))
        self.connection.send(LANES, bytes([COUNT]))
        self.offset = self.turn = 0
        self.over = [0, 0]

    def send(self, data: bytes) -> None:
        for at in range(0, len(data), LANE_CHUNK):
            piece = memoryview(data)[at:at + LANE_CHUNK]
            head = struct.pack("<Q", self.offset)
            self.offset += len(piece)
            if len(piece) < WORTH:
                self.connection.send(2, head, piece)
                continue
            lane, self.turn = self.turn, (self.turn + 1) % COUNT
            self.connection.send(LANED, MARK_LAYOUT.pack(lane, 1 + len(head) + len(piece)))
            self.lanes[lane].wait_ready(20)
            self.lanes[lane].send(2, head, piece)
            self.over[0] += 1

    def answer(self, seq: int) -> tuple[int, bytes]:
        """(CUresult, payload) of that call's answer; others before it are left out."""
        parts: list[bytes] = []
        while True:
            kind, body = self.connection.recv(20)
            if kind == LANED_BACK:
                number, length = lanes.mark(body, COUNT)
                kind, body = self.lanes[number].take(length, 20)
                self.over[1] += 1
            if kind != 17:
                continue
            parts.append(bytes(body[1:]))
            if not body[0]:
                whole = b"".join(parts)
                found, result, _, reply = struct.unpack_from("<QiII", whole)
                if found == seq:
                    return result, whole[20 + reply:]
                parts = []

    def close(self) -> None:
        self.link.close()
        self.connection.close()
        for lane in self.lanes:
            lane.close()


@pytest.fixture
def attached(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attached]:
    monkeypatch.setenv("RGPU_LANES", str(COUNT))
    found = Attached(SessionRuntime("s", 1, device))
    yield found
    found.close()


def test_bytes_go_there_and_back(attached: Attached, journal: Journal) -> None:
    """Many more than the engine has frames: each is given back."""
    rng = random.Random(3)
    attached.send(journal.opened())
    for number in range(60):
        data = rng.randbytes(rng.choice((5, 100_000, WORTH, MIB, 3 * MIB + 5, 7 * MIB)))
        attached.send(journal.write(data, stream=18 + number % 2))
        attached.send(journal.read(len(data), stream=18 + number % 2))
        assert attached.answer(journal.seq) == (0, data), number
    assert min(attached.over) > 30


def test_who_was_answered_is_listened_to(attached: Attached, device: CudaDevice, journal: Journal,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each answer that the receiving thread sent itself, and for no call that nobody awaits."""
    fast, looked = attached.link.runtime.fast, []
    assert fast is not None
    look = fast.look
    monkeypatch.setattr(Rounds, "step", lambda self: False)  # compiled code polls by itself
    monkeypatch.setattr(answer_sender, "SPIN", 5.0)  # this thread, not the sender, whatever else the machine does
    monkeypatch.setattr(answer_sender, "LOOK", 0.01)
    monkeypatch.setattr(type(fast), "look", lambda self, seconds, fd: (looked.append(seconds), look(seconds, fd)))
    attached.send(journal.opened())
    for number in range(20):
        attached.send(journal.write(bytes([number])))
        time.sleep(0.001)
        attached.send(journal.read(1))
        assert attached.answer(journal.seq) == (0, bytes([number]))
    attached.send(journal.write(b"end"))
    attached.send(journal.read(3))
    assert attached.answer(journal.seq) == (0, b"end")
    assert 0 < len(looked) <= 21 and set(looked) == {0.01}


def test_a_look_ends_with_its_time_or_with_what_comes(device: CudaDevice) -> None:
    near, far = socket.socketpair()
    fast = device.fast_path
    with near, far:
        began = time.monotonic()
        fast.look(0.05, near.fileno())
        assert 0.05 <= time.monotonic() - began < 20
        timer = threading.Timer(0.05, far.send, [b"x"])
        timer.start()
        fast.look(60.0, near.fileno())
        assert near.recv(1, socket.MSG_DONTWAIT) == b"x"
        timer.join()


def test_a_link_ends_with_a_lane(attached: Attached, journal: Journal) -> None:
    from rgpu.session.errors import LinkError

    attached.send(journal.opened())
    attached.lanes[1].close()
    with pytest.raises(LinkError):
        for _ in range(8):
            attached.send(journal.write(bytes(3 * MIB)))
        attached.send(journal.read(8))
        attached.answer(journal.seq)


def test_another_attachments_lane_is_refused(attached: Attached) -> None:
    from rgpu.session.errors import Corrupt, Fenced

    for values, error in (({"key": bytes(16), "number": 0}, Fenced), ({"number": 0}, Corrupt), ([], Corrupt)):
        mine, theirs = connected()
        mine.send(LANE, msgspec.msgpack.encode(values))
        with pytest.raises(error):
            attached.link.add_lane(theirs)
        mine.close()
        theirs.close()
