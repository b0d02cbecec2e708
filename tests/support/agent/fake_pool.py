"""A pool in one process: real control link, real data port, workers that only count and answer."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rgpu.link.control import ControlServer, Request
from rgpu.link.data import tickets
from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.opening import server_preamble
from rgpu.link.data.published import Issued, Ping, pong
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.link.local.shared import SMALLEST
from rgpu.link.messages.data import PIECE_AT_LAYOUT
from rgpu.server.worker.agent.same_host import Door, HostMemory, PlainArea
from rgpu.session.calls.wire import ANSWERED, BY_NAME
from rgpu.session.errors import AlreadyExists, NotFound, Refused, RgpuError
from rgpu.session.facts import DeviceInfo, SessionFacts
from rgpu.session.journal.record import Record, RecordReader

COMPLETED = BY_NAME["completed"].id


def answer_of(record: Record) -> bytes:
    """What every worker answers to a call: so a replay agrees."""
    return struct.pack("<QI", record.seq, record.call_id)


class FakeWorker:
    """One owner of a session: applies records in order, keeps answers, can be dropped, frozen or killed."""

    def __init__(self, pool: FakePool, epoch: int, applied: int = 0) -> None:
        self.pool, self.epoch, self.applied = pool, epoch, applied
        self.first = applied + 1
        self.records: dict[int, Record] = {}
        self.retained: dict[int, tuple[int, bytes, bytes]] = {}
        self.attached = 0
        self.completed: set[int] = set()  #: calls whose answers the program has
        self._owning = threading.Lock()  #: what belongs to the connection: applied, retained
        self.byes: list[dict[str, Any]] = []
        self.stats: dict[str, Any] = {}
        self.alive, self.mute = True, False
        self.withholds = False  #: answers and watermarks: it says that it applied calls, nothing of their end
        self.lie: bytes | None = None  #: answer this instead
        self.big = b""  #: payload of the answers
        self.varies = False  #: as long, and each call's own
        self.host: HostMemory | None = None  #: shares memory with agents on this host
        self.named = self.in_area = 0  #: payloads that came by their place; answers that went so
        self.printed: list[int | None] = []  #: how much text the agent said it had, at each attachment
        self.confirmed = 0  #: and since then
        self.usual = 0  #: calls that the program is ahead, as this worker says
        self.placed: list[Any] = []  #: where variables stood, as each attachment said
        self.told: list[Any] = []  #: the same as each attachment said
        self.issued: list[tuple[int, int, Issued]] = []  #: the same, and when it came, ns
        self.pings: list[tuple[int, Ping]] = []  #: each with what was applied as it came
        self.connection: SealedConnection | None = None
        self.area: PlainArea | None = None  #: that the attached agent reads
        self.door: Door | None = None  #: of the memory that it shares
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self.alive:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _lookup(self, ticket: tickets.Ticket) -> int:
        if not self.alive or ticket.session not in self.pool.sessions:
            raise NotFound("not here")
        return self.epoch

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection = server_preamble(sock, [self.pool.files.secret()], self._lookup).connection(sock)
            kind, body = connection.recv()
            request = msgspec.msgpack.decode(body)
            assert kind == 1 and request["epoch"] == self.epoch
            if self.connection is not None:
                self.connection.close()
            with self._owning:  # from here on the thread of the one before applies nothing
                self.connection, wanted, kept = connection, self.applied + 1, sorted(self.retained)
            self.printed.append(request.get("printed"))
            self.told.append(request.get("usual"))
            self.placed.append(request.get("variables"))
            door = self.host.invite(request.get("host")) if self.host is not None else None
            assert not isinstance(door, str)
            said = {"worker": self.host.worker, "shared": door.offer.as_dict()} if self.host and door else {}
            if door is not None:
                door.start()
            connection.send(16, msgspec.msgpack.encode({"epoch": self.epoch, "next": wanted, **said,
                                                        **self.pool.attached_more}))
            self.area, self.door = None, door
            self.attached += 1  # last: who sees it may use the link
            for seq in kept:
                self._send_answer(connection, seq)
            self._messages(connection, wanted)
        except (RgpuError, OSError, AssertionError):
            sock.close()

    def _messages(self, connection: SealedConnection, wanted: int) -> None:
        reader, offset = RecordReader(next_seq=wanted), 0
        while True:
            kind, body = connection.recv()
            if kind == 2:
                assert struct.unpack_from("<Q", body)[0] == offset
                offset += len(body) - 8
                for record in reader.feed(body[8:]):
                    self._apply(connection, record)
                if not self.mute and not self.withholds:
                    connection.send(18, struct.pack("<QII", self.applied, 0, 0))
            elif kind == 10:
                assert self.door is not None
                at, before, payload = self.door.place(body)
                assert at == offset
                offset += len(before) + len(payload)
                self.named += 1
                for record in (*reader.feed(before), *reader.feed(payload)):
                    self._apply(connection, record)
            elif kind == 9:
                assert self.host is not None and isinstance(self.host.area, PlainArea)
                assert struct.unpack("<I", body)[0] == self.host.area.number
                self.area = self.host.area
            elif kind == 4 and not self.mute:
                self.pings.append((self.applied, Ping.unpack(body)))
                connection.send(20, pong(self.pings[-1][1].shipped, self.usual))
            elif kind == 14:
                self.issued.append((self.applied, time.monotonic_ns(), Issued.unpack(body)))
            elif kind == 3:
                self.byes.append(msgspec.msgpack.decode(body))
            elif kind == 8:
                (self.confirmed,) = struct.unpack("<Q", body)
            elif kind == 5:
                self.stats = msgspec.msgpack.decode(body)

    def _apply(self, connection: SealedConnection, record: Record) -> None:
        with self._owning:
            assert connection is self.connection and record.seq == self.applied + 1
            self.records[record.seq] = Record(record.seq, record.call_id, bytes(record.args), bytes(record.payload),
                                              record.thread, record.flags)
            self.applied = record.seq
            if record.call_id == COMPLETED:
                self.completed.add(struct.unpack("<Q", record.args)[0])
            if record.call_id in ANSWERED:
                payload = random.Random(record.seq).randbytes(len(self.big)) if self.varies else self.big
                self.retained[record.seq] = (0, self.lie or answer_of(record), payload)
        if record.call_id in ANSWERED and not self.mute and not self.withholds:
            self._send_answer(connection, record.seq)

    def _send_answer(self, connection: SealedConnection, seq: int) -> None:
        result, reply, payload = self.retained[seq]
        if self.host is not None and len(payload) >= SMALLEST:
            reply = b""
        if self.area is not None and len(payload) >= SMALLEST and (at := self.area.place(seq, payload)) is not None:
            self.in_area += 1
            head = struct.pack("<QiII", seq, result, 0, 0)
            connection.send(24, PIECE_AT_LAYOUT.pack(0, self.area.number, at, len(payload)), head)
            return
        whole = struct.pack("<QiII", seq, result, 0, len(reply)) + reply + payload
        pieces = [whole[at:at + 100_000] for at in range(0, len(whole), 100_000)]
        for number, piece in enumerate(pieces):
            connection.send(17, bytes([number + 1 < len(pieces)]), piece)

    def notice(self, kind: str, epoch: int | None = None, **values: Any) -> None:
        assert self.connection is not None
        self.connection.send(19, msgspec.msgpack.encode({"kind": kind, "epoch": self.epoch if epoch is None else epoch,
                                                         **values}))

    def print_text(self, position: int, text: bytes) -> None:
        """Kernels printed ``text``, which begins at that byte of all they printed."""
        assert self.connection is not None
        self.connection.send(23, struct.pack("<Q", position), text)

    def share(self) -> None:
        """Share memory with agents that attach from now on."""
        self.host = HostMemory(None, lambda seq: seq not in self.completed)

    def drop(self) -> None:
        """Cut the connection; the worker lives."""
        if self.connection is not None:
            self.connection.close()

    def kill(self) -> None:
        self.alive = False
        self.unlisten()
        self.drop()

    def unlisten(self) -> None:
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()


class FakePool:
    """The control side. ``owner`` may be exchanged by the test."""

    def __init__(self, root: Path) -> None:
        self.files = PoolFiles(root)
        self.files.create()
        self.user = KeyPair.load(self.files.key_path("user"))
        node = self.files.add_node("a")
        self.sessions: dict[str, FakeWorker] = {}
        self.gone: set[str] = set()
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.recover = True
        self.journal_limit = 1 << 20
        self.lifetime = 3600.0
        self.attached_more: dict[str, Any] = {}  #: what ATTACHED says besides
        self.created_more: dict[str, Any] = {}  #: what session.create answers besides
        self.line: list[str] = []  #: reasons for which whoever queues has to wait, one after the other
        self.parked: set[str] = set()
        self.places = 1  #: 0: the pool has no room for a session
        self.shares = False  #: its first workers share memory with agents
        self._node = node
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._serve()

    def _serve(self) -> None:
        self.server = ControlServer(self._node, self.files.authorized, "tcp://127.0.0.1:*")
        for verb, handler in {"session.create": self.create, "session.owner": self.owner, "pool.ping": self.ping,
                              "session.end": self.note, "session.withdraw": self.note, "session.unreachable": self.note,
                              "session.keep": self.note,
                              "session.candidate": self.candidate, "session.checkpoint": self.note,
                              "session.renew_ticket": self.renew}.items():
            self.server.register(verb, handler)
        asyncio.run_coroutine_threadsafe(self.server.start(), self.loop).result(5)
        self.endpoints = [Endpoint(self.server.address, self._node.public, "a")]
        description = self.files.read_description()
        description.endpoints = self.endpoints
        self.files.write_description(description)

    def move(self, before: Callable[[], None] = lambda: None) -> None:
        """The node answers at another port from now on, and at the old one no more. ``before``: in between."""
        old = self.server
        self._serve()
        before()
        asyncio.run_coroutine_threadsafe(old.stop(), self.loop).result(5)

    def _grant(self, session: str) -> dict[str, Any]:
        granted = tickets.issue(self.files.secret(), session, self.user.public, "calls", lifetime=self.lifetime)
        return {"ticket": granted.ticket, "secret": granted.secret, "expires": granted.expires,
                "endpoints": [msgspec.to_builtins(endpoint) for endpoint in self.endpoints]}

    async def ping(self, request: Request) -> Any:
        return {"host": "a", "endpoints": [msgspec.to_builtins(endpoint) for endpoint in self.endpoints]}

    async def create(self, request: Request) -> Any:
        name = request.args["name"]
        self.log.append((request.verb, request.args))
        if self.line and request.args["options"].get("queue"):
            reason = self.line[0]
            await asyncio.sleep(0.05)
            if len(self.line) > 1:
                self.line.pop(0)
            return {"queued": {"position": 1, "waiting": 1, "reason": reason}}
        if not self.places:
            raise Refused(f"no place for {name}: a is full")
        if name in self.sessions:
            raise AlreadyExists(f"session {name} is there")
        worker = self.sessions[name] = FakeWorker(self, 1)
        if self.shares:
            worker.share()
        device = DeviceInfo("cpu", bytes(16), 1 << 30, attributes={75: 7, 76: 5})
        facts = SessionFacts(name, 1, 13000, 1 << 30, self.journal_limit, self.recover, (device,))
        return {"session": name, "owner": "a", "address": list(worker.address), "epoch": 1, "facts": facts.as_dict(),
                "recover": self.recover, **self._grant(name), **self.created_more}

    async def candidate(self, request: Request) -> Any:
        if not self.places:
            raise Refused("no place for a session: a is full")
        device = DeviceInfo("candidate", bytes(16), 1 << 30, attributes={75: 7, 76: 5})
        return {"facts": SessionFacts("", 1, 12080, 1 << 20, 0, True, (device,)).as_dict(), "driver_release": "570.1"}

    async def owner(self, request: Request) -> Any:
        name = request.args["session"]
        if name in self.gone:
            return {"session": name, "state": "ended", "reason": "it was killed"}
        if name not in self.sessions:
            raise NotFound(f"no session {name}")
        if name in self.parked:
            return {"session": name, "owner": None, "epoch": self.sessions[name].epoch, "state": "parked",
                    "alive": False}
        worker = self.sessions[name]
        return {"session": name, "owner": "a", "address": list(worker.address), "epoch": worker.epoch,
                "state": "running", "alive": True}

    async def renew(self, request: Request) -> Any:
        self.lifetime = 3600.0
        name = request.args["session"]
        over = {"state": "ended", "reason": "killed by its user"} if name in self.gone else {}
        worker = self.sessions[name]
        return {"owner": "a", "address": list(worker.address), "epoch": worker.epoch, **self._grant(name), **over}

    async def note(self, request: Request) -> Any:
        self.log.append((request.verb, request.args))
        return {}

    def said(self, verb: str) -> list[dict[str, Any]]:
        return [args for name, args in self.log if name == verb]

    def stop(self) -> None:
        for worker in self.sessions.values():
            worker.kill()
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
