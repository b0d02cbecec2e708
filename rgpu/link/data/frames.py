"""Data links over sockets: the preamble that opens one, and the sealed connection it gives.

Both ends are synchronous and blocking. A node's daemon answers the preamble,
and may then hand the connected socket, with a :class:`Handover`, to another
process, which continues from frame 0 of both directions.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rgpu import __version__
from rgpu.link import versions
from rgpu.link.data.agreement import Share, keys_of_client
from rgpu.link.data.sealing import FRAME_LIMIT, OVERHEAD, Opener, Sealer, frame_size
from rgpu.link.messages.data import (
    CLIENT_HEAD_LAYOUT,
    FROM_NODE,
    MAGIC,
    NODE_HEAD_LAYOUT,
    PREAMBLE,
    PURPOSE_CALLS,
    PURPOSE_LANE,
    PURPOSE_PAGES,
    PURPOSE_RANKS,
    SALT,
    TO_NODE,
)
from rgpu.session.errors import Corrupt, LinkError, RgpuError, TimedOut, VersionMismatch, from_dict

PURPOSES = {PURPOSE_CALLS: "calls", PURPOSE_PAGES: "pages", PURPOSE_LANE: "lane", PURPOSE_RANKS: "ranks"}
PURPOSE_NUMBERS = {name: number for number, name in PURPOSES.items()}
PREAMBLE_TIMEOUT = 5.0  #: seconds for the whole preamble
ERROR_LIMIT = 4096  #: longest error in a refusal, bytes
#: A frame that receives fewer bytes than this in two seconds has stalled. A damaged length is detected only after as
#: many bytes have arrived as it gives, so a stalled connection is given up.
TRICKLE = 16 * 1024

_TCP_INFO = struct.Struct("=120xQQ")
_LAST_ACK = struct.Struct("=56xI")  #: ms


class SealedConnection:
    """Messages over a connected stream socket (TCP or Unix), sealed.

    One thread may receive while others send. Every failure ends the
    connection and raises :class:`LinkError`, now and from then on.
    """

    def __init__(self, sock: socket.socket, sealer: Sealer, opener: Opener, *, session: str, epoch: int,
                 purpose: str) -> None:
        self.sock = sock
        self.session = session
        self.epoch = epoch
        self.purpose = purpose
        self.sealer = sealer
        self.opener = opener
        self._lock = threading.Lock()
        self._closed = False
        self._reading = False  #: a thread waits for more of a message
        self._came = 0
        self._frame = memoryview(bytearray(4096))  #: every frame is sealed here
        sock.setblocking(True)
        tune(sock)

    def fileno(self) -> int:
        """File descriptor of the socket, for polling."""
        return self.sock.fileno()

    def send(self, kind: int, *parts: Any) -> None:
        """Send one message; ``parts`` are contiguous, of bytes, and are gathered in the frame."""
        with self._lock:
            if self._closed:
                raise LinkError("the connection is closed")
            needed = frame_size(parts)
            if len(self._frame) < needed <= FRAME_LIMIT + 4:
                self._frame = memoryview(bytearray(needed))
            self._send_out(self.sealer.seal_into(kind, parts, self._frame))

    def send_whole(self, *messages: Any) -> None:
        """Send messages that are contiguous, each with its type in front, in one write."""
        with self._lock:
            if self._closed:
                raise LinkError("the connection is closed")
            needed = sum(len(message) + OVERHEAD for message in messages)
            if len(self._frame) < needed <= len(messages) * (FRAME_LIMIT + 4):
                self._frame = memoryview(bytearray(needed))
            end = 0
            for message in messages:
                end += self.sealer.seal_run(message, self._frame[end:])
            self._send_out(end)

    def lend(self) -> bool:
        """Have nothing sent until :meth:`take_back`, for code that seals and sends by itself; False: not possible now.

        That code counts on in ``sealer.counter``.
        """
        if not self._lock.acquire(blocking=False):
            return False
        closed = self._closed  # read once: another thread may close it at any moment
        if closed:
            self._lock.release()
        return not closed

    def take_back(self, unsent: bytes = b"") -> None:
        """End :meth:`lend`, and send the rest of the frames that were sealed meanwhile. Raises :class:`LinkError`."""
        try:
            if unsent:
                self.sock.sendall(unsent)
        except OSError as error:
            self._end()
            raise LinkError(f"the connection broke while sending: {error}") from error
        finally:
            self._lock.release()

    def _send_out(self, end: int) -> None:
        """Write the frames that were sealed."""
        try:
            self.sock.sendall(self._frame[:end])
        except OSError as error:
            self._end()
            raise LinkError(f"the connection broke while sending: {error}") from error

    def recv(self, timeout: float | None = None, room: Callable[[int], memoryview | None] | None = None,
             whole: bool = False, drop: Callable[[memoryview], None] | None = None) -> tuple[int, memoryview]:
        """Return the next message as (type, body); ``room`` and ``drop`` as in :meth:`Opener.next`.

        ``whole``: nothing is read ahead, and the rest of a frame is waited for in one call.

        ``timeout`` in seconds: raises :class:`TimedOut` when no whole message
        arrived in time; the connection stays usable, and nothing is lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while (message := self.opener.next(room, drop)) is None:
                self._reading = True
                if deadline is not None:
                    _wait_readable(self.sock, deadline)
                space = self.opener.room()
                count = self.sock.recv_into(space[:self.opener.missing], 0, socket.MSG_WAITALL) if whole else \
                    self.sock.recv_into(space)
                if count == 0:
                    where = " in the middle of a frame" if self.opener.pending else ""
                    raise LinkError(f"the peer closed the connection{where}", reason="end of file")
                self.opener.received(count)
            return message
        except LinkError:
            self._end()
            raise
        except (OSError, ValueError) as error:
            self._end()
            raise LinkError(f"the connection broke: {error}") from error
        finally:
            self._reading = False

    def stands(self) -> bool:
        """Whether the receiver waits in the middle of a frame of which hardly anything arrived since the last call.

        To be called by another thread, every two seconds or more.
        """
        came, self._came = self.opener.came - self._came, self.opener.came
        return self._reading and self.opener.pending > 0 and came < TRICKLE

    def passed(self) -> tuple[int, int]:
        """Return the bytes received, and the bytes that the peer's host acknowledged, as TCP counts them; else zeros.

        ``tcpi_bytes_received`` and ``tcpi_bytes_acked`` of tcp(7)'s TCP_INFO (Linux 4.1).
        """
        try:
            acked, received = _TCP_INFO.unpack_from(self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
        except (OSError, struct.error):
            return 0, 0
        return received, acked

    def unheard(self) -> float:
        """Return the seconds since the peer's host acknowledged anything (``tcpi_last_ack_recv``); 0 where unknown."""
        try:
            (age,) = _LAST_ACK.unpack_from(self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
        except (OSError, struct.error):
            return 0.0
        return float(age) / 1000

    def _end(self) -> None:
        self._closed = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close; wakes a thread that is inside :meth:`recv`. May be called more than once."""
        self._end()
        self.sock.close()

    def __enter__(self) -> SealedConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Handover:
    """The state that a process needs, besides the socket, to continue an accepted connection.

    ``direction``: the byte of the direction in which the holder sends. Good
    for one connection, once: the counters of both directions are 0.
    """

    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    direction: int
    session: str
    epoch: int
    purpose: str
    agent: str = ""  #: public key of the other end, from its ticket
    ticket: str = ""  #: id of its ticket

    def pack(self) -> bytes:
        """Encode it as msgpack, keys included."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Handover:
        """Decode a handover. Raises :class:`Corrupt`."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"a connection's handover cannot be read: {error}", reason="msgpack") from None
        if len(found.send_key) != 32 or len(found.receive_key) != 32 or found.direction not in (TO_NODE, FROM_NODE):
            raise Corrupt("a connection's handover has an impossible key or direction", reason="handover")
        return found

    def connection(self, sock: socket.socket) -> SealedConnection:
        """Return the connection on ``sock``, to continue where the other process stopped."""
        other = TO_NODE if self.direction == FROM_NODE else FROM_NODE
        return SealedConnection(sock, Sealer(self.send_key, self.direction, self.epoch, self.session),
                                Opener(self.receive_key, other, self.epoch, self.session),
                                session=self.session, epoch=self.epoch, purpose=self.purpose)


def connect(address: tuple[str, int] | str, timeout: float = PREAMBLE_TIMEOUT) -> socket.socket:
    """Return a socket connected to (host, port), or to a Unix path. Raises :class:`LinkError`."""
    try:
        if isinstance(address, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout)
            sock.connect(address)
        else:
            sock = socket.create_connection((address[0], int(address[1])), timeout)
    except (OSError, ValueError, OverflowError) as error:
        raise LinkError(f"cannot connect to {address}: {error}", address=str(address)) from error
    tune(sock)
    return sock


def client_preamble(sock: socket.socket, purpose: str, ticket: bytes, secret: bytes, session: str, *,
                    timeout: float = PREAMBLE_TIMEOUT) -> SealedConnection:
    """Open a data link; ``connection.epoch`` is the epoch that the node claims to own.

    The claim is proven by the first frame from it that opens: only the pool's
    nodes can derive the key. Raises the node's refusal, or
    :class:`LinkError`, :class:`TimedOut`, :class:`VersionMismatch`, :class:`AuthenticationFailed` where an attacker
    between the ends downgraded both to an older preamble.
    """
    deadline = time.monotonic() + timeout
    share = Share()
    head = CLIENT_HEAD_LAYOUT.pack(MAGIC, PREAMBLE, PURPOSE_NUMBERS[purpose], len(ticket))
    send_exact(sock, head + ticket + share.data, deadline)
    magic, version, status = NODE_HEAD_LAYOUT.unpack(read_exact(sock, NODE_HEAD_LAYOUT.size, deadline))
    if magic != MAGIC:
        raise LinkError("the peer is no rgpu node", reason="magic")
    if not versions.fits(version, PREAMBLE):
        raise mismatch("the node's", version)
    if status:
        raise _refusal(sock, deadline)
    answer = read_exact(sock, SALT + 8, deadline)
    epoch = int.from_bytes(answer[SALT:], "little")
    keys = keys_of_client(share, answer[:SALT], version, secret, session, epoch)
    return Handover(keys[TO_NODE], keys[FROM_NODE], TO_NODE, session, epoch, purpose).connection(sock)


def mismatch(whose: str, version: int) -> VersionMismatch:
    """Return the error for a preamble of another version."""
    return VersionMismatch(f"{whose} data link has preamble {version}, this side is rgpu {__version__} and has "
                           f"{PREAMBLE}: install the same version on both", theirs=version, ours=PREAMBLE)


def _refusal(sock: socket.socket, deadline: float) -> RgpuError:
    (length,) = struct.unpack("<I", read_exact(sock, 4, deadline))
    if length > ERROR_LIMIT:
        return LinkError("the node refused, with an error too long to read", reason="length")
    try:
        return from_dict(dict(json.loads(read_exact(sock, length, deadline))))
    except (ValueError, TypeError):
        return LinkError("the node refused, with an error that cannot be read", reason="format")


def tune(sock: socket.socket) -> None:
    """Send small messages without delay, and detect within about 12 s that an idle peer's host disappeared."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    except OSError as error:
        raise LinkError(f"the socket is closed: {error}") from error


def _wait_readable(sock: socket.socket, deadline: float) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimedOut("the peer sent nothing in time")


def read_exact(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Read ``count`` bytes before ``deadline`` (monotonic s); a peer that trickles bytes cannot delay it further.

    Raises :class:`TimedOut`, :class:`LinkError`.
    """
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            more = sock.recv_into(view[got:])
        except TimeoutError:
            raise TimedOut("the peer stalled while the connection was opened") from None
        except OSError as error:
            raise LinkError(f"the connection broke while it was opened: {error}") from error
        if not more:
            raise LinkError("the peer closed the connection while it was opened", reason="end of file")
        got += more
        if got < count and time.monotonic() > deadline:
            raise TimedOut("the peer stalled while the connection was opened")
    return bytes(data)


def send_exact(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Send all of it before ``deadline`` (monotonic s). Raises :class:`TimedOut`, :class:`LinkError`."""
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(data)
    except TimeoutError:
        raise TimedOut("the peer stalled while the connection was opened") from None
    except OSError as error:
        raise LinkError(f"the connection broke while it was opened: {error}") from error
