"""Readers of what workers of a gang give each other, as functions of bytes: see :mod:`tests.fuzz.readers`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rgpu.link.messages.ranks import (
    ASK,
    ASK_ID_LAYOUT,
    BORROW,
    CONTRIBUTIONS,
    FLOOR,
    GO_BACK,
    HOLDS,
    KEPT,
    KEPT_HEAD_LAYOUT,
    NEVER,
    PLACED,
    REFILL,
    Ask,
    Borrow,
    Floor,
    GoBack,
    Never,
    Refill,
)
from rgpu.server.collectives.contributions import Contribution, Key, Log, decode, encode
from rgpu.server.worker.collectives.answering import Answering, Asker, _Client
from rgpu.server.worker.collectives.asking import Asking
from rgpu.server.worker.collectives.segments import PeerSegments
from rgpu.session.errors import Corrupt, RgpuError
from rgpu.session.objects import collectives
from rgpu.session.objects.collectives import DataType, Kind, Operation, Reduction

UNIQUE, HERE, THERE = b"u" * 4, (-1, -1, 3), (0, 1, 2)
BROUGHT = {rank: Contribution(Kind.ALL_REDUCE, DataType.FLOAT32, Reduction.SUM, -1, 2, b"", bytes(8))
            for rank in range(3)}


def contributions(data: bytes) -> None:
    """What ranks brought, rows of a checkpoint, operations of a group, members of a communicator."""
    try:
        found = decode(data)
        assert decode(b"".join(encode(found))) == found
    except RgpuError:
        pass
    try:
        Log().restore(msgspec.msgpack.decode(data))
    except (RgpuError, msgspec.MsgspecError, ValueError):
        pass
    for reader in (collectives.decode, lambda body: collectives.decode_members(body, 3)):
        try:
            reader(data)  # type: ignore[operator]
        except RgpuError:
            pass


class SharedStub:
    """A communicator of three sessions."""

    members: Sequence[str] = ("a", "b", "c")

    def never(self, rank: int, key: Key) -> str:
        return f"session {self.members[rank]} has left" if rank == 2 else ""

    def again(self, key: Key) -> bool:
        return bool(key[2] % 2) and all(self.members[rank] for rank in key[:2] if rank >= 0)

    def taken(self, key: Key) -> bool:
        return key[2] < 3

    def held(self, key: Key, session: str, ranks: Sequence[int]) -> None:
        assert session in self.members and all(self.members[rank] for rank in ranks)

    def renewed(self, session: str) -> list[tuple[Key, list[int]]]:
        return [(HERE, [0])] if session in self.members else []

    def lost(self, key: Key, why: str) -> None:
        assert why


class _Lent(PeerSegments):
    """One segment of 8 bytes."""

    def __init__(self) -> None:
        pass

    def view(self, number: int, size: int) -> memoryview:
        if number != 1 or not 0 < size <= 8:
            raise Corrupt(f"{size} bytes of segment {number}", reason="size")
        return memoryview(bytes(size))


class _Connection:
    """Takes all that is sent."""

    def send(self, kind: int, *parts: Any) -> None:
        b"".join(parts)

    def close(self) -> None:
        pass


class Told(_Client):
    """A client whose messages are not sent by a thread."""

    def __init__(self) -> None:
        self.connection, self.asker, self.pending = _Connection(), Asker("b", 1), {}  # type: ignore[assignment]
        self.memory = self.lanes = None
        self.lane, self.sent = False, 0
        self.told: list[tuple[int, bytes]] = []

    def leave(self) -> None:
        pass

    def tell(self, kind: int, *parts: bytes | memoryview) -> None:
        self.told.append((kind, b"".join(parts)))


def rank_link(data: bytes) -> None:
    """Messages of a rank link, each u8 type, u16 length, body, to both of its ends; then something is brought here."""
    log = Log()
    log.put(UNIQUE, HERE, {0: BROUGHT[0]})
    answering, client = Answering(log), Told()
    answering.opened(UNIQUE, SharedStub())
    answering._clients.add(client)
    asking = Asking("a", log, lambda session, epoch: None, lambda: False)
    asking._begin = lambda: None  # type: ignore[method-assign]  # no thread
    asking.opened(UNIQUE, SharedStub())
    asking.ask(UNIQUE, HERE, [0, 1, 2], [0])
    pieces: dict[int, Any] = {}
    at = 0
    while at + 3 <= len(data):
        length = int.from_bytes(data[at + 1:at + 3], "little")
        body = memoryview(data[at + 3:at + 3 + length])
        for take in (lambda kind, what: answering._take(client, kind, what),
                     lambda kind, what: asking._take(kind, what, pieces, _Lent())):
            try:
                take(data[at], body)
            except (RgpuError, ValueError):  # as both ends' reading threads
                pass
        at += 3 + length
    log.put(UNIQUE, HERE, BROUGHT, seq=1)
    log.put(UNIQUE, THERE, {0: BROUGHT[0]})
    answering.changed(UNIQUE)
    assert len(pieces) <= 5


def packed(message: msgspec.Struct) -> memoryview:
    """The body of a message."""
    return memoryview(msgspec.msgpack.encode(message))


def _message(kind: int, body: bytes) -> bytes:
    return struct.pack("<BH", kind, len(body)) + body


def _link_seeds() -> list[bytes]:
    pack = msgspec.msgpack.encode
    whole = b"".join(encode({1: BROUGHT[1]}))
    return [_message(ASK, pack(Ask(1, UNIQUE, HERE, [0, 1], [2])))
            + _message(ASK, pack(Ask(2, UNIQUE, THERE, [0], [1], True))),
            _message(FLOOR, pack(Floor(UNIQUE, 2))) + _message(REFILL, pack(Refill(0, UNIQUE))),
            _message(CONTRIBUTIONS, ASK_ID_LAYOUT.pack(1) + b"\1" + whole) + _message(HOLDS, ASK_ID_LAYOUT.pack(1)),
            _message(KEPT, KEPT_HEAD_LAYOUT.pack(0, *HERE) + b"\0" + whole[:9])
            + _message(BORROW, pack(Borrow(b"n" * 16))) + _message(PLACED, ASK_ID_LAYOUT.pack(1) + pack(
                [(1, 0, 7, 0, -1, 2, b"", 1, 8)])),
            _message(NEVER, pack(Never(2, "over", True))) + _message(GO_BACK, pack(GoBack(UNIQUE, HERE, "none")))]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "contributions": (contributions, lambda: [
        b"".join(encode(BROUGHT)), msgspec.msgpack.encode([(UNIQUE, HERE, 1, [(0, 0, 7, 0, -1, 2, b"", bytes(8))])]),
        collectives.encode([Operation(Kind.SEND, DataType.INT8, Reduction.SUM, 1, 40, 18, 1 << 45, 0, 4)]),
        b"\1\0a\2\0bc\1\0d"]),
    "rank_link": (rank_link, _link_seeds),
}
