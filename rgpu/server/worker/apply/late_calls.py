"""Calls in which the driver may wait for the device, made while streams may wait at host functions (:mod:`.lookahead`).

Such a call is delayed for a moment, while the records sent behind it are searched for the end of those functions. Then
it is made in a thread of its own, and the search goes on. A connection may end meanwhile: the call goes on, and the
thread that applies next waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from rgpu.server.worker.apply import lookahead
from rgpu.server.worker.apply.boundary import Boundary
from rgpu.server.worker.apply.lookahead import DoneScanner, Gates, Under
from rgpu.session.calls.wire import BY_ID
from rgpu.session.journal.record import Record

log = structlog.get_logger(__name__)


class LateCalls:
    """See the module docstring."""

    def __init__(self, gates: Gates | None, boundary: Boundary, apply: Callable[[Record], None],
                 read_ahead: Callable[[float], Any], complete: Callable[[int], bool]) -> None:
        """Make it. ``gates``: the device's host functions; None: none of its streams ever waits at one.

        ``read_ahead(seconds)``: returns the next bytes of the stream of records that arrive within that time.
        ``complete``: whether an applied call is complete.
        """
        self._complete = complete
        self._gates, self._boundary, self._apply, self._read_ahead = gates, boundary, apply, read_ahead
        self._under: Under | None = None  #: a call of the driver that did not return yet

    def concern(self) -> bool:
        """Whether the driver, in a call of ``MAY_WAIT``, may now wait for a function that the program runs."""
        return self._gates is not None and self._gates.held

    def apply(self, record: Record, behind: Any) -> None:
        """Apply such a call. ``behind``: bytes of records that follow it. Raises what applying raises."""
        assert self._gates is not None
        scanner = DoneScanner(record.seq, complete=self._complete)
        self._release(scanner.feed(behind))
        until = time.monotonic() + lookahead.PATIENCE
        while self._gates.held and time.monotonic() < until:
            self._boundary.check()
            self._look_ahead(scanner, 0.02)
        if not self._gates.held:
            self._apply(record)
            return
        log.warning("a call is made while a host function runs", call=BY_ID[record.call_id].name, seq=record.seq)
        self._under = Under(lambda: self._apply(record))
        self._boundary.under_way = True
        self._await(scanner)

    def finish(self, applied: int, data: Any) -> None:
        """Wait for the call that was under way when an earlier connection ended.

        ``applied``: the position; the stream begins with that call, or behind it: ``data``.
        """
        scanner = DoneScanner(applied + 1, complete=self._complete)
        self._release(scanner.feed(data))
        self._await(scanner)
        self._boundary.leave()  # a pause may wait for that call, too

    def _await(self, scanner: DoneScanner) -> None:
        under = self._under
        assert under is not None and self._gates is not None
        while not under.returned(0.002):
            self._boundary.check()  # the call goes on: the thread that applies next waits for it
            if self._gates.held:
                self._look_ahead(scanner, 0.01)
        self._under = None
        self._boundary.under_way = False
        under.check()

    def _look_ahead(self, scanner: DoneScanner, seconds: float) -> None:
        if scanner.ended:
            time.sleep(seconds)
        else:
            self._release(scanner.feed(self._read_ahead(seconds)))

    def _release(self, calls: list[int]) -> None:
        for call in calls:
            assert self._gates is not None
            self._gates.release(call)
