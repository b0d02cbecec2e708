"""A relay in front of the control port's ZeroMQ socket, which only peers with a valid handshake pass.

ZeroMQ accepts every connection, and a silent one costs it a descriptor. So the port is a
:class:`~rgpu.link.gate.gate.Gate`: a peer that begins with a ZMTP signature is connected to the inner socket (an
abstract Unix address that only this user may reach), and counts as proven when ZeroMQ answers READY, which follows the
check of its key (ZAP). The relay decrypts nothing: it reads only the names of the handshake's commands.
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
#: Bytes that a peer may send before it is proven: greeting, HELLO (202 bytes), INITIATE (some 350).
UNPROVEN_BYTES = 4096
#: s that answers may wait here for a peer that does not read: ZeroMQ keeps more of them meanwhile.
STUCK_SECONDS = 5.0
_LONG, _COMMAND = 0x02, 0x04


class Front:
    """The control port as peers reach it. ``inside``: the address that ZeroMQ binds, in its notation."""

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
        """Close the port once the data of the inner socket, closed already, is passed on; within ``seconds``."""
        until = time.monotonic() + seconds
        while self.gate.known and time.monotonic() < until:
            time.sleep(0.005)
        self.gate.close()

    def peer_of(self, descriptor: int) -> str:
        """Return the address of the peer's host behind a ZeroMQ connection; empty where it has ended."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                name = sock.getpeername()
        except OSError:
            return ""
        return self._peers.get(name, "") if isinstance(name, bytes) else ""

    def at_the_door(self) -> str:
        """Return the addresses of the hosts whose peers' keys are being checked, separated by commas: mostly one."""
        return ",".join(sorted({one.address for one in self.gate.unproven() if one.stage is Stage.KNOWS}))[:200]

    # -- in the gate's thread ----------------------------------------------------------
    def _make(self, gate: Gate, sock: socket.socket, peer: tuple[str, int]) -> Visitor:
        return _Relayed(gate, sock, peer, self)

    def connect(self, peer: str) -> tuple[socket.socket, bytes]:
        """Connect to the inner socket for ``peer``; return the connection and its name. Raises OSError."""
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
        """Delete the entry of an inner connection that has ended."""
        self._peers.pop(name, None)

    def refused(self, peer: str, why: str) -> None:
        """Log that a peer's connection ended before it was proven; many make few lines."""
        if self._warned.due():
            log.info("a control connection ended before its peer was known", peer=peer, reason=why)


class _Flow:
    """One direction: ``pending`` was received and cannot be sent yet."""

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
    """One peer of the control port, and its inner connection once it has sent a ZMTP signature."""

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
        self._stuck = 0.0  #: monotonic s since when its peer reads nothing; 0: it reads

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
            return False  # not ZMTP: no answer
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
        """Follow the handshake. Raises :class:`LinkError` for a peer that sends more than one needs."""
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
        """Watch each socket for the events that can make progress: a direction with pending data is not read."""
        assert self._in is not None and self._out is not None and self._inner is not None
        for sock, reads, writes in ((self.sock, self._in, self._out), (self._inner, self._out, self._in)):
            events = (0 if reads.pending else READ) | (WRITE if writes.pending else 0)
            self.gate.watch(self, sock, events)

    def expired(self, now: float) -> str:
        """Return why a proven connection has to end: its peer has not read its data for too long; empty: it stays."""
        waits = self._out is not None and bool(self._out.pending)
        self._stuck = (self._stuck or now) if waits else 0.0
        return f"it takes no answers for {STUCK_SECONDS:g} s" if waits and now - self._stuck > STUCK_SECONDS else ""

    @property
    def waits(self) -> bool:
        """Whether data waits that its peer has not read yet."""
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
    """A parser of the messages of a ZeroMQ CURVE server's handshake, which show how far its peer is."""

    def __init__(self) -> None:
        self._said = bytearray()
        self._at = GREETING
        self._stage = Stage.SPEAKS

    def hear(self, data: bytes) -> Stage:
        """Parse more of the server's data; return the stage that its peer has reached by it."""
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
        """The name of the next complete command; empty for a frame that is none."""
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
