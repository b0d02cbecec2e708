"""What a device may offer beside the :class:`~rgpu.checkpoint.device.Device` protocol: a native path for its calls.

A device with an attribute ``fast_path`` takes the bytes of the record stream
itself, applies the hot calls (:mod:`rgpu.session.calls.hot`) without Python,
and gives their answers. Everything else it hands back, whole, in its place in
the order (:class:`~rgpu.server.apply_path.ApplyPath`). It keeps its answers until they are taken: in pieces, from
pinned memory, which are sent as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from rgpu.server.apply_path import ApplyPath


@dataclass(slots=True)
class Piece:
    """A piece of an answer. ``data`` stays true until :meth:`FastPath.release`."""

    seq: int
    result: int
    index: int
    more: bool  #: further pieces follow
    address: int  #: of the bytes; HEADROOM bytes before them may be written. 0: there are none
    size: int
    handle: int

    HEADROOM = 64


class Took(IntEnum):
    """What :meth:`FastPath.take` came to, beside a :class:`Piece`."""

    NOTHING = 0  #: the time is over
    PROGRESS = 2  #: a watermark is due
    WOKEN = 3  #: :meth:`FastPath.wake`


class FastPath(ApplyPath, Protocol):
    """See the module docstring. One thread feeds, one takes; any may ask for progress."""

    def take(self, seconds: float) -> Piece | Took:
        """Take the next piece of an answer, or wait ``seconds`` for one."""

    def take_here(self, seconds: float, fd: int) -> Piece | None:
        """The feeding thread's own short wait for an answer; ends when ``fd`` is readable."""

    def look(self, seconds: float, fd: int) -> None:
        """Look whether ``fd`` becomes readable, for that long at most, without sleeping."""

    def release(self, piece: Piece) -> None:
        """Give a piece's memory back once it was sent."""

    def plaintext(self, piece: Piece, head: bytes) -> memoryview:
        """``head`` and the piece's bytes in one run, without a copy of the latter."""

    def area(self) -> tuple[int, int, int] | None:
        """Where the bytes of most pieces lie, for another process to map: (memfd, address here, bytes)."""

    def pin(self, address: int, size: int) -> bool | None:
        """Memory of another process: feed() may give it to the device as it is. None: not while the device works.

        What is fed from there is read until the call is complete, and its payload's checksum is not looked at.
        """

    def unpin(self, address: int) -> bool:
        """False: not while the device works."""

    def wake(self) -> None:
        """Wake a thread that waits in :meth:`take`."""

    def watermark(self, whole: bool, broken: int) -> bytes:
        """The body of a WATERMARK message; empty when nothing is new."""

    def room(self, size: int) -> memoryview | None:
        """A pinned buffer to decrypt a message of ``size`` into; None: there is none now."""

    def give(self, buffer: memoryview) -> None:
        """The message in it was fed."""
