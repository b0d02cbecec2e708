"""Sessions that share a communicator, in one process: real devices, runtimes and rank links, over socket pairs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.link.local.shared import Channel
from rgpu.link.messages.data import FROM_NODE, TO_NODE
from rgpu.server.collectives.communicators import Communicators
from rgpu.server.collectives.contributions import MOST_BYTES, Log
from rgpu.server.device.cpu.schedule import Op
from rgpu.server.device.cpu.streams import Streams
from rgpu.server.device.cpu.work.collectives import submit
from rgpu.server.worker.collectives.ranks import Ranks
from rgpu.server.worker.collectives.segments import PeerSegments
from rgpu.session.errors import Fenced, LinkError
from rgpu.session.objects.collectives import NO_PEER, DataType, Kind, Operation, Reduction

UNIQUE = b"u" * 128
SEND, RECEIVE, PART = 0, 1 << 20, 1 << 16


class NoMemory:
    """Of operations whose data nobody moves."""

    def source(self, address: int, size: int) -> np.ndarray[Any, Any]:
        raise AssertionError(f"0x{address:x} + {size} is read")

    def target(self, address: int, size: int) -> np.ndarray[Any, Any]:
        raise AssertionError(f"0x{address:x} + {size} is written")


class _PlainMemory:
    """Addresses of one array, from 0 on."""

    def __init__(self, whole: np.ndarray[Any, Any]) -> None:
        self._whole = whole

    def source(self, address: int, size: int) -> np.ndarray[Any, Any]:
        return self._whole[address:address + size]

    target = source


class Member:
    """One session, with the ranks of the communicator that are its own: rank r is number 40 + r, on stream 18 + r.

    Devices reserve fixed addresses, so a process has one at most: this has a device's streams and communicators, and
    memory of its own. Its journal is what was called, by name.
    """

    def __init__(self, gang: Gang, name: str, epoch: int = 1) -> None:
        self.gang, self.name, self.epoch = gang, name, epoch
        self.memory = np.zeros(2 << 20, np.uint8)
        self.ranks = Ranks(name, Log(gang.most), self._dial, lambda: False, self._go_back, self._widen)
        self.streams = Streams(1)
        self.communicators = Communicators(lambda address, size: None)
        self.communicators.exchange = self.ranks
        self.journal: list[tuple[str, tuple[Any, ...]]] = []
        self.seq = 0

    def call(self, name: str, *args: Any) -> None:
        """Apply a call: ``open``, ``write`` (rank, bytes), ``group`` (operations), ``destroy`` (rank, abort)."""
        self.journal.append((name, args))
        self.seq += 1
        getattr(self, f"_{name}")(*args)

    def group(self, *operations: Operation) -> None:
        """Give operations, which get their numbers, in one record."""
        numbered = []
        for op in operations:
            pair = (op.communicator, op.kind, op.peer) if op.kind.paired else (op.communicator, 0, 0)
            number = self.gang.counts[pair] = self.gang.counts.get(pair, -1) + 1
            numbered.append(replace(op, number=number))
        self.call("group", *numbered)

    def read(self, rank: int, size: int) -> bytes:
        """What a rank has got, once all its work is complete."""
        assert self.streams.drain(20) and not self.error, self.detail
        return self._at(RECEIVE + rank * PART, size).tobytes()

    @property
    def error(self) -> int:
        """The sticky CUresult."""
        return self.streams.schedule.error

    @property
    def detail(self) -> str:
        """What it is about; or what is not complete."""
        return self.streams.schedule.detail or str(self.streams.unfinished())

    def last(self, rank: int = 0) -> dict[str, Any]:
        """The figures of the last operation of a rank."""
        found = [one for one in self.communicators.figures()[0]["last"] if one["rank"] == rank]
        return found[0] if found else {}

    def close(self) -> None:
        """End it, as the loss of its worker does."""
        self.streams.close(5)
        for link in [*self.ranks._asking._links.values(), *(c.connection for c in self.ranks._answering._clients)]:
            link.close()

    def _widen(self, peer: str, linked: int, count: int) -> None:
        threading.Thread(target=self.gang.widen, args=(self, peer, linked, count), daemon=True).start()

    def _open(self) -> None:
        members = self.gang.members if len(set(self.gang.members)) > 1 else []
        for rank in [rank for rank, name in enumerate(self.gang.members) if name == self.name]:
            self.streams.schedule.create_stream(18 + rank, 16, 1)
            self.communicators.create(40 + rank, 16, len(self.gang.members), rank, UNIQUE, members)

    def _write(self, rank: int, data: bytes) -> None:
        def run() -> None:
            self._at(SEND + rank * PART, len(data))[:] = np.frombuffer(data, np.uint8)
            self._at(RECEIVE + rank * PART, len(data))[:] = 0

        self.streams.submit(Op(self.seq, run), 18 + rank)

    def _group(self, *operations: Operation) -> None:
        submit(self.communicators.group(operations), self.seq, _PlainMemory(self.memory), self.streams)

    def _destroy(self, rank: int, abort: bool) -> None:
        self.communicators.destroy(40 + rank, abort)

    def _at(self, address: int, size: int) -> np.ndarray[Any, Any]:
        return self.memory[address:address + size]

    def _go_back(self, why: str) -> None:
        self.gang.sent_back.append((self.name, self.epoch, why))

    def _dial(self, peer: str, linked: int) -> None:
        threading.Thread(target=self.gang.link, args=(self, peer, linked), daemon=True).start()


class Gang:
    """Sessions whose ranks are one communicator's. ``members``: the session of each rank; ``most``: bytes of a log;
    ``shared``: their workers are one daemon's, and share the memory of what they bring."""

    def __init__(self, members: Sequence[str], most: int = MOST_BYTES, shared: bool = False) -> None:
        self.members, self.most, self.shared = list(members), most, shared
        self.sent_back: list[tuple[str, int, str]] = []  #: sessions that were to begin again: name, epoch, why
        self.over: dict[str, str] = {}
        self.counts: dict[tuple[int, int, int], int] = {}  #: of operations, as the programs' libraries count
        self.widened = 0  #: links that got lanes
        self._linking = threading.Lock()
        self.sessions: dict[str, Member] = {}
        for name in sorted(set(members)):
            self.sessions[name] = Member(self, name)
            self.sessions[name].call("open")

    def link(self, asker: Member, peer: str, linked: int) -> None:
        """Do what daemons do: connect a worker to the owner of another session, or say that it is over."""
        with self._linking:
            if peer in self.over:
                asker.ranks.gone(peer, self.over[peer])
                return
            other = self.sessions.get(peer)
            known = asker.ranks.describe()["linked"]
            if other is None or ((linked or peer in known) and other.epoch <= linked):
                return
            memory = self._lend(other) if self.shared else None
            asks, answers = self._connect(other)
            with contextlib.suppress(Fenced):  # its daemon logs it
                other.ranks.serve(answers, f"{asker.name}@{asker.epoch}")
                asker.ranks._asking.link(peer, asks, memory)

    def widen(self, asker: Member, peer: str, linked: int, count: int) -> None:
        """Make further connections to a worker, as daemons do."""
        other, asks = self.sessions.get(peer), []
        with self._linking, contextlib.suppress(Fenced, LinkError):
            if other is None or other.epoch != linked:
                return
            for _ in range(count):
                near, answers = self._connect(other)
                asks.append(near)
                other.ranks.serve(answers, f"{asker.name}@{asker.epoch}")
            asker.ranks._asking.widened(peer, asks)
            self.widened += 1

    @staticmethod
    def _connect(other: Member) -> tuple[SealedConnection, SealedConnection]:
        near, far = socket.socketpair()
        keys = os.urandom(32), os.urandom(32)
        return (Handover(keys[1], keys[0], TO_NODE, other.name, other.epoch, "ranks").connection(near),
                Handover(keys[0], keys[1], FROM_NODE, other.name, other.epoch, "ranks").connection(far))

    @staticmethod
    def _lend(other: Member) -> PeerSegments:
        number = os.urandom(16)
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        other.ranks.lend(number, one.detach())
        return PeerSegments(number, Channel(two))

    def lose(self, name: str) -> Member:
        """The worker of a session is lost."""
        member = self.sessions.pop(name)
        member.close()
        return member

    def recover(self, lost: Member, epoch: int) -> Member:
        """Another worker replays the journal of one that was lost."""
        member = self.sessions[lost.name] = Member(self, lost.name, epoch)
        for name, args in lost.journal:
            member.call(name, *args)
        return member

    def close(self) -> None:
        """End all."""
        for member in self.sessions.values():
            member.close()

    def of(self, rank: int) -> Member:
        """The session of a rank."""
        return self.sessions[self.members[rank]]


