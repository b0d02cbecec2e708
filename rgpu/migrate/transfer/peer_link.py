"""The Unix socket over which a source hands descriptors of its memory to the destination on the same host.

The destination listens in its own folder and sends the path and a token over the sealed link
of the move; a peer that presents the token therefore holds the other end of that
link. Both sides read the peer's user from the kernel (SO_PEERCRED): it must be a
process of the same user. Packets (SOCK_SEQPACKET): first the token, then one for
each GRANT: its number (u32) with the descriptors beside it.
"""

from __future__ import annotations

import array
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rgpu.link.local import channel
from rgpu.migrate.transfer.peer_plan import MOST_GRANTED
from rgpu.session.errors import LinkError

TOKEN_BYTES = 32
PATIENCE = 10.0  #: seconds that the other side may take for a packet
SUFFIX = ".peer"  #: end of a listener's file name, after its process id
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUMBER = struct.Struct("<I")


def boot_id() -> str:
    """Return the boot id of the running kernel; empty where it cannot be read."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ends(sock: socket.socket) -> tuple[str, str]:
    """Return the (near, far) addresses of a connection. Without a proxy between, the other side has them swapped."""
    return str(sock.getsockname()), str(sock.getpeername())


def _check_user(sock: socket.socket) -> None:
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise LinkError(f"a process of user {uid} is at the other end of the socket for descriptors", reason="user")


class Listener:
    """The destination's side of the socket. Raises :class:`OSError` when it cannot listen in ``folder``."""

    def __init__(self, folder: Path) -> None:
        _remove_stale(folder)
        self.path = folder / f"{os.getpid()}{SUFFIX}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = channel.listen(self.path)
        self._peer: socket.socket | None = None
        self._number = 0

    def receive(self, count: int) -> list[int]:
        """Receive the ``count`` descriptors of the next GRANT; the caller closes them. Raises :class:`LinkError`."""
        if self._peer is None:
            self._peer = self._accept()
        try:
            data, fds, flags, _ = socket.recv_fds(self._peer, _NUMBER.size, MOST_GRANTED, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise LinkError(f"no descriptors came: {error}", reason="descriptors") from error
        if data != _NUMBER.pack(self._number) or len(fds) != count or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            close_all(fds)
            raise LinkError(f"{len(fds)} descriptors came in a packet of {len(data)} bytes where {count} were due",
                            reason="descriptors")
        self._number += 1
        return fds

    def _accept(self) -> socket.socket:
        """Accept the peer that presents the token; other connections are closed."""
        until = time.monotonic() + PATIENCE
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                raise LinkError(f"no process connected to send descriptors: {error}", reason="descriptors") from error
            try:
                peer.settimeout(PATIENCE)
                _check_user(peer)
                if hmac.compare_digest(peer.recv(TOKEN_BYTES + 1), self.token):
                    self._forget_path()
                    return peer
            except (OSError, LinkError):
                pass
            peer.close()
        raise LinkError("no process connected with the right token for descriptors", reason="descriptors")

    def _forget_path(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the socket and remove its file; may be called more than once."""
        self._forget_path()
        self._socket.close()
        if self._peer is not None:
            self._peer.close()


def _remove_stale(folder: Path) -> None:
    """Remove sockets of workers that were killed before they could remove them."""
    for path in folder.glob(f"*{SUFFIX}"):
        if not Path("/proc", path.name.removesuffix(SUFFIX)).exists():
            path.unlink(missing_ok=True)


class Giver:
    """The source's side of the socket. Raises :class:`LinkError` when the destination's socket cannot be reached."""

    def __init__(self, path: str, token: bytes) -> None:
        try:
            found = channel.connect(Path(path), 0.0)
        except Exception as error:  # noqa: BLE001 - TimedOut, or no such folder: another mount namespace
            raise LinkError(f"the destination's socket {path} cannot be reached from here: {error}",
                            reason="unreachable") from error
        self._socket = found.sock
        self._number = 0
        try:
            self._socket.settimeout(PATIENCE)
            _check_user(self._socket)
            self._socket.send(token)
        except (OSError, LinkError) as error:
            self.close()
            raise LinkError(f"the destination's socket {path} is of no use: {error}", reason="unreachable") from error

    def send(self, fds: Sequence[int]) -> None:
        """Send the descriptors of one GRANT; the caller still closes them. Raises :class:`LinkError`."""
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            self._socket.sendmsg([_NUMBER.pack(self._number)], beside)
        except OSError as error:
            raise LinkError(f"descriptors could not be handed over: {error}", reason="descriptors") from error
        self._number += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)
