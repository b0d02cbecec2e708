"""The Unix socket between shim and agent: framing, descriptors, and the peer's identity.

Messages: docs/protocols/shim.md. Everything here is
non-blocking: a shim that does not read, or sends half a message, does not
delay others. Data from the shim is checked before it is used.
"""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rgpu.link.messages.shim import (
    ANSWER,
    ANSWER_HEAD_LAYOUT,
    AREA_MAPPED,
    CHOOSE,
    GATHER,
    GATHER_HEAD_LAYOUT,
    GATHERED,
    GOODBYE,
    HELLO,
    HELLO_HEAD_LAYOUT,
    LIST,
    LISTED,
    MESSAGE_HEAD_LAYOUT,
    OBSERVE,
    OBSERVED,
    REFUSED,
    RELEASE,
    SEGMENT,
    SEGMENT_OFFER_LAYOUT,
    STATE,
    UNSUPPORTED,
    USAGE,
    VERSION,
    WANTS_AREA,
    WANTS_RING,
    WANTS_TEXT,
    WELCOME,
)
from rgpu.session.errors import AuthenticationFailed, Corrupt, LinkError, VersionMismatch

NAME_LIMIT = 4096  #: bytes of the name that the ranks of a communicator share
BODY_LIMIT = 64 * 1024  #: longest message that a shim may send
ANSWER_LIMIT = (1 << 32) - 1  #: the length field has 32 bits
MAX_FDS = 8  #: descriptors not yet taken by a message

_FUNCTION = re.compile(rb"[A-Za-z0-9_]{1,100}")
_SIZE_OF_FDS = socket.CMSG_SPACE(MAX_FDS * 4)
_WITH_DESCRIPTOR = frozenset({HELLO, SEGMENT, USAGE})


@dataclass(frozen=True, slots=True)
class Hello:
    """Facts of a connecting process; ``eventfd`` wakes the agent. The receiver of this owns the descriptors."""

    pid: int
    ppid: int
    starttime: int
    executable: str
    eventfd: int
    ring: tuple[int, int] | None = None  #: its page and its doorbell, if it reads an answer ring; owned by the receiver
    text: bool = False  #: it accepts text that kernels print
    area: bool = False  #: it can map an area of answers

    def close(self) -> None:
        """Close the descriptors that came with it."""
        for fd in (self.eventfd, *(self.ring or ())):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment that the shim offers; ``fd`` belongs to the receiver of this. Nothing about it is checked yet."""

    index: int
    kind: int
    size: int
    fd: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The program's end of the session, with its reason."""

    reason: int


@dataclass(frozen=True, slots=True)
class Observe:
    """Request for the devices and the memory used of them; makes no session."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A rank of a communicator has come, and asks which others have. ``name``: the same for all its ranks."""

    ranks: int
    rank: int
    payload: int
    name: bytes


@dataclass(frozen=True, slots=True)
class ListDevices:
    """Request for the devices of a gang's run; makes no session."""


