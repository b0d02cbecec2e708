"""Messages between `rgpu run` and its agent out of a resident, over a Unix stream: a kind, a length, a body.

================  ==========================================================================================
from the agent
``ACCEPTED``      an agent was forked for this connection; nothing of the run was sent before
``DECLINED``      `rgpu run` continues by itself; nothing was done
``PLACING``       a place is being requested: send signals to the agent from now on
``GO``            start the program; the changes of its environment (:func:`pack`: NAME=VALUE, or NAME to unset)
``EXIT``          exit with this code (i32)
``DIE``           end by this signal (i32)
from `rgpu run`
``REQUEST``       :func:`pack` of umask, count of words, words of the command line, environment, surroundings;
                  with it descriptors of its folder and of its stderr
``SIGNAL``        a signal was received (i32)
``STARTED``       the program runs (i32: its pid)
``ENDED``         the program ended, or did not start (i32: its exit code, or minus the signal)
================  ==========================================================================================

Both ends are of one installation: the resident ends when one of its files changed. Little-endian.
"""

from __future__ import annotations

import _socket  # importing `socket`, with enum and selectors, would take a third of the start
import array
from collections.abc import Sequence
from struct import Struct

ACCEPTED, DECLINED, PLACING, GO, EXIT, DIE = b"A", b"D", b"L", b"G", b"X", b"K"
REQUEST, SIGNAL, STARTED, ENDED = b"R", b"S", b"P", b"E"
DESCRIPTORS = 2  #: sent with a request
LIMIT = 64 << 20  #: bytes of a body; Linux allows less for arguments and environment

_HEAD = Struct("<cI")
_NUMBER = Struct("<i")
_CREDENTIALS = Struct("iII")
_INT = array.array("i").itemsize


class Gone(Exception):
    """The other side closed the connection, or sent an invalid message."""


def pack(strings: Sequence[bytes]) -> bytes:
    """Return strings without NUL as one body."""
    return b"".join([string + b"\0" for string in strings])


def unpack(body: bytes) -> list[bytes]:
    """Return the strings of a body."""
    return body.split(b"\0")[:-1]


def number(value: int) -> bytes:
    """Return a body of one number."""
    return _NUMBER.pack(value)


def value(body: bytes) -> int:
    """Return the number of a body. Raises :class:`Gone`."""
    if len(body) != _NUMBER.size:
        raise Gone(f"a number of {len(body)} bytes")
    return int(_NUMBER.unpack(body)[0])


def send(sock: _socket.socket, kind: bytes, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises :class:`Gone`."""
    data = _HEAD.pack(kind, len(body)) + body
    try:
        if descriptors:
            rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))
            data = data[sock.sendmsg([data], [rights], _socket.MSG_NOSIGNAL):]
        sock.sendall(data, _socket.MSG_NOSIGNAL)
    except OSError as error:
        raise Gone(str(error)) from None


def receive(sock: _socket.socket) -> tuple[bytes, bytes]:
    """Return the next message: its kind and body. Raises :class:`Gone`."""
    return _body(sock, _exactly(sock, _HEAD.size))


def receive_request(sock: _socket.socket) -> tuple[bytes, list[int]]:
    """Return the body of a request and its descriptors, which are the caller's. Raises :class:`Gone`."""
    try:
        head, beside, _, _ = sock.recvmsg(_HEAD.size, _socket.CMSG_SPACE(DESCRIPTORS * _INT),
                                          _socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise Gone(str(error)) from None
    found = array.array("i")
    for level, what, data in beside:
        if level == _socket.SOL_SOCKET and what == _socket.SCM_RIGHTS:
            found.frombytes(data[:len(data) - len(data) % _INT])
    kind, body = _body(sock, head + _exactly(sock, _HEAD.size - len(head)))
    if kind != REQUEST or len(found) != DESCRIPTORS:
        raise Gone(f"not a request: {kind!r} with {len(found)} descriptors")
    return body, list(found)


def peer(sock: _socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the other side, from the kernel; of a listening one, of the process that called listen."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _body(sock: _socket.socket, head: bytes) -> tuple[bytes, bytes]:
    kind, length = _HEAD.unpack(head)
    if length > LIMIT:
        raise Gone(f"a message of {length} bytes")
    return kind, _exactly(sock, length)


def _exactly(sock: _socket.socket, length: int) -> bytes:
    parts = []
    while length:
        try:
            part = sock.recv(length)
        except OSError as error:
            raise Gone(str(error)) from None
        if not part:
            raise Gone("end of file")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
