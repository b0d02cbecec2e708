"""The interface that gives a device the record stream: :class:`ApplyPath`, with a native and a Python implementation.

The worker's one apply loop (:mod:`rgpu.server.worker.apply.apply_loop`) feeds bytes of the stream to a path, and acts
on its result. A device with an attribute ``fast_path`` provides a native one (:mod:`rgpu.server.fast_path`), which
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
    RECORD = 1  #: a record that the caller applies; it then calls :meth:`ApplyPath.passed`
    INTERRUPTED = 2  #: :meth:`ApplyPath.interrupt`: the position is at a record's boundary
    WAITING = 4  #: the next call has to wait for its turn (:meth:`ApplyPath.order`): the position is in front of it
    BEHIND = 5  #: more calls than usual are under way (:meth:`ApplyPath.usual`): the position is in front of the next
    AHEAD = 6  #: as many calls as allowed are under way: feed again when :meth:`ApplyPath.may_go_on` returns True


@dataclass(slots=True)
class Fed:
    """The result of :meth:`ApplyPath.feed`; valid until the next call of it."""

    came: Came
    taken: int  #: bytes of the input that were taken
    record: Record | None = None
    awaiting: int = 0  #: awaited calls without an answer, and answers that were not taken yet
    bugs: int = 0  #: calls so far whose arguments the shim should have refused
    bug: tuple[int, int, int] = (0, 0, 0)  #: the last of these calls: (call id, seq, CUresult)
    waiting: tuple[int, int, int, int] = (0, 0, 0, 0)  #: for WAITING, AHEAD: (seq, call id, stream, bytes that follow)
    applied: int = 0  #: every call ≤ it was applied


class ApplyPath(Protocol):
    """See the module docstring. One thread feeds; any thread may interrupt, or read the progress."""

    #: Every record is handed back, whole. Otherwise most are applied in the path, and the caller sees only bytes.
    every_record: bool

    @property
    def applied(self) -> int:
        """Every call ≤ it was applied."""

    # -- the stream of records --------------------------------------------------
    def reset(self) -> None:
        """A new connection begins: the stream starts with a whole record."""

    def feed(self, data: Any) -> Fed:
        """Take bytes of the record stream, cut anywhere. Bytes that were not taken are given again, with what follows.

        Raises :class:`Corrupt` for bytes that are no record, or not the next one.
        """

    def given(self, records: Iterable[Record]) -> Iterable[bytes]:
        """Return the pieces to feed for records that were not cut from a stream."""

    def passed(self, seq: int) -> None:
        """Note that the record that was handed back was applied."""

    def position(self, applied: int, foreign: list[int]) -> None:
        """Continue behind ``applied`` after a rebuild. ``foreign``: answered calls that may still be observed."""

    def keep_place(self, address: int) -> None:
        """Store the position of each call that is not handed back in that word, before it is applied.

        Called once, before any call is applied.
        """

    def interrupt(self, on: bool) -> None:
        """Make :meth:`feed` return at the next boundary, until called with False as often; from any thread."""

    def broken(self, result: int) -> None:
        """Report a sticky CUresult that did not come from the device."""

    # -- the lead over the device ------------------------------------------------
    def may_go_on(self) -> bool:
        """Whether more may be given to the device after :attr:`Came.AHEAD`; waits for a moment."""

    def bound(self, tries: int) -> None:
        """Limit the calls under way: fewer with each failed attempt to have all complete; 0: the usual number."""

    def usual(self, calls: int) -> None:
        """Set the usual lead of the program, in calls; :attr:`Came.BEHIND` at clearly more. UNBOUNDED: never."""

    def ahead(self) -> int:
        """Calls given to the device and not complete; UNBOUNDED: as many as are allowed."""

    def reached(self) -> Any:
        """A value that changes whenever work completes."""

    def waited(self) -> int:
        """Time in ns that :meth:`feed` has waited so far for work of the device, without waits inside the driver."""

    # -- the order of issue ---------------------------------------------------------
    def order(self, on: bool) -> None:
        """Order the work: from now on a call is given to a stream only when what was given to others before is
        complete.
        """

    def in_order(self, stream: int, seconds: float) -> int:
        """Wait for the turn of ``stream``: 1: it is now; 0: nothing completed for ``seconds``; -1: interrupted."""

    def pass_order(self, stream: int) -> None:
        """Let the next call be given to ``stream`` now, whatever is under way."""

    def beside(self, stream: int) -> bool:
        """Whether only host functions that have not returned, and work behind them, keep the stream from its turn."""

    def covers(self) -> bool:
        """Whether all work under way follows what was issued before it: an observation then changes nothing there."""

    def put_off(self, seq: int) -> bool:
        """Whether the wait for observed call ``seq`` is put off until :meth:`settle`; else it is due now."""

    def settle(self, seconds: float) -> bool:
        """Whether all calls that were put off are complete; waits for ``seconds`` at most."""

    # -- answers of the path's own --------------------------------------------------
    def attach(self) -> None:
        """Start handing out answers; those that the program has not observed yet are handed out again."""

    def detach(self) -> None:
        """Stop handing out answers."""

    def retained(self) -> list[tuple[int, int, bytes, bytes]]:
        """Return (seq, result, reply, payload) of complete answers that the program might not have."""
