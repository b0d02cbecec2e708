"""What stands before the control port's ZeroMQ socket: a relay that a peer passes only by what it says.

ZeroMQ accepts every connection, and one that says nothing costs it a descriptor. So the port is a
:class:`~rgpu.link.gate.gate.Gate`: a peer that begins as ZMTP does is connected to the socket inside (an abstract Unix
address that only this user may reach), and counts as proven when ZeroMQ answers READY, which follows its key's
examination (ZAP). What is sealed stays sealed: names of commands are all that is read here, as far as the handshake.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time

from rgpu.link.accepting import Warned
from rgpu.link.gate.budget import Budget, Stage
from rgpu.link.gate.gate import READ, WRITE, Gate, Visitor
from rgpu.link.loggers import get_logger
from rgpu.session.errors import LinkError

log = get_logger(__name__)

CHUNK = 64 * 1024  #: bytes held of one direction of one connection, at most
SIGNATURE = 10  #: of a ZMTP greeting: 0xFF, eight bytes, 0x7F
GREETING = 64
#: What a peer may send before it is proven: greeting, HELLO (202 bytes), INITIATE (some 350).
UNPROVEN_BYTES = 4096
#: s that answers may lie here for a peer that does not read: ZeroMQ keeps more of them meanwhile.
STUCK_SECONDS = 5.0
_LONG, _COMMAND = 0x02, 0x04


class Front:
    """The control port as others see it. ``inside``: where ZeroMQ binds, as it writes addresses."""

    def __init__(self, listen: tuple[str, int], budget: Budget) -> None:
        """Bind. Raises :class:`LinkError` where that address is not free."""
        self._name = "rgpu-control-" + secrets.token_hex(12)
        self.inside = f"ipc://@{self._name}"
        self.gate = Gate("control port", listen, budget, self._make)
        self._numbers = itertools.count()
        self._peers: dict[bytes, str] = {}  #: by the address that the relay's inner end is bound to
        self._warned = Warned()

    def start(self) -> None:
        """Begin to accept."""
        self.gate.start()

    def finish(self, seconds: float = 0.5) -> None:
        """End the port once what the socket inside has sent, which is closed now, is passed on; so long at most."""
        until = time.monotonic() + seconds
        while self.gate.known and time.monotonic() < until:
            time.sleep(0.005)
        self.gate.close()

    def peer_of(self, descriptor: int) -> str:
        """The host's address of who is behind a connection of the ZeroMQ socket; empty where it has gone."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                name = sock.getpeername()
        except OSError:
            return ""
        return self._peers.get(name, "") if isinstance(name, bytes) else ""

    def at_the_door(self) -> str:
        """Addresses of the hosts whose peers' keys are being examined, divided by commas: mostly one."""
        return ",".join(sorted({one.address for one in self.gate.unproven() if one.stage is Stage.KNOWS}))[:200]

    # -- in the gate's thread ----------------------------------------------------------
    def _make(self, gate: Gate, sock: socket.socket, peer: tuple[str, int]) -> Visitor:
        return _Relayed(gate, sock, peer, self)

    def connect(self, peer: str) -> tuple[socket.socket, bytes]:
        """A connection to the socket inside, for ``peer``, and the name it is known by. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        name = f"\0{self._name}/{next(self._numbers)}".encode()
        try:
            sock.bind(name)
            sock.connect(f"\0{self._name}")
        except OSError:
            sock.close()
            raise
        self._peers[name] = peer
        return sock, name

    def forget(self, name: bytes) -> None:
        """A connection inside has ended."""
        self._peers.pop(name, None)

    def refused(self, peer: str, why: str) -> None:
        """Log that a peer ended before it was known; many make few lines."""
        if self._warned.due():
            log.info("a control connection ended before its peer was known", peer=peer, reason=why)


class _Flow:
    """One direction: what was received and cannot be sent yet."""

    __slots__ = ("pending", "source", "target")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.pending = b""

    def send(self, data: bytes) -> None:
        try:
            sent = self.target.send(data)
        except BlockingIOError:
            sent = 0
        self.pending = data[sent:]


class _Relayed(Visitor):
    """One peer of the control port, and its connection inside once it has begun as ZMTP does."""

    def __init__(self, gate: Gate, sock: socket.socket, peer: tuple[str, int], front: Front) -> None:
        super().__init__(gate, sock, peer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._front = front
        self._begun = b""
        self._inner: socket.socket | None = None
        self._name = b""
        self._in: _Flow | None = None
        self._out: _Flow | None = None
        self._came = 0
        self._handshake = Handshake()
        self._stuck = 0.0  #: monotonic s since when its peer takes nothing; 0: it does

    def ready(self, sock: socket.socket, events: int) -> bool:
        if self._in is None or self._out is None:
            return self._begin()
        reads, writes = (self._in, self._out) if sock is self.sock else (self._out, self._in)
        if events & WRITE and writes.pending:
            self._stuck = 0.0
            writes.send(writes.pending)
        stays = True
        if events & READ and not reads.pending:
            stays = self._pass(reads)
        self._watch()
        return stays

    def _begin(self) -> bool:
        data = self.sock.recv(SIGNATURE - len(self._begun))
        self._begun += data
        if not data or self._begun[0] != 0xFF or len(self._begun) == SIGNATURE and self._begun[9] != 0x7F:
            return False  # not ours: no answer
        self.stage = Stage.SPEAKS
        if len(self._begun) < SIGNATURE:
            return True
        self._inner, self._name = self._front.connect(self.address)
        self._in, self._out = _Flow(self.sock, self._inner), _Flow(self._inner, self.sock)
        self._in.send(self._begun)
        self._watch()
        return True

    def _pass(self, flow: _Flow) -> bool:
        data = flow.source.recv(CHUNK)
        if not data:
            return False
        self.heard = self.gate.now()
        if self.stage is not Stage.PROVEN:
            self._look(flow, data)
        flow.send(data)
        return True

    def _look(self, flow: _Flow, data: bytes) -> None:
        """How far the handshake is. Raises :class:`LinkError` for a peer that sends more than one takes."""
        if flow is self._in:
            self._came += len(data)
            if self._came > UNPROVEN_BYTES:
                raise LinkError("it sends much before it is known")
            return
        stage = self._handshake.hear(data)
        if stage is Stage.PROVEN:
            self.gate.proven(self)
        else:
            self.stage = max(self.stage, stage)

    def _watch(self) -> None:
        """Of each socket, what can be gone on with: a direction that is stuck is not read further."""
        assert self._in is not None and self._out is not None and self._inner is not None
        for sock, reads, writes in ((self.sock, self._in, self._out), (self._inner, self._out, self._in)):
            events = (0 if reads.pending else READ) | (WRITE if writes.pending else 0)
            self.gate.watch(self, sock, events)

    def expired(self, now: float) -> str:
        """Why a connection that is known has to end: what is there for its peer was not taken for so long."""
        waits = self._out is not None and bool(self._out.pending)
        self._stuck = (self._stuck or now) if waits else 0.0
        return f"it takes no answers for {STUCK_SECONDS:g} s" if waits and now - self._stuck > STUCK_SECONDS else ""

    @property
    def waits(self) -> bool:
        """Whether something is there for its peer that it has not taken yet."""
        return bool(self._stuck) or (self._out is not None and bool(self._out.pending))

    def end(self, why: str) -> None:
        if self.stage is not Stage.PROVEN and self.stage is not Stage.SILENT:
            self._front.refused(self.peer, why)
        if self._inner is not None:
            self.gate.watch(self, self._inner, 0)
            self._inner.close()
            self._front.forget(self._name)
        self.sock.close()


class Handshake:
    """What a ZeroMQ CURVE server says in its handshake, read along: how far its peer is."""

    def __init__(self) -> None:
        self._said = bytearray()
        self._at = GREETING
        self._stage = Stage.SPEAKS

    def hear(self, data: bytes) -> Stage:
        """More of what the server says; the stage that its peer has reached by it."""
        if self._stage is Stage.PROVEN:
            return self._stage
        self._said += data
        while (command := self._next()) is not None:
            if command == b"WELCOME":
                self._stage = Stage.KNOWS
            elif command == b"READY":
                self._stage = Stage.PROVEN
                break
        return self._stage

    def _next(self) -> bytes | None:
        """The name of the next whole command; empty for what is none."""
        head = self._said[self._at:self._at + 9]
        if len(head) < 2:
            return None
        flags = head[0]
        size, begin = (int.from_bytes(head[1:9], "big"), 9) if flags & _LONG else (head[1], 2)
        if len(head) < begin or len(self._said) < self._at + begin + size:
            return None
        body = self._said[self._at + begin:self._at + begin + size]
        self._at += begin + size
        return bytes(body[1:1 + body[0]]) if flags & _COMMAND and body else b""
