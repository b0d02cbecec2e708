"""The source ships the calls since a cut until the destination's replay is close behind, and hears how it goes.

Two questions travel with the calls: a ping (how far behind is it?) and a sample
of pages (does it come to the same bytes? see :mod:`.probing`). Whoever runs the
move judges each sample; a replay that is not worth its end is given up here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from rgpu.link.frames import SealedConnection
from rgpu.server import replay_stream as wire
from rgpu.server.journal_tap import JournalTap, Piece
from rgpu.server.page_stream import FAILED
from rgpu.session.errors import Corrupt, MoveFailed, TimedOut, from_dict

CAUGHT_UP = 0.1  #: seconds that the replay may be behind when the last pause begins
CLOSER = 0.7  #: a lag that is not at least this much smaller is no closer
SETTLED_SECONDS = 2.0  #: without getting any closer
STALL_SECONDS = 15.0  #: without a word from a destination that has calls to replay
REPLAY_SECONDS = 600.0  #: for all of it
TELL_SECONDS = 0.2  #: between two words about how far a replay is
IN_FLIGHT = 4  #: pings without an answer
SAMPLE_SECONDS = 2.0  #: that a replay which caught up waits for the result of its first sample

#: (pages compared, of them differ, seconds that the replay was behind there): why to give it up, or nothing.
Judge = Callable[[int, int, float], str]


def replay_failed(reason: str) -> MoveFailed:
    return MoveFailed(f"the replay was given up: {reason}", replay=True)


class CatchUp:
    """One replay, watched from the source. :meth:`run` it once; then :meth:`send` what the last pause has left."""

    def __init__(self, connection: SealedConnection, tap: JournalTap, limit: float, *, judge: Judge,
                 check: Callable[[], None], tell: Callable[..., None]) -> None:
        """``limit``: of the last pause, s; ``check`` raises when the session has failed; ``tell`` spreads progress."""
        self.call_bytes = 0
        self.samples = 0  #: that were compared
        self._connection = connection
        self._tap = tap
        self._limit = limit
        self._judge, self._check, self._tell = judge, check, tell
        self._pings: deque[tuple[int, float]] = deque()  #: without an answer: number, when the calls were applied
        self._probes: deque[tuple[int, float]] = deque()  #: the same of samples
        self._number = 0
        self._lag = 1e9
        self._began = self._heard = time.monotonic()
        self._told = 0.0
        self._sample_by = 0.0

    def run(self) -> None:
        """Until the destination is behind by no more than :data:`CAUGHT_UP`, or comes no closer and may be waited for.

        Raises :class:`MoveFailed` with ``replay`` in its detail for a replay that is given up.
        """
        self._began = self._heard = time.monotonic()
        best, better_at = self._lag, self._began  # the smallest lag so far, and when it became so
        while True:
            now = time.monotonic()
            self._ask(self._tap.take(0.01) if len(self._pings) < IN_FLIGHT else None, now)
            while (self._pings or self._probes) and self._hear(0.0 if len(self._pings) < IN_FLIGHT else 0.05):
                pass
            if self._lag < best * CLOSER:
                best, better_at = self._lag, now
            # Two busy hosts may never come that close: then what is left is replayed in the pause, if that may last.
            settled = now - better_at > SETTLED_SECONDS and self._lag <= self._limit / 4
            if (self._lag <= CAUGHT_UP or settled) and self._tap.bytes < wire.PIECE and self._sampled(now):
                return
            self._check_replay()

    def send(self, piece: Piece) -> None:
        """A piece of the calls, or a sample."""
        if not piece.mark:
            self._connection.send(wire.CALLS, b"\x01" if piece.fresh else b"\x00", piece.data)
            self.call_bytes += len(piece.data)
            return
        number, _, entries = wire.read_probe(piece.data)
        self._connection.send(wire.PROBE, piece.data)
        if len(entries):
            self._probes.append((number, piece.applied_at))

    def _ask(self, piece: Piece | None, now: float) -> None:
        if piece is not None:
            self.send(piece)
        if (piece is not None and not piece.mark) or not (piece or self._pings or self._tap.bytes):
            self._number += 1
            self._pings.append((self._number, piece.applied_at if piece is not None else now))
            self._connection.send(wire.PING, wire.ping(self._number))

    def _hear(self, seconds: float) -> bool:
        """Whether the destination said something in time. Raises what it reports."""
        try:
            kind, body = self._connection.recv(seconds)
        except TimedOut:
            return False
        self._heard = time.monotonic()
        if kind == wire.PONG:
            answer = wire.read_pong(body)[0]
            while self._pings and self._pings[0][0] <= answer:
                self._lag = self._heard - self._pings.popleft()[1]
        elif kind == wire.PROBED:
            self._compared(*wire.read_probed(body))
        else:
            raise failure(kind, body, "during the replay")
        if self._heard - self._told > TELL_SECONDS:
            self._told = self._heard
            self._tell("replaying", behind_ms=round(self._lag * 1000, 1), waiting_bytes=self._tap.bytes)
        return True

    def _compared(self, number: int, compared: int, differing: int) -> None:
        if not self._probes or self._probes[0][0] != number:
            raise Corrupt(f"the result of sample {number}, for which nobody asked", reason="number")
        _, taken_at = self._probes.popleft()
        self.samples += 1
        if why := self._judge(compared, differing, self._heard - taken_at):
            raise replay_failed(why)

    def _sampled(self, now: float) -> bool:
        """A sample was compared, or none came in time: the last pause finds out what differs in any case."""
        self._sample_by = self._sample_by or now + SAMPLE_SECONDS
        return self.samples > 0 or now > self._sample_by

    def _check_replay(self) -> None:
        now = time.monotonic()
        if self._tap.overflowed:
            raise replay_failed("the calls that wait to be replayed do not fit in memory any more")
        if now - self._heard > STALL_SECONDS:
            raise replay_failed(f"the destination has applied nothing for {now - self._heard:.0f} s")
        if now - self._began > REPLAY_SECONDS:
            raise replay_failed(f"the destination has not caught up within {REPLAY_SECONDS:.0f} s")
        self._check()

    def wanted(self, until: float) -> dict[int, list[int]]:
        """The pages that differ at the last pause, told before ``until`` (monotonic). Raises as :meth:`run` does."""
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise replay_failed("the destination did not finish the replay within the promised downtime")
            try:
                kind, body = self._connection.recv(left)
            except TimedOut:
                continue
            if kind == wire.WANT:
                return wire.read_want(body)
            if kind not in (wire.PONG, wire.PROBED):  # late answers
                raise failure(kind, body, "after the replay")


def failure(kind: int, body: Any, when: str) -> MoveFailed:
    """What to raise for a message that is no answer."""
    if kind == FAILED:
        return replay_failed(f"the destination says: {from_dict(msgspec.msgpack.decode(body)).message}")
    return MoveFailed(f"the destination answered with message type {kind} {when}", replay=True)
