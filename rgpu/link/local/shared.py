"""An agent and a worker on one host: bulk data through shared memory instead of sealed frames.

docs/developers/links/same-host.md, "One host", describes what is shared, which side may use it
and when it is used again. Here are the parts that both sides need: the identity of the host,
the messages of the Unix socket by which memory is handed over,
and the checks that a descriptor must pass before it is mapped.

The Unix socket has an abstract name, drawn anew for each attachment and sent
over the sealed link with two tokens: the agent proves itself with one, the
worker with the other. In addition the peer's user is checked, as the kernel reports it.
"""

from __future__ import annotations

import array
import fcntl
import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.link.local.packets import descriptors, shut
from rgpu.link.messages.memory import MEMORY, PACKET_LAYOUT, PROVE, PROVEN, TOKEN
from rgpu.link.messages.rank_memory import GPU_MEMORY, PAGE
from rgpu.session.errors import AuthenticationFailed, Corrupt, LinkError, TimedOut

SMALLEST = 64 * 1024  #: bytes; a shorter payload is sent in a frame
TIMEOUT = 2.0  #: seconds for the agent to connect, and for either proof
HOST_VARIABLE = "RGPU_HOST_IDENTITY"  #: another name for this host, for tests

_LIMIT = 1024
_WITH_DESCRIPTOR = frozenset({MEMORY, PROVEN, PAGE, GPU_MEMORY})
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Identity = tuple[int, int, int]  #: device, inode, size of a memfd: no other has it while one is mapped


def identity(node: str = "") -> str:
    """Return the identity of this boot of this host; the same in all its containers. Empty where it cannot be read.

    Tests name hosts with :data:`HOST_VARIABLE`: ``NODE=NAME,…`` for a node's workers, ``NAME`` for agents.
    """
    for entry in os.environ.get(HOST_VARIABLE, "").split(","):
        whose, _, name = entry.rpartition("=")
        if name and whose == node:
            return name
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Offer:
    """The worker's offer of shared memory, as ATTACHED carries it."""

    name: str
    prove: bytes  #: token that the agent sends
    proven: bytes  #: token that the worker answers

    @classmethod
    def draw(cls) -> Offer:
        """Draw an offer: a random socket name and two tokens."""
        return cls("rgpu-" + secrets.token_hex(16), secrets.token_bytes(TOKEN), secrets.token_bytes(TOKEN))

    def as_dict(self) -> dict[str, Any]:
        """Return the offer as a message carries it."""
        return {"name": self.name, "prove": self.prove, "proven": self.proven}

    @classmethod
    def from_dict(cls, values: Any) -> Offer:
        """Read an offer from a message. Raises :class:`Corrupt`."""
        try:
            found = cls(values["name"], values["prove"], values["proven"])
        except (TypeError, KeyError) as error:
            raise Corrupt(f"an offer of shared memory cannot be read: {error!r}", reason="offer") from error
        if type(found.name) is not str or not found.name.startswith("rgpu-") or len(found.name) > 80 \
                or type(found.prove) is not bytes or type(found.proven) is not bytes \
                or len(found.prove) != TOKEN or len(found.proven) != TOKEN:
            raise Corrupt("an offer of shared memory is malformed", reason="offer")
        return found


@dataclass(frozen=True, slots=True)
class Message:
    """Message of the Unix socket. ``fd`` belongs to the receiver; -1: none."""

    kind: int
    number: int = 0
    size: int = 0
    data: bytes = b""
    fd: int = -1


