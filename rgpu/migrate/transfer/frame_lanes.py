"""The sending end of one lane of a page stream: sends frames, receives credits, compresses with lz4 where it pays.

The receiver returns a credit for each PAGES message once its pages are verified
and written. A lane has at most CREDITS messages under way, so that a receiver
which falls behind blocks the sender, with bounded memory on both sides; when
all credits are back, all pages are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lz4.block
import msgspec
import numpy as np

from rgpu.checkpoint.codec.compression import Decision, Probe, Smoothed, decide
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages.ring import HEADROOM
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.pages import CREDIT, CREDIT_LAYOUT, FAILED, LZ4, PAGES, RAW
from rgpu.migrate.transfer import frames as page_frames
from rgpu.session.errors import LinkError, TimedOut, from_dict

CREDITS = 4  #: PAGES messages of one lane that may wait for their credit
STALL = 30.0  #: seconds without a credit after which the link counts as dead
PROBE_EVERY = 64  #: frames between two samples of how pages compress
PROBE_PAGES = 2


def credit(messages: int) -> bytes:
    """Encode the body of CREDIT."""
    return CREDIT_LAYOUT.pack(messages)


class SendLane:
    """Sending end of one connection, for one thread at a time.

    :meth:`send_frame` and :meth:`send_pages` may wait for a credit, :meth:`settle` waits for all credits. They raise
    :class:`LinkError`, and the error that the destination reports.
    """

    def __init__(self, connection: SealedConnection, stall: float = STALL) -> None:
        self.connection = connection
        self.in_flight = 0
        self.decision = Decision(False, "raw: nothing was sent yet")
        self.stall = stall
        self._carried = Smoothed()
        self._frames = 0

    def send_frame(self, frame: memoryview, entries: np.ndarray) -> int:
        """Send whole pages from a frame of the ring, in the order of ``entries``; return the bytes sent."""
        self._probe(frame[HEADROOM:HEADROOM + min(PROBE_PAGES, len(entries)) * PAGE])
        if self.decision.compress:
            return self.send_pages(entries, [_packed(frame[HEADROOM + i * PAGE:HEADROOM + (i + 1) * PAGE])
                                             for i in range(len(entries))])
        head = page_frames.head(entries)
        start = HEADROOM - len(head) - 1
        frame[start] = PAGES
        frame[start + 1:HEADROOM] = head
        message = frame[start:HEADROOM + len(entries) * PAGE]
        self._timed(len(message), lambda: self.connection.send_whole(message))
        return len(message)

    def send_pages(self, entries: np.ndarray, stored: list[Any]) -> int:
        """Send pages, each in ``stored`` raw or, where that is shorter, as an lz4 block; empty for zeros.

        Return the bytes sent.
        """
        for index, data in enumerate(stored):
            entries["stored"][index] = len(data)
            entries["codec"][index] = RAW if len(data) == entries["size"][index] else LZ4
        parts = [page_frames.head(entries), *stored]
        size = sum(map(len, parts))
        self._timed(size, lambda: self.connection.send(PAGES, *parts))
        return size

    def _timed(self, size: int, send: Callable[[], None]) -> None:
        began = time.monotonic()
        while self.in_flight >= CREDITS:
            self._take()
        send()
        self.in_flight += 1
        self._carried.add(size, time.monotonic() - began)

    def _probe(self, sample: memoryview) -> None:
        if self._frames % PROBE_EVERY == 1:  # not the first: the link's speed is not known before
            began = time.perf_counter()
            packed = len(lz4.block.compress(sample, store_size=False))
            probe = Probe(packed / len(sample), len(sample) / max(1e-9, time.perf_counter() - began))
            self.decision = decide(probe, self._carried.value, self.decision.compress)
        self._frames += 1

    def settle(self) -> None:
        """Wait until every page of this lane is written at the other side."""
        while self.in_flight:
            self._take()

    def _take(self) -> None:
        try:
            kind, body = self.connection.recv(self.stall)
        except TimedOut:
            raise LinkError(f"the destination took no page for {self.stall:.0f} s", reason="stalled") from None
        if kind == FAILED:
            raise from_dict(msgspec.msgpack.decode(body))
        if kind != CREDIT or len(body) != CREDIT_LAYOUT.size:
            raise LinkError(f"message type {kind} of {len(body)} bytes where a credit was due", reason="protocol")
        count = int(CREDIT_LAYOUT.unpack(body)[0])
        if not 1 <= count <= self.in_flight:
            raise LinkError(f"{count} credits for {self.in_flight} messages", reason="credits")
        self.in_flight -= count


def _packed(page: memoryview) -> Any:
    packed = lz4.block.compress(page, store_size=False)
    return packed if len(packed) < len(page) else page