@dataclass(frozen=True, slots=True)
class Choose:
    """The device of a gang's list that the process behind this connection makes its first context on."""

    device: int


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The shim's page of bytes used; ``fd`` belongs to the receiver of this. Nothing about it is checked yet."""

    fd: int


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The program called a driver function that the shim refuses."""

    name: str


@dataclass(frozen=True, slots=True)
class AreaMapped:
    """The shim has mapped the area that it was given."""

    number: int


Message = Hello | NewSegment | Goodbye | Observe | Gather | ListDevices | Choose | UsagePage | Unsupported | AreaMapped


class LocalPeer:
    """One connected shim."""

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of the socket. Raises :class:`AuthenticationFailed` for another user's process."""
        self.sock = sock
        pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            sock.close()
            raise AuthenticationFailed(f"a process of user {uid} tried to use this agent", uid=uid)
        self.pid: int = pid
        sock.setblocking(False)
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self.eof = False

    def fileno(self) -> int:
        """File descriptor of the socket, for polling."""
        return self.sock.fileno()

    # -- receiving ----------------------------------------------------------------
    def receive(self) -> list[Message]:
        """Return the messages received, without waiting; set :attr:`eof` at the end.

        Raises :class:`Corrupt` for bytes that are no message; the connection is
        not to be used any further then.
        """
        found: list[Message] = []
        while not self.eof and len(found) < 256:
            try:
                data, ancillary, flags, _ = self.sock.recvmsg(BODY_LIMIT, _SIZE_OF_FDS)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.eof = True
                break
            self._take_descriptors(ancillary, flags)
            self.eof = not data
            self._in += data
            found += self._parse()
        return found

    def _take_descriptors(self, ancillary: list[Any], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._fds.extend(numbers)
        for fd in self._fds:
            os.set_inheritable(fd, False)
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            raise Corrupt("the shim sent more descriptors than any message has", reason="descriptors")

    def _parse(self) -> list[Message]:
        found: list[Message] = []
        at = 0
        while len(self._in) - at >= MESSAGE_HEAD_LAYOUT.size:
            length, kind = MESSAGE_HEAD_LAYOUT.unpack_from(self._in, at)
            if length > BODY_LIMIT:
                raise Corrupt(f"a message from the shim says it has {length} bytes", reason="length")
            if len(self._in) - at < MESSAGE_HEAD_LAYOUT.size + length:
                break
            body = bytes(self._in[at + MESSAGE_HEAD_LAYOUT.size:at + MESSAGE_HEAD_LAYOUT.size + length])
            at += MESSAGE_HEAD_LAYOUT.size + length
            found.append(self._message(kind, body))
        del self._in[:at]
        if self._fds and not self._in:
            raise Corrupt("the shim sent a descriptor that belongs to no message", reason="descriptors")
        return found

    def _message(self, kind: int, body: bytes) -> Message:
        if kind in _WITH_DESCRIPTOR and not self._fds:
            raise Corrupt(f"a message of type {kind} came without its descriptor", reason="descriptors")
        if kind == HELLO and len(body) >= HELLO_HEAD_LAYOUT.size + 2:
            protocol, pid, ppid, wanted, starttime = HELLO_HEAD_LAYOUT.unpack_from(body)
            _check_protocol(protocol)
            (length,) = struct.unpack_from("<H", body, HELLO_HEAD_LAYOUT.size)
            name = body[HELLO_HEAD_LAYOUT.size + 2:HELLO_HEAD_LAYOUT.size + 2 + length]
            if wanted & WANTS_RING and len(self._fds) < 3:
                raise Corrupt("a shim wants an answer ring and sent no page for it", reason="descriptors")
            wake = self._fds.popleft()
            ring = (self._fds.popleft(), self._fds.popleft()) if wanted & WANTS_RING else None
            return Hello(pid, ppid, starttime, name.decode("utf-8", "replace"), wake, ring,
                         bool(wanted & WANTS_TEXT), ring is not None and bool(wanted & WANTS_AREA))
        if kind == SEGMENT and len(body) == SEGMENT_OFFER_LAYOUT.size:
            index, segment_kind, size = SEGMENT_OFFER_LAYOUT.unpack(body)
            return NewSegment(index, segment_kind, size, self._fds.popleft())
        if kind == GOODBYE and len(body) == 4:
            return Goodbye(int.from_bytes(body, "little"))
        if kind == OBSERVE and len(body) == 4:
            _check_protocol(int.from_bytes(body, "little"))
            return Observe()
        if kind == GATHER and GATHER_HEAD_LAYOUT.size < len(body) <= GATHER_HEAD_LAYOUT.size + NAME_LIMIT:
            protocol, ranks, rank, payload = GATHER_HEAD_LAYOUT.unpack_from(body)
            _check_protocol(protocol)
            return Gather(ranks, rank, payload, body[GATHER_HEAD_LAYOUT.size:])
        if kind == LIST and len(body) == 4:
            _check_protocol(int.from_bytes(body, "little"))
            return ListDevices()
        if kind == CHOOSE and len(body) == 4:
            return Choose(int.from_bytes(body, "little"))
        if kind == USAGE and not body:
            return UsagePage(self._fds.popleft())
        if kind == UNSUPPORTED and _FUNCTION.fullmatch(body):
            return Unsupported(body.decode())
        if kind == AREA_MAPPED and len(body) == 4:
            return AreaMapped(int.from_bytes(body, "little"))
        raise Corrupt(f"a message of type {kind} with {len(body)} bytes from the shim", type=kind, reason="message")

    # -- sending ------------------------------------------------------------------
    def send(self, kind: int, *parts: Any, fd: int | None = None) -> None:
        """Send now what the socket takes, keep the rest for :meth:`flush`."""
        length = sum(len(part) for part in parts)
        if length > ANSWER_LIMIT:
            raise LinkError(f"an answer of {length} bytes does not fit a message to the shim", reason="length")
        if length > 64 * 1024:  # do not copy the bulk of it
            self._out.append((memoryview(MESSAGE_HEAD_LAYOUT.pack(length, kind)), fd))
            self._out.extend((memoryview(part).cast("B"), None) for part in parts if len(part))
        else:
            self._out.append((memoryview(b"".join((MESSAGE_HEAD_LAYOUT.pack(length, kind), *parts))), fd))
        self.flush()

    def flush(self) -> bool:
        """Send what is kept; return True when all of it was sent. A closed connection makes :attr:`eof` true."""
        while self._out:
            view, fd = self._out[0]
            try:
                if fd is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                    sent = self.sock.sendmsg([view], rights)
                else:
                    sent = self.sock.send(view)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self.eof = True
                self._out.clear()
                return True
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = (view[sent:], None)
        return True

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    @property
    def unsent(self) -> int:
        return sum(len(view) for view, _ in self._out)

    def send_welcome(self, facts: bytes, page: int) -> None:
        """Answer HELLO with the session's facts and the agent's page (a descriptor)."""
        self.send(WELCOME, facts, fd=page)

    def send_list(self, facts: bytes) -> None:
        """Answer LIST with the devices of the run, as session facts carry them."""
        self.send(LISTED, facts)

    def observed(self, observation: bytes) -> None:
        """Answer OBSERVE with an encoded observation."""
        self.send(OBSERVED, observation)

    def gathered(self, ranks: Sequence[tuple[int, str]]) -> None:
        """Answer GATHER: (payload, session) of each rank of the communicator; no session: it has not come."""
        self.send(GATHERED, b"".join(struct.pack("<QH", payload, len(name.encode())) + name.encode()
                                     for payload, name in ranks))

    def answer(self, seq: int, result: int, flags: int, reply: Any, payload: Any) -> None:
        """Send the answer of call ``seq``: CUresult, flags, reply arguments, payload."""
        self.send(ANSWER, ANSWER_HEAD_LAYOUT.pack(seq, result, flags, len(reply)), reply, payload)

    def release(self, index: int) -> None:
        """Give segment ``index`` back to the shim."""
        self.send(RELEASE, struct.pack("<I", index))

    def state(self, state: int, reason: str) -> None:
        """Tell the shim whether it may publish, and why not."""
        self.send(STATE, struct.pack("<I", state), _text(reason))

    def refuse(self, result: int, reason: str) -> None:
        """Refuse the session: the CUresult for the program, and the reason."""
        self.send(REFUSED, struct.pack("<i", result), _text(reason))

    def close(self) -> None:
        """Close the socket and descriptors that no message took."""
        while self._fds:
            os.close(self._fds.popleft())
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()


def _check_protocol(protocol: int) -> None:
    if protocol != VERSION:
        raise VersionMismatch(f"the client library speaks protocol {protocol}, this agent {VERSION}: they come from "
                              "different installations of rgpu")


def _text(text: str) -> bytes:
    data = text.encode("utf-8")[:1000]
    return struct.pack("<H", len(data)) + data
