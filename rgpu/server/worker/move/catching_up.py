"""The source ships the calls since the snapshot point to the destination's replay, and reads its progress.

Two kinds of question are sent between the calls: a ping (how far behind is the replay?) and a sample
of pages (does it produce the same bytes? see :mod:`.probing`). The table evaluates the
answers (:mod:`rgpu.migrate.move.source`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.pages import CALLS, FAILED, PING, PONG, PROBE, PROBED, WANT
from rgpu.migrate.move.sampling import Sampled
from rgpu.migrate.move.source import FAR, Shipped
from rgpu.migrate.transfer import replay_link as wire
from rgpu.server.worker.apply.journal_tap import JournalTap, Piece
from rgpu.session.errors import Corrupt, MoveFailed, TimedOut, from_dict

TELL_SECONDS = 0.2  #: between two reports of a replay's progress
IN_FLIGHT = 4  #: pings without an answer, at most


class CatchUp:
    """One replay, seen from the source: :meth:`ship` again and again; at last :meth:`rest` and :meth:`wanted`."""

    def __init__(self, connection: SealedConnection, tap: JournalTap, tell: Callable[..., None]) -> None:
        """Ship nothing yet. ``tell(phase, **values)``: reports progress."""
        self.call_bytes = 0
        self._connection = connection
        self._tap = tap
        self._tell = tell
        self._pings: deque[tuple[int, float]] = deque()  #: without an answer: number, when the calls were applied
        self._probes: deque[tuple[int, float]] = deque()  #: the same for samples
        self._samples: list[tuple[int, int, float]] = []  #: compared, differing, how far behind
        self._number = 0
        self._lag = FAR
        self._heard = time.monotonic()
        self._told = 0.0

    def ship(self, pages: int) -> Shipped:
        """Ship a piece of the calls, if there is one. Return the progress. ``pages``: of the session, for samples."""
        self._samples = []
        self._ask(self._tap.take(0.01) if len(self._pings) < IN_FLIGHT else None)
        while (self._pings or self._probes) and self._hear(0.0 if len(self._pings) < IN_FLIGHT else 0.05):
            pass
        return Shipped(self._lag, self._heard, self._tap.bytes, tuple(
            (Sampled(compared, differing, pages), behind) for compared, differing, behind in self._samples),
            self._tap.overflowed)

    def rest(self) -> None:
        """Ship the rest of the tap, in the last pause. All pages are compared then, so samples are left out."""
        while (piece := self._tap.take(0.0)) is not None:
            if not piece.mark:
                self._send(piece)

    def wanted(self, until: float) -> dict[int, list[int]]:
        """Wait until ``until`` (monotonic) for the pages that differ at the last pause. Raises :class:`MoveFailed`."""
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise MoveFailed("the destination did not finish the replay within the promised downtime")
            try:
                kind, body = self._connection.recv(left)
            except TimedOut:
                continue
            if kind == WANT:
                return wire.read_want(body)
            if kind not in (PONG, PROBED):  # late answers
                raise failure(kind, body, "after the replay")

    def _send(self, piece: Piece) -> None:
        if not piece.mark:
            self._connection.send(CALLS, b"\x01" if piece.fresh else b"\x00", piece.data)
            self.call_bytes += len(piece.data)
            return
        number, _, entries = wire.read_probe(piece.data)
        self._connection.send(PROBE, piece.data)
        if len(entries):
            self._probes.append((number, piece.applied_at))

    def _ask(self, piece: Piece | None) -> None:
        now = time.monotonic()
        if piece is not None:
            self._send(piece)
        if (piece is not None and not piece.mark) or not (piece or self._pings or self._tap.bytes):
            self._number += 1
            self._pings.append((self._number, piece.applied_at if piece is not None else now))
            self._connection.send(PING, wire.ping(self._number))

    def _hear(self, seconds: float) -> bool:
        """Handle a message of the destination. Return whether one arrived in time. Raises the failure that it reports.
        """
        try:
            kind, body = self._connection.recv(seconds)
        except TimedOut:
            return False
        self._heard = time.monotonic()
        if kind == PONG:
            answer = wire.read_pong(body)[0]
            while self._pings and self._pings[0][0] <= answer:
                self._lag = self._heard - self._pings.popleft()[1]
        elif kind == PROBED:
            number, compared, differing = wire.read_probed(body)
            if not self._probes or self._probes[0][0] != number:
                raise Corrupt(f"the result of sample {number}, which was not requested", reason="number")
            self._samples.append((compared, differing, self._heard - self._probes.popleft()[1]))
        else:
            raise failure(kind, body, "during the replay")
        if self._heard - self._told > TELL_SECONDS:
            self._told = self._heard
            self._tell("replaying", behind_ms=round(self._lag * 1000, 1), waiting_bytes=self._tap.bytes)
        return True


def failure(kind: int, body: Any, when: str) -> MoveFailed:
    """Return the error for a message that is no answer."""
    if kind == FAILED:
        return MoveFailed(f"the destination says: {from_dict(msgspec.msgpack.decode(body)).message}")
    return MoveFailed(f"the destination answered with message type {kind} {when}")
