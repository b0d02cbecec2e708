"""The native path for calls that a device may offer beside the :class:`~rgpu.checkpoint.device.Device` protocol.

A device with an attribute ``fast_path`` takes the bytes of the record stream
itself, applies the hot calls (:mod:`rgpu.session.calls.hot`) without Python,
and gives their answers. Every other record it hands back, whole and in order
(:class:`~rgpu.server.apply_path.ApplyPath`). It keeps its answers until they are taken: in pieces, in
pinned memory, which are sent without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from rgpu.server.apply_path import ApplyPath, Fed


@dataclass(slots=True)
class Piece:
    """A piece of an answer. ``data`` stays valid until :meth:`FastPath.release`."""

    seq: int
    result: int
    index: int
    more: bool  #: further pieces follow
    address: int  #: of the bytes; the HEADROOM bytes before them may be written. 0: there are none
    size: int
    handle: int

    HEADROOM = 64


class Took(IntEnum):
    """The results of :meth:`FastPath.take` other than a :class:`Piece`."""

    NOTHING = 0  #: the time has run out
    PROGRESS = 2  #: a watermark is due
    WOKEN = 3  #: by :meth:`FastPath.wake`
    TIMES = 4  #: answers of timed calls are complete: :meth:`FastPath.take_times`


class FastPath(ApplyPath, Protocol):
    """See the module docstring. One thread feeds, one takes; any may read the progress."""

    def take(self, seconds: float) -> Piece | Took:
        """Take the next piece of an answer, or wait ``seconds`` for one."""

    def take_here(self, seconds: float, fd: int) -> Piece | None:
        """Wait briefly for an answer, in the feeding thread; ends when ``fd`` is readable."""

    def take_times(self) -> list[tuple[int, int, bytes]]:
        """Take (seq, CUresult, encoded reply) of complete timed calls, many at a time; they have no payload."""

    def taken_here(self) -> Piece | None:
        """Return what was taken last by :meth:`take_here`, by other code too (:meth:`functions`)."""

    def fed(self) -> Fed:
        """Return the result of the last feed, of other code's too (:meth:`functions`). Raises as :meth:`feed` does."""

    def functions(self) -> tuple[int, ...]:
        """Return the addresses by which compiled code in the applying thread feeds calls and takes answers."""

    def look(self, seconds: float, fd: int) -> None:
        """Poll ``fd`` until it is readable, for ``seconds`` at most, without sleeping."""

    def release(self, piece: Piece) -> None:
        """Give a piece's memory back once it was sent."""

    def plaintext(self, piece: Piece, head: bytes) -> memoryview:
        """``head`` and the piece's bytes in one run, without a copy of the latter."""

    def area(self) -> tuple[int, int, int] | None:
        """The memory of most pieces, for another process to map: (memfd, address in this process, bytes)."""

    def share_area(self, on: bool) -> None:
        """Note whether the other process reads answers there: copies of up to 1 MiB are then answered in one piece."""

    def pin(self, address: int, size: int) -> bool | None:
        """Pin memory of another process: feed() gives it to the device without a copy. None: the device is busy.

        Payloads fed from it are read until their call is complete, and their checksums are not verified.
        """

    def unpin(self, address: int) -> bool:
        """Undo :meth:`pin`. False: the device is busy."""

    def wake(self) -> None:
        """Wake a thread that waits in :meth:`take`."""

    def watermark(self, whole: bool, broken: int) -> bytes:
        """The body of a WATERMARK message; empty when nothing is new."""

    def room(self, size: int) -> memoryview | None:
        """A pinned buffer to decrypt a message of ``size`` bytes into; None: there is none now."""

    def give(self, buffer: memoryview) -> None:
        """Return a buffer of :meth:`room` whose message was fed."""