class Channel:
    """One end of the Unix socket: whole packets, each with at most one descriptor."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        """File descriptor of the socket, for polling."""
        return self.sock.fileno()

    def check_peer(self) -> None:
        """Raise :class:`AuthenticationFailed` for another user, as far as this user namespace distinguishes users."""
        _, uid, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise AuthenticationFailed(f"the other side runs as user {uid}, this one as {os.geteuid()}", uid=uid)

    def send(self, kind: int, number: int = 0, size: int = 0, data: bytes = b"", fd: int = -1) -> bool:
        """Send a packet; False: a non-blocking socket is full now. Raises :class:`LinkError` when it is closed."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self.sock.sendmsg([PACKET_LAYOUT.pack(kind, number, size) + data], rights, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise LinkError(f"the memory channel is closed: {error}") from error
        return True

    def receive(self) -> Message | None:
        """Return the next message; None: none has arrived yet (a non-blocking socket).

        Raises :class:`LinkError` at the end, :class:`TimedOut`, :class:`Corrupt`.
        """
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(_LIMIT, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except TimeoutError:
            raise TimedOut("the other side of the memory channel says nothing") from None
        except OSError as error:
            raise LinkError(f"the memory channel is closed: {error}") from error
        fds = descriptors(ancillary)
        try:
            return _parse(data, fds, flags)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close this end, and wake threads that wait at the other."""
        shut(self.sock)


def _parse(data: bytes, fds: list[int], flags: int) -> Message:
    if not data:
        raise LinkError("the other side of the memory channel has gone", reason="end of file")
    if len(data) < PACKET_LAYOUT.size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
        raise Corrupt("a message of the memory channel is malformed", reason="message")
    kind, number, size = PACKET_LAYOUT.unpack_from(data)
    if fds and kind not in _WITH_DESCRIPTOR or not fds and kind in (MEMORY, PAGE, GPU_MEMORY):
        raise Corrupt(f"a message of type {kind} with {len(fds)} descriptors", reason="descriptors")
    return Message(kind, number, size, data[PACKET_LAYOUT.size:], fds[0] if fds else -1)


def listen(offer: Offer) -> socket.socket:
    """Listen as the worker, for :data:`TIMEOUT` until the agent connects. Raises :class:`LinkError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.bind("\0" + offer.name)
        sock.listen(1)
    except OSError as error:
        sock.close()
        raise LinkError(f"no memory channel can be offered: {error}") from error
    sock.settimeout(TIMEOUT)
    return sock


def connect(offer: Offer) -> tuple[Channel, Message]:
    """Connect as the agent, prove itself and check the worker's proof. Return the channel and its PROVEN.

    Blocks for :data:`TIMEOUT` at most, and leaves a non-blocking channel. Raises
    :class:`LinkError`, :class:`TimedOut`, :class:`AuthenticationFailed`, :class:`Corrupt`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel = Channel(sock)
    try:
        sock.settimeout(TIMEOUT)
        try:
            sock.connect("\0" + offer.name)
        except OSError as error:
            raise LinkError(f"the worker's socket cannot be reached from here (another network namespace?): {error}"
                            ) from error
        channel.check_peer()
        channel.send(PROVE, data=offer.prove)
        answer = channel.receive()
        assert answer is not None  # a socket with a time limit
        if answer.kind != PROVEN or not hmac.compare_digest(answer.data, offer.proven):
            if answer.fd >= 0:
                os.close(answer.fd)
            raise AuthenticationFailed("who answered on the memory channel is not the session's worker")
        sock.setblocking(False)
        return channel, answer
    except BaseException:
        channel.close()
        raise


def admit(sock: socket.socket, offer: Offer) -> Channel:
    """Accept the agent as the worker, once it has proved itself. Raises as :func:`connect` does."""
    try:
        found, _ = sock.accept()
    except TimeoutError:
        raise TimedOut("the agent did not come to the memory channel") from None
    except OSError as error:
        raise LinkError(f"the memory channel is closed: {error}") from error
    channel = Channel(found)
    try:
        found.settimeout(TIMEOUT)
        channel.check_peer()
        message = channel.receive()
        if message is None or message.kind != PROVE or not hmac.compare_digest(message.data, offer.prove):
            raise AuthenticationFailed("who came to the memory channel is not the session's agent")
        found.settimeout(None)
        return channel
    except BaseException:
        channel.close()
        raise


def check_sealed(fd: int, size: int, limit: int) -> Identity:
    """Check that reading ``size`` bytes of a memfd cannot kill the reader; return its identity. Raises
    :class:`Corrupt`.
    """
    if not 0 < size <= limit:
        raise Corrupt(f"shared memory of {size} bytes", reason="size")
    try:
        seals, status = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd)
    except OSError as error:
        raise Corrupt(f"shared memory that is no memfd: {error}", reason="memfd") from error
    if seals & SEALS != SEALS or status.st_size != size or status.st_blocks * 512 < size:
        raise Corrupt("shared memory that is not sealed, not of the size said, or not allocated", reason="seals")
    return status.st_dev, status.st_ino, size
