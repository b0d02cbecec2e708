"""Connections that one process makes for another of its host that may make none: to one address, while allowed.

A worker's box has no network (:mod:`rgpu.server.box`). For a move its daemon hands it a :class:`Dialer`'s descriptor:
each packet sent there is answered with a connected socket, or with an error.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from rgpu.link.local.packets import Channel, shut
from rgpu.session.errors import LinkError, RgpuError, from_dict

MOST = 16  #: connections that one dialer makes


class Dialer:
    """The side that may connect; a context manager. ``descriptor``: for the other process; closed at the end."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        """``connect`` makes one connection; it raises the error for the other side, a :class:`RgpuError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = theirs.detach()
        self._connect, self._ours = connect, ours
        threading.Thread(target=self._serve, name="dialer", daemon=True).start()

    def __enter__(self) -> Dialer:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        shut(self._ours)

    def _serve(self) -> None:
        channel = Channel(self._ours)
        for _ in range(MOST):
            try:
                channel.receive()
                try:
                    with self._connect() as made:
                        channel.send({"ok": True}, (made.fileno(),))
                except RgpuError as error:
                    channel.send({"error": error.as_dict()})
            except (RgpuError, OSError):
                return
        shut(self._ours)


class Dialed:
    """The side without a right to connect. It owns ``descriptor`` from here on. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._channel, self._lock = Channel(socket.socket(fileno=descriptor)), threading.Lock()

    def connection(self) -> socket.socket:
        """Return a new connection. Raises :class:`LinkError`, and the dialer's errors."""
        with self._lock:
            self._channel.send({"do": "connect"})
            message, fds = self._channel.receive()
        if "error" in message or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise from_dict(message["error"]) if "error" in message else LinkError("no connection was made")
        return socket.socket(fileno=fds[0])

    def close(self) -> None:
        """Close the channel to the dialer."""
        self._channel.close()