def operation(rank: int, kind: Kind, peer: int = NO_PEER, count: int = 6, data_type: DataType = DataType.FLOAT32,
              reduction: Reduction = Reduction.SUM) -> Operation:
    """An operation of a rank on its own memory."""
    return Operation(kind, data_type, reduction, peer, 40 + rank, 18 + rank, SEND + rank * PART, RECEIVE + rank * PART,
                     count, scalar=0x3C003C00 if reduction is Reduction.PREMULSUM else 0)


def contents(ranks: int, size: int, seed: int, data_type: DataType) -> list[bytes]:
    """What each rank sends: bytes that are small numbers of that type, some negative, none a NaN."""
    random = np.random.default_rng(seed)
    if data_type in (DataType.FLOAT32, DataType.FLOAT64):
        kind = np.float32 if data_type is DataType.FLOAT32 else np.float64
        return [random.normal(0, 3, size // data_type.size).astype(kind).tobytes() for _ in range(ranks)]
    if data_type in (DataType.FLOAT16, DataType.BFLOAT16):
        base = random.normal(0, 3, (ranks, size // 2)).astype(np.float32)
        bits = base.astype(np.float16).view(np.uint16) if data_type is DataType.FLOAT16 else \
            (base.view(np.uint32) >> 16).astype(np.uint16)
        return [row.tobytes() for row in bits]
    low = {DataType.FLOAT8E4M3: 0x50, DataType.FLOAT8E5M2: 0x48}.get(data_type, 256)
    return [(random.integers(0, low, size) | (random.integers(0, 2, size) << 7 if low < 256 else 0)).astype(
        np.uint8).tobytes() for _ in range(ranks)]
