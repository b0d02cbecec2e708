"""How a device is given the record stream: :class:`ApplyPath`, with a native and a Python implementation.

The worker's one apply loop (:mod:`rgpu.server.worker.apply.apply_loop`) feeds bytes of the stream to a path, and obeys
what comes back. A device with an attribute ``fast_path`` brings a native one (:mod:`rgpu.server.fast_path`), which
applies the hot calls itself and hands the others back. For any other device
:class:`rgpu.server.worker.apply.slow_path.SlowPath` hands every record back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from rgpu.session.journal.record import Record


class Came(IntEnum):
    """Why :meth:`ApplyPath.feed` returned."""

    ALL = 0  #: everything given was taken
    RECORD = 1  #: a record for the caller; :meth:`ApplyPath.passed` when it was applied
    INTERRUPTED = 2  #: :meth:`ApplyPath.interrupt`: the position is at a record's boundary
    WAITING = 4  #: the next call has to wait for its turn (:meth:`ApplyPath.order`): the position is in front of it
    BEHIND = 5  #: more calls than usual are under way (:meth:`ApplyPath.usual`): the position is in front of the next
    AHEAD = 6  #: as many calls as may be are under way: feed again when :meth:`ApplyPath.may_go_on` says so


@dataclass(slots=True)
class Fed:
    """What came of :meth:`ApplyPath.feed`; true until the next call of it."""

    came: Came
    taken: int  #: bytes of what was given
    record: Record | None = None
    awaiting: int = 0  #: awaited calls without an answer, and answers not taken
    bugs: int = 0  #: calls so far whose arguments the shim should have refused
    bug: tuple[int, int, int] = (0, 0, 0)  #: the last of them: (call id, seq, CUresult)
    waiting: tuple[int, int, int, int] = (0, 0, 0, 0)  #: of WAITING, AHEAD: (seq, call id, stream, bytes that follow)
    applied: int = 0  #: every call ≤ it was applied


class ApplyPath(Protocol):
    """See the module docstring. One thread feeds; any other may interrupt, or ask for progress."""

    #: Every record is handed back, whole. Else most are applied unseen, and the caller knows them as bytes only.
    every_record: bool

    @property
    def applied(self) -> int:
        """Every call ≤ it was applied."""

    # -- the stream of records --------------------------------------------------
    def reset(self) -> None:
        """A new connection begins: the stream starts with a whole record."""

    def feed(self, data: Any) -> Fed:
        """Take bytes of the record stream, cut anywhere. What was not taken is given again, with what follows it.

        Raises :class:`Corrupt` for what is no record, or not the next one.
        """

    def given(self, records: Iterable[Record]) -> Iterable[bytes]:
        """What to feed, piece by piece, for records that were not cut from a stream."""

    def passed(self, seq: int) -> None:
        """The record that was handed back was applied."""

    def position(self, applied: int, foreign: list[int]) -> None:
        """The session was rebuilt; ``foreign``: answered calls that the program's side may still observe."""

    def keep_place(self, address: int) -> None:
        """Store the position of each call that is not handed back in that word, before it is applied.

        Called once, before any call is applied.
        """

    def interrupt(self, on: bool) -> None:
        """Make :meth:`feed` return at the next boundary, until called with False as often; from any thread."""

    def broken(self, result: int) -> None:
        """A sticky CUresult that came from outside the device."""

    # -- how far ahead of the device ------------------------------------------------
    def may_go_on(self) -> bool:
        """After :attr:`Came.AHEAD`: whether more may be given to the device; waits for a moment."""

    def bound(self, tries: int) -> None:
        """How many calls may be under way: fewer with each attempt in vain to have all complete; 0: as usual."""

    def usual(self, calls: int) -> None:
        """Calls that a program usually is ahead of its work; :attr:`Came.BEHIND` at clearly more. UNBOUNDED: never."""

    def ahead(self) -> int:
        """Calls given to the device and not complete; UNBOUNDED: as many as are let be."""

    def reached(self) -> Any:
        """A value that changes whenever something completes."""

    def waited(self) -> int:
        """Time in ns that :meth:`feed` has waited so far for work of the device: not inside the driver."""

    # -- the order of issue ---------------------------------------------------------
    def order(self, on: bool) -> None:
        """Order the work: from now on a call is given to a stream only when what was given to others before is
        complete.
        """

    def in_order(self, stream: int, seconds: float) -> int:
        """Work for ``stream`` comes next: 1: its turn is now; 0: nothing completed for that long; -1: interrupted."""

    def pass_order(self, stream: int) -> None:
        """Its turn is now, whatever is under way."""

    # -- answers of the path's own --------------------------------------------------
    def attach(self) -> None:
        """Answers are taken from now on; those not yet observed come again."""

    def detach(self) -> None:
        """Nobody takes answers any more."""

    def retained(self) -> list[tuple[int, int, bytes, bytes]]:
        """(seq, result, reply, payload) of its complete answers that the program might not have."""
