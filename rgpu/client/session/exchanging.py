"""Round trips of awaited calls without the interpreter: when they may run, and the books afterwards.

A run of the native end (:mod:`rgpu.client.exchange.library`) ships the calls that the program has published, at once if
a thread waits for the last of them, and puts the worker's watermark and answer into the answer ring. It runs only where
everything before is shipped and nothing is out of the ordinary; what it leaves, the loop does.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from rgpu.client.exchange import library
from rgpu.client.exchange.library import CALLS_LEFT, PASSED, SHIPPED, Exchange, Given
from rgpu.client.session.attachment import Attachment
from rgpu.client.session.parts import Parts
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.client.shim_link.segments import Segment
from rgpu.link.effects import EffectsLog
from rgpu.link.messages.data import ANSWER, ANSWER_AT, POSITION_LAYOUT

#: Seconds without sleeping: behind the last call or answer, and while an answer is awaited. A sleep and the wake-up
#: from it cost more than the whole of a short call.
POLL_IDLE, POLL_AWAITED = 60e-6, 200e-6
#: Whether a run goes on in a thread of its own while its books are kept: program, agent and worker poll meanwhile.
THREADS = len(os.sched_getaffinity(0)) >= 8


class Incoming(Protocol):
    """The part of the worker's messages that this module uses."""

    def pong(self, body: bytes) -> None:
        """Note the worker's position, which it has sent."""

    def marked(self, body: memoryview) -> None:
        """Note the position of a watermark."""


class Session(Parts, Protocol):
    """The part of the session's loop that this module uses."""

    effects: EffectsLog | None
    attachment: Attachment

    @property
    def incoming(self) -> Incoming:
        """The worker's messages."""

    def take_calls(self) -> bool:
        """Read the calls that were published."""

    def take_shipped(self, place: int) -> None:
        """Read the calls up to ``place`` in the journal's current segment, which were shipped."""


class Exchanging:
    """See the module docstring. Used by the loop's thread."""

    def __init__(self, shipper: Session, page: AgentPage, ring: AnswerRing | None, eventfd: int, epoll: int,
                 polls: bool) -> None:
        """``polls``: the processors suffice to wait without sleeping."""
        self._shipper, self._page, self._ring, self._eventfd, self._epoll = shipper, page, ring, eventfd, epoll
        self._spin, self._patience = (int(POLL_IDLE * 1e9), int(POLL_AWAITED * 1e9)) if polls else (0, 0)
        self._exchange: Exchange | None = None
        self._segment: Segment | None = None  #: whose address is set
        self._shown = (-1, -1)  #: changes of the bulk segments, and of which of them may be named, that it knows
        self.answered = 0  #: answers that were passed on here
        self.running = False  #: a run may be reading segments of the journal
        self._deferred = False  #: segments are to be given back behind it
        self.worked = False  #: calls or answers were passed on, or left, by the last run; else messages at most

    def attached(self) -> None:
        """Begin with the session's new link."""
        link = self._shipper.link
        if self._ring is not None and self._shipper.effects is None and link is not None and link.protocol >= 2:
            self._exchange = Exchange.open(link, self._page, self._ring, self._eventfd, self._epoll, THREADS)
            self._segment, self._shown = None, (-1, -1)

    def detached(self) -> None:
        """Forget a closed link."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not self.running:  # else the run closes it
            exchange.close()

    def possible(self) -> bool:
        """Whether :meth:`run` may be called now."""
        shipper = self._shipper
        link, cursor, journal = shipper.link, shipper.cursor, shipper.journal
        return self._exchange is not None and link is not None and cursor is not None and link.idle and link.ready \
            and not link.lanes.awaited and not link.lanes.fresh and len(link.opener.unopened()) <= library.PENDING \
            and shipper.returns.plain and not shipper.returns.areas.pending \
            and len(shipper.deliveries.awaited) <= 1 and shipper.deliveries.pending <= library.EXPECTED \
            and shipper.shipping.plain and not journal.stalled and journal.walker.current is not None \
            and journal.at_end(cursor) and shipper.attachment.accepts(link.number, link.epoch)

    def run(self, first: float, sleep: float) -> bool:
        """Run once; wait without sleeping for ``first`` seconds at most, then asleep for ``sleep`` at most.

        Return whether calls or answers were passed on, or messages were received that are left to the loop. Raises
        :class:`Corrupt` for a broken journal, :class:`LinkError`.
        """
        shipper, exchange = self._shipper, self._exchange
        link, walker = shipper.link, shipper.journal.walker
        assert exchange is not None and link is not None and walker.current is not None
        given = exchange.given
        if walker.current is not self._segment:
            self._segment = walker.current
            given.segment, given.size = library.address(self._segment.view), self._segment.size
        given.at, given.seq, deliveries = walker.place, walker.next_seq, shipper.deliveries
        given.awaited = next(iter(deliveries.awaited), 0)
        given.expected[:] = [*deliveries.unanswered, *[0] * (library.EXPECTED - deliveries.pending)]
        given.done, given.issued = shipper.returns.done, shipper.shipping.told_issued
        given.first, given.spin, given.patience = int(first * 1e9), self._spin, self._patience
        given.sleep = int(sleep * 1000)
        given.area, given.area_size = shipper.returns.areas.in_use
        if self._shown != (known := (walker.bulk_changes, shipper.bulk.changes)):
            exchange.show(walker.bulks.values(), shipper.bulk.nameable())
            self._shown = known
        done = self.worked = False
        self.running = True
        try:
            with contextlib.closing(exchange.run()) as parts:
                for part in parts:
                    self._keep_books(part)
                    done |= bool(part.why)
                    self.worked |= bool(part.why & (SHIPPED | CALLS_LEFT | PASSED))
        finally:
            self.running = False
            if self._exchange is not exchange:
                exchange.close()
        if self._deferred:
            self._deferred = False
            shipper.release()
        return done or link.opener.pending > 0

    def defers(self) -> bool:
        """Whether segments must not be given back now, since a run may read them: :meth:`run` does it then, soon."""
        if self.running and self._exchange is not None and self._shipper.journal.releasable:
            self._deferred = True
            self._exchange.stop()
        return self.running

    def _keep_books(self, part: Given) -> None:
        shipper = self._shipper
        for placed in part.placed[:part.placed_count]:
            shipper.bulk.named(placed.seq, placed.index, placed.length)
        if part.why & SHIPPED:
            self._note_shipped(part)
        if part.why & CALLS_LEFT:
            shipper.take_calls()
        self._note_put(part)
        if part.pong_size:
            shipper.incoming.pong(bytes(part.pong[:part.pong_size]))

    def _note_shipped(self, part: Given) -> None:
        shipper, cursor = self._shipper, self._shipper.cursor
        assert cursor is not None
        shipper.take_shipped(part.at)
        shipper.journal.take(cursor, part.shipped)
        shipper.shipping.were_shipped(part.shipped, part.issued)

    def _note_put(self, part: Given) -> None:
        shipper = self._shipper
        for message in part.put[:part.count]:
            body = shipper.returns.was_put(message.at, message.size)
            if message.kind == ANSWER:
                self.answered += not body[0]  # of several pieces: with the last
                shipper.returns.answer_was_put(body)
            elif message.kind == ANSWER_AT:
                self.answered += 1
                shipper.returns.placed_answer_was_put(body)
            else:
                shipper.incoming.marked(body)
                if shipper.bulk.complete(*POSITION_LAYOUT.unpack_from(body)):
                    shipper.release()
                shipper.returns.watermark_was_put(body)

