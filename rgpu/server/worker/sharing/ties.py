"""Ties: a socket between two workers of one host for each thing that one of them opened of the other.

The daemon makes both ends and decides which workers get one. The importer sends its token, the exporter answers with
descriptors, and both keep their end for as long as the thing is open: so each notices the other's end. A message
("over") precedes an orderly end; an end without it is a loss.

======== ========================= ==========================================================
from     message                   descriptors
======== ========================= ==========================================================
importer {token}
exporter {sizes: [bytes, …]}       none; each piece follows in a packet {piece: n} of its own
exporter {error, busy}             none: it is refused, or (busy) not available at present
both     {over}                    none: this end is about to be closed, in order
======== ========================= ==========================================================
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from rgpu.link.local.packets import Channel
from rgpu.session.errors import Corrupt, LinkError, Refused, RgpuError

ANSWER_SECONDS = 15.0  #: time that the other side of a new tie may take
MOST_PIECES = 4096  #: of one allocation, 1 GiB each


class Busy(Exception):
    """The exporter is paused (a checkpoint, a move): try again later."""


class Tie:
    """One end of a tie. ``peer``: the other session."""

    def __init__(self, fd: int, peer: str) -> None:
        self.peer = peer
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(True)
        self._sock.settimeout(ANSWER_SECONDS)
        self.channel = Channel(self._sock)
        self._over = threading.Event()
        self.ended: Callable[[], None] = lambda: None  #: called when the other end was closed in order

    # -- the importer ---------------------------------------------------------------
    def ask(self, token: bytes) -> list[tuple[int, int]]:
        """Send a token. Return (descriptor, bytes) of each piece, which the caller closes.

        Raises :class:`Busy`, :class:`Refused`, :class:`Corrupt`, :class:`LinkError`.
        """
        self.channel.send({"token": token})
        answer, extra = self.channel.receive()
        _close(extra)
        if "error" in answer:
            if answer.get("busy"):
                raise Busy(str(answer["error"]))
            raise Refused(str(answer["error"]))
        sizes = answer.get("sizes")
        if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_PIECES \
                or not all(type(size) is int and size > 0 for size in sizes):
            raise Corrupt("a worker answered without sizes of what it shares", reason="sizes")
        pieces: list[tuple[int, int]] = []
        try:
            for size in sizes:
                _, fds = self.channel.receive()
                if len(fds) != 1:
                    _close(fds)
                    raise Corrupt(f"{len(fds)} descriptors came for one piece of memory", reason="descriptors")
                pieces.append((fds[0], size))
        except BaseException:
            _close([fd for fd, _ in pieces])
            raise
        return pieces

    # -- the exporter ---------------------------------------------------------------
    def asked(self) -> bytes:
        """Receive the token of the other side. Raises :class:`Corrupt`, :class:`LinkError`."""
        message, fds = self.channel.receive()
        _close(fds)
        token = message.get("token")
        if not isinstance(token, bytes):
            raise Corrupt("a worker asked for memory without a token", reason="token")
        return token

    def give(self, pieces: list[tuple[int, int]]) -> None:
        """Answer with (descriptor, bytes) of each piece, and close them. Raises :class:`LinkError`."""
        try:
            self.channel.send({"sizes": [size for _, size in pieces]})
            for number, (fd, _) in enumerate(pieces):
                self.channel.send({"piece": number}, (fd,))
        finally:
            _close([fd for fd, _ in pieces])

    def refuse(self, why: str, busy: bool = False) -> None:
        """Answer that it is refused, or (``busy``) not available at present, and close the tie."""
        try:
            self.channel.send({"error": why, "busy": busy})
        except LinkError:
            pass
        self.channel.close()

    # -- both -----------------------------------------------------------------------
    def watch(self, ended: Callable[[Tie, bool], None]) -> None:
        """Call ``ended(tie, lost)`` once, in a thread, when the other end closes; not when this one does."""
        try:
            self._sock.settimeout(None)
        except OSError:  # this end was closed meanwhile
            return
        threading.Thread(target=self._wait, args=(ended,), daemon=True, name=f"tie-{self.peer}").start()

    def _wait(self, ended: Callable[[Tie, bool], None]) -> None:
        try:
            message, fds = self.channel.receive()
            _close(fds)
            lost = "over" not in message
        except RgpuError:
            lost = True
        if self._over.is_set():
            return  # it was this end
        self._over.set()
        self.channel.close()
        if not lost:
            self.ended()
        ended(self, lost)

    @property
    def is_over(self) -> bool:
        """Whether the tie is closed."""
        return self._over.is_set()

    def over(self) -> None:
        """Close the tie in order."""
        if self._over.is_set():
            return
        self._over.set()
        self.drop()

    def drop(self) -> None:
        """Send that it is over, and close this end."""
        say: dict[str, Any] = {"over": True}
        try:
            self.channel.send(say)
        except LinkError:
            pass
        self.channel.close()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
