"""Packets of msgpack between two processes of one host, with descriptors beside them.

Unix sockets of type SOCK_SEQPACKET: a message is one packet, at most :data:`LIMIT` bytes.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any

import msgspec

from rgpu.session.errors import Corrupt, LinkError

LIMIT = 128 * 1024
MAX_FDS = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Channel:
    """One end of the channel. Sends are whole packets: safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message. Raises :class:`LinkError` when the other side has ended, or the message is too long."""
        data = _encode(message)
        if len(data) > LIMIT:
            raise LinkError(f"message of {len(data)} bytes to a worker; the limit is {LIMIT}")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([data], ancillary)
        except OSError as error:
            raise LinkError(f"the worker channel is closed: {error}") from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and its descriptors (now owned by the caller).

        Raises :class:`LinkError` at end of file, :class:`Corrupt` if it is no map.
        """
        size = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(LIMIT + 1, size)
        except OSError as error:
            raise LinkError(f"the worker channel is closed: {error}") from error
        fds = descriptors(ancillary)
        if not data:
            raise LinkError("the other side of the worker channel has gone")
        try:
            message = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _close_all(fds)
            raise Corrupt(f"worker channel: {error}") from error
        if not isinstance(message, dict) or flags & socket.MSG_TRUNC:
            _close_all(fds)
            raise Corrupt("worker channel: a message that is no map, or was cut")
        return message, fds

    def peer(self) -> tuple[int, int]:
        """Return (pid, uid) of the other side, from the kernel."""
        pid, uid, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    def close(self) -> None:
        """Close this end, and wake threads that wait at the other."""
        shut(self.sock)


def shut(sock: socket.socket) -> None:
    """Shut a socket down in both directions, connected or not, and close it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()


def descriptors(ancillary: list[Any]) -> list[int]:
    """Return the file descriptors in the ancillary data of ``recvmsg``; they belong to the caller."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
