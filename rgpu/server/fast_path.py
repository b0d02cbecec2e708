"""What a device may offer beside the :class:`~rgpu.checkpoint.device.Device` protocol: a native hot path.

A device with an attribute ``fast_path`` takes the bytes of the record stream
itself, applies the hot calls (:mod:`rgpu.session.calls.hot`) without Python,
and gives their answers. Everything else it hands back, whole, in its place in
the order. The runtime works the same without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from rgpu.session.journal.record import Record


class Came(IntEnum):
    """Why :meth:`FastPath.feed` returned."""

    ALL = 0  #: everything given was taken
    RECORD = 1  #: a record for the caller; :meth:`FastPath.passed` when it was applied
    INTERRUPTED = 2  #: :meth:`FastPath.interrupt`: the position is at a record's boundary
    WAITING = 4  #: the next call has to wait for its turn (:meth:`FastPath.order`): the position is in front of it
    BEHIND = 5  #: more calls than usual are under way (:meth:`FastPath.usual`): the position is in front of the next


@dataclass(slots=True)
class Fed:
    came: Came
    taken: int  #: bytes of what was given
    record: Record | None
    awaiting: int  #: awaited calls without an answer, and answers not taken
    bugs: int  #: calls so far whose arguments the shim should have refused
    bug: tuple[int, int, int]  #: the last of them: (call id, seq, CUresult)
    waiting: tuple[int, int, int, int] = (0, 0, 0, 0)  #: WAITING: (seq, call id, stream, bytes of it that follow)


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


class FastPath(Protocol):
    """See the module docstring. One thread feeds, one takes; any may ask for progress."""

    @property
    def applied(self) -> int:
        """Every call ≤ it was applied."""

    def feed(self, data: Any) -> Fed:
        """Take bytes of the record stream. Raises :class:`Corrupt` as the Python reader does."""

    def keep_place(self, address: int) -> None:
        """Store each call's position in that word before it is applied. Once, before any is."""

    def passed(self, seq: int) -> None: ...
    def reset(self) -> None:
        """A new connection begins: the stream starts with a whole record."""

    def position(self, applied: int, foreign: list[int]) -> None:
        """The session was rebuilt; ``foreign``: answered calls that the program's side may still observe."""

    def interrupt(self, on: bool) -> None:
        """Make feed() return at the next boundary, until called with False as often."""

    def order(self, on: bool) -> None:
        """From now on a call is given to a stream only when what was given to others before is complete."""

    def in_order(self, stream: int, seconds: float) -> int:
        """Work for ``stream`` comes next: 1: its turn is now; 0: nothing completed for that long; -1: interrupted."""

    def pass_order(self, stream: int) -> None:
        """Its turn is now, whatever is under way."""

    def usual(self, calls: int) -> None:
        """Calls that a program usually is ahead of its work; :attr:`Came.BEHIND` at clearly more. UNBOUNDED: never."""

    def reached(self) -> int:
        """Grows whenever something completes."""

    def waited(self) -> int:
        """ns that feed() has waited so far for work of the device: not inside the driver."""

    def ahead(self) -> int:
        """Calls given to the device and not complete; UNBOUNDED: as many as are let be."""

    def broken(self, result: int) -> None:
        """A sticky CUresult that came from outside the device."""

    def attach(self) -> None:
        """Answers are taken from now on; those not yet observed come again."""

    def detach(self) -> None: ...
    def take(self, seconds: float) -> Piece | Took: ...
    def take_here(self, seconds: float, fd: int) -> Piece | None:
        """The feeding thread's own short wait for an answer; ends when ``fd`` is readable."""

    def look(self, seconds: float, fd: int) -> None:
        """Look whether ``fd`` becomes readable, for that long at most, without sleeping."""

    def release(self, piece: Piece) -> None: ...
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

    def wake(self) -> None: ...
    def watermark(self, whole: bool, broken: int) -> bytes:
        """The body of a WATERMARK message; empty when nothing is new."""

    def room(self, size: int) -> memoryview | None:
        """A pinned buffer to decrypt a message of ``size`` into; None: there is none now."""

    def give(self, buffer: memoryview) -> None:
        """The message in it was fed."""

    def retained(self) -> list[tuple[int, int, bytes, bytes]]:
        """(seq, result, reply, payload) of complete answers that the program may not have."""
