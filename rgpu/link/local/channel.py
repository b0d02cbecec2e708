"""The private channel between a node daemon and one of its workers.

The worker listens on a Unix socket (SOCK_SEQPACKET, mode 0600) in the node's
own directory; the daemon connects, and connects again after it was restarted:
that is how it takes over workers. A message is one packet of msgpack, at most
:data:`~rgpu.link.local.packets.LIMIT` bytes, with descriptors beside it (sockets of authenticated peers).

Requests carry ``id`` and ``do``; replies ``id`` and ``ok`` or ``error``;
messages without ``id`` are the worker's reports (``event``).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from rgpu.link.local.packets import Channel
from rgpu.session.errors import TimedOut


def listen(path: Path) -> socket.socket:
    """Listen as the worker, bound relative to the folder: a Unix path has at most 107 bytes."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _at(path) as short:
        if os.path.lexists(short):
            os.unlink(short)
        old = os.umask(0o177)
        try:
            sock.bind(short)
        finally:
            os.umask(old)
    sock.listen(4)
    return sock


def connect(path: Path, timeout: float) -> Channel:
    """Connect as the daemon; wait until the worker listens. Raises :class:`TimedOut`."""
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _at(path) as short:
                sock.connect(short)
            return Channel(sock)
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline:
                raise TimedOut(f"the worker at {path} does not listen: {error}") from error
            time.sleep(0.01)


class _at:
    """``/proc/self/fd/N/name``: a short name for a socket in a deep folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> str:
        self.fd = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY)
        return f"/proc/self/fd/{self.fd}/{self.path.name}"

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)
