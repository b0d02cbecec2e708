"""Return path to the program: answers and printed text, once each, and the watermark, which never decreases.

With an answer ring the worker's messages are opened in it and published piece
by piece; without one (an older shim) whole answers are sent over the Unix socket.
"""

from __future__ import annotations

import struct

from rgpu.client.session.delivery import AnswerAssembler, Deliveries, PassingAnswer, Verdict
from rgpu.client.shim_link import local
from rgpu.client.shim_link.answer_area import AnswerAreas
from rgpu.client.shim_link.answer_ring import AnswerRing
from rgpu.client.shim_link.printed import TextLedger
from rgpu.link.loggers import get_logger
from rgpu.link.messages.shim import (
    ANSWER,
    ANSWER_AT,
    PIECE_AT_LAYOUT,
    STREAM_MARK_LAYOUT,
    TEXT,
    WATERMARK,
    WATERMARK_HEAD_LAYOUT,
)
from rgpu.session.errors import Corrupt

log = get_logger(__name__)

UNSENT_LIMIT = 64 * 1024 * 1024  #: bytes waiting for the shim from which on the link is not read


class Returns:
    """Return path of one session. ``ring``: None for a shim that reads its socket only."""

    def __init__(self, session: str, peer: local.LocalPeer, ring: AnswerRing | None, deliveries: Deliveries,
                 area: bool = False) -> None:
        """``area``: the shim can read payloads from an area."""
        self._session, self._peer, self._ring, self._deliveries = session, peer, ring, deliveries
        self.areas = AnswerAreas(peer, ring, area)
        self._assembler = AnswerAssembler()
        self._passing: PassingAnswer | None = None
        self._assembling = False
        self._done = 0
        self._streams: dict[int, int] = {}
        self._sticky = 0
        self._reached = 0  #: positions up to this one the program was told of before this attachment
        self.text = TextLedger()

    @property
    def full(self) -> bool:
        """Whether the shim is so far behind that the link is not to be read (without a ring)."""
        return self._ring is None and self._peer.unsent > UNSENT_LIMIT

    def published_at(self, after: int, newest: int) -> int:
        """See :meth:`AnswerRing.published_at`; 0 without a ring."""
        return 0 if self._ring is None else self._ring.published_at(after, newest)

    def room(self, length: int) -> memoryview | None:
        """Return memory in which to open the next message of ``length`` bytes; None: the shim has to read first."""
        return memoryview(bytearray(length)) if self._ring is None else self._ring.room(length)

    def reattached(self) -> None:
        """Drop unfinished answers: a new connection sends them again, from their beginning."""
        self._assembler = AnswerAssembler()
        self._passing, self._assembling = None, False
        self._reached = max(self._done, *self._streams.values()) if self._streams else self._done

    # -- messages that other code puts into the ring ------------------------------------
    @property
    def plain(self) -> bool:
        """Whether the worker's next watermark and answer can go into the ring as they are.

        Not while an answer is incomplete, nor while a new worker reports less than the program was told before.
        """
        return self._ring is not None and self._passing is None and not self._assembling and not self._reached \
            and not self._sticky

    @property
    def done(self) -> int:
        """Position up to which the program was told that all calls are complete."""
        return self._done

    def was_put(self, at: int, size: int) -> memoryview:
        """Return the body of a message that other code has put into the ring."""
        assert self._ring is not None
        return self._ring.body(at, size)

    def watermark_was_put(self, body: memoryview) -> None:
        """Note a watermark that other code has put into the ring."""
        done, _, count = WATERMARK_HEAD_LAYOUT.unpack_from(body)
        values = struct.unpack_from(f"<{2 * count}Q", body, WATERMARK_HEAD_LAYOUT.size)
        self._streams.update(zip(values[::2], values[1::2], strict=True))
        self._done = done
        self._forget_idle()

    def answer_was_put(self, body: memoryview) -> None:
        """Note a piece of an answer that other code has put into the ring; further ones may come by :meth:`answer`."""
        self._piece_was_put(body[0], body[1:])

    def placed_answer_was_put(self, body: memoryview) -> None:
        """Note a whole answer in the worker's area that other code has put into the ring, before calls are shipped.

        Raises :class:`Corrupt`.
        """
        assert self._ring is not None
        _, number, offset, length = PIECE_AT_LAYOUT.unpack_from(body)
        payload = self.areas.view(number, offset, length)
        self.areas.named(length, self._ring.written)
        self._piece_was_put(0, body[PIECE_AT_LAYOUT.size:], payload)

    def _piece_was_put(self, more: int, body: memoryview, payload: memoryview | None = None) -> None:
        passing = self._passing
        if passing is None:
            passing = PassingAnswer(body, self._deliveries.compare)
            if self._deliveries.keeps_reply(passing.seq):
                passing.kept = bytearray()
        passing.add(body)
        if payload is not None:
            passing.add(payload)
        self._passing = passing if more else None
        if not more:
            self._deliveries.delivered(passing.seq, passing.digest(), passing.result, passing.reply)

    # -- answers ----------------------------------------------------------------------
    def answer(self, body: memoryview) -> None:
        """Pass on a piece of an answer, in the memory that :meth:`room` returned. Raises :class:`Corrupt`."""
        if self._ring is None or self._assembling or not self._passes(body):
            self._assemble(body)
            return
        passing, ring = self._passing, self._ring
        assert passing is not None
        first = passing.untouched
        if not body[0]:
            passing.check(len(body) - 1)
        ring.publish(ANSWER, len(body) + 1, first)
        passing.add(body[1:])  # summed while the program copies it: only this thread writes to the ring
        if not body[0]:
            self._deliveries.delivered(passing.seq, passing.digest(), passing.result, passing.reply)
            self._passing = None

    def answer_at(self, body: memoryview) -> None:
        """Pass on a piece in the worker's area (:mod:`rgpu.client.shim_link.answer_area`). Raises
        :class:`Corrupt`."""
        if len(body) < PIECE_AT_LAYOUT.size:
            raise Corrupt("an answer's piece without its place", reason="answer")
        more, number, offset, length = PIECE_AT_LAYOUT.unpack_from(body)
        payload = self.areas.view(number, offset, length)
        piece = memoryview(b"".join((body[:1], body[PIECE_AT_LAYOUT.size:])))
        if self._ring is None or self._assembling or not self._passes(piece):
            self._assemble(memoryview(b"".join((piece, payload))))
            return
        passing, ring = self._passing, self._ring
        assert passing is not None
        first = passing.untouched
        if not more:
            passing.check(len(piece) - 1 + length)
        ring.publish(ANSWER_AT, len(body) + 1, first)
        self.areas.named(length, ring.written)
        passing.add(piece[1:])
        # The worker keeps it there until it has applied `completed` of this call, which this thread ships.
        passing.add(payload)
        if not more:
            self._deliveries.delivered(passing.seq, passing.digest(), passing.result, passing.reply)
            self._passing = None

    def _passes(self, body: memoryview) -> bool:
        """Return whether this piece is passed on to the program: not that of an answer that was delivered before."""
        if len(body) < 1 or body[0] > 1:
            raise Corrupt("an answer's piece has no valid 'more' byte", reason="answer")
        if self._passing is None:
            passing = PassingAnswer(body[1:], self._deliveries.compare)
            if self._deliveries.awaits(passing.seq):
                self._passing = passing
                if self._deliveries.keeps_reply(passing.seq):
                    passing.kept = bytearray()
        return self._passing is not None

    def _assemble(self, body: memoryview) -> None:
        answer = self._assembler.feed(body if self._ring is None else memoryview(bytes(body)))
        self._assembling = answer is None
        if answer is None:
            return
        verdict = self._deliveries.judge(answer)
        if verdict is Verdict.DELIVER:
            self._peer.answer(answer.seq, answer.result, answer.flags, answer.reply, answer.payload)
        elif verdict is Verdict.DIVERGED:
            log.error("divergence", session=self._session, seq=answer.seq, what=self._deliveries.divergences[-1].what)

    # -- printed text -------------------------------------------------------------------
    def printed(self, body: memoryview) -> None:
        """Pass on a piece of printed text, in the memory that :meth:`room` returned. Raises :class:`Corrupt`.

        The shim counts bytes as this side does, and skips those that it already has.
        """
        if not self.text.take(body):
            return
        if self._ring is None:
            self._peer.send(TEXT, bytes(body))
        else:
            self._ring.publish(TEXT, len(body) + 1)

    # -- the watermark ------------------------------------------------------------------
    def watermark(self, body: memoryview) -> None:
        """Pass on new positions only: calls that the program saw complete stay complete while a replay catches up."""
        done, sticky, count = WATERMARK_HEAD_LAYOUT.unpack_from(body)
        if len(body) != WATERMARK_HEAD_LAYOUT.size + STREAM_MARK_LAYOUT.size * count:
            raise Corrupt("a watermark of impossible length", reason="watermark")
        news: list[tuple[int, int]] = []
        if count:
            values = struct.unpack_from(f"<{2 * count}Q", body, WATERMARK_HEAD_LAYOUT.size)
            news = [(stream, seq) for stream, seq in zip(values[::2], values[1::2], strict=True)
                    if seq > self._streams.get(stream, 0)]
        if done >= self._reached:
            self._reached = 0
        if done <= self._done and not news and sticky == self._sticky:
            return
        self._streams.update(news)
        self._done, self._sticky = max(done, self._done), sticky
        self._forget_idle()
        message = WATERMARK_HEAD_LAYOUT.pack(self._done, sticky, len(news))
        message += b"".join(STREAM_MARK_LAYOUT.pack(*pair) for pair in news)
        if self._ring is None:
            self._peer.send(WATERMARK, message)
        else:
            # It fits: it is no longer than the received one. An answer mostly follows, and both wake the reader once.
            self._ring.put(WATERMARK, message, wake=False)

    def wake(self) -> None:
        """Wake the program's side for watermarks that no answer followed."""
        if self._ring is not None:
            self._ring.wake()

    def _forget_idle(self) -> None:
        """Drop streams whose position ``done`` includes, once there are many: programs make many."""
        if len(self._streams) > 1024:
            self._streams = {stream: seq for stream, seq in self._streams.items() if seq > self._done}

    def close(self) -> None:
        """Close areas and ring."""
        self.areas.close()
        if self._ring is not None:
            self._ring.close()
