"""Shipping of records to the worker, with PING, which asks for its position, and ISSUED, when calls were published.

Part of the session's loop. The bytes in CALLS messages, the payloads named in shared memory and those named by their
hash form one stream (``bulk.py``, ``module_ship.py``); a cursor marks how much of it was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rgpu.client.data_link.bulk import SameHost
from rgpu.client.data_link.connection import DataLink
from rgpu.client.data_link.module_ship import ModuleShip
from rgpu.client.journal.cursor import Cursor
from rgpu.client.journal.kept import Journal
from rgpu.client.shim_link.returns import Returns
from rgpu.link.data.published import Issued, Ping
from rgpu.link.messages.data import ISSUED, PING, POSITION_LAYOUT, PRINTED
from rgpu.session.errors import LinkError

CHUNK = 1024 * 1024  #: bytes of records in one CALLS message
LANE_CHUNK = 4 * CHUNK  #: the same over lanes, where each message costs a mark and wakes several threads
PING_BYTES = 16 * 1024 * 1024
SERVED_BYTES = 4 * 1024 * 1024  #: sent in a row, before other peers are served
PING_INTERVAL = 0.25
LANES_FROM = 8 * 1024 * 1024  #: bytes in long messages, either way, from which lanes are opened for a link
ISSUED_NS = 1_000_000  #: between two ISSUED messages, at least
OLDEST_NS = 60_000_000_000  #: an older time of publication is taken for wrong
STOOD = 0.45  #: seconds between two rounds of the loop, or without progress of the link, in which calls pile up
CONFIRM_BYTES = 64 * 1024  #: of printed text, before the worker is told that the program has them


class Shipping:
    """Shipping of one session's calls, over one link after the other."""

    def __init__(self, journal: Journal, returns: Returns, bulk: SameHost, modules: ModuleShip,
                 open_lanes: Callable[[DataLink], None], down: Callable[[DataLink, LinkError], None]) -> None:
        """``open_lanes``: called to open lanes for the link. ``down``: called when the link broke."""
        self._journal, self._returns, self._bulk, self._modules = journal, returns, bulk, modules
        self._open_lanes, self._down = open_lanes, down
        self.acknowledged = 0  #: every call ≤ it was applied by the owner
        self.usual = 0  #: calls by which the program is usually ahead of its work, as its workers reported
        self.last_round = time.monotonic()
        self._rest = 0.0  #: seconds that the loop was allowed to sleep since then
        self._pinged = (0, 0.0)  #: the newest call of the last PING, and when it was sent
        self._pinged_bytes = 0  #: shipped since then
        self._blocked_since = 0.0  #: monotonic seconds since when the link accepts nothing; 0: it does
        self._since = 0  #: ns when the oldest call that no ISSUED covers was published; 0: none, or unknown
        self._told_issued = 0  #: ns when the last ISSUED was sent
        self._stood = False  #: calls have piled up here, and the worker was not told yet

    def round_begins(self, now: float) -> None:
        """Begin a round; if the last one is long ago, and the loop was not asleep, this process was suspended."""
        if now - self.last_round > STOOD + self._rest:
            self._stood = True
        self.last_round, self._rest = now, 0.0

    def rests(self, seconds: float) -> None:
        """Note that the loop may sleep for ``seconds`` before the next round.

        A suspension meanwhile is noticed by late calls, whose times of publication are the program's.
        """
        self._rest = seconds

    def published(self, before: int) -> None:
        """Note that the calls after ``before`` are new in the journal."""
        if not self._since:
            self._since = self._returns.published_at(before, self._journal.last_seq)

    @property
    def plain(self) -> bool:
        """Whether calls may be sent elsewhere, with nothing to be told ahead of them but ISSUED."""
        return not self._stood and not self._blocked_since

    @property
    def told_issued(self) -> int:
        """The time (ns, CLOCK_MONOTONIC) when the last ISSUED was sent."""
        return self._told_issued

    def were_shipped(self, size: int, issued: int) -> None:
        """Note that other code has sent ``size`` bytes of records, and the last ISSUED at ``issued`` (ns)."""
        self._pinged_bytes += size
        self._told_issued = issued

    @property
    def outstanding(self) -> int:
        """Bytes shipped since the worker's position was known last."""
        return self._pinged_bytes

    def were_applied(self, position: int) -> None:
        """Note that the worker has applied the calls up to ``position``: what was shipped before needs no PING."""
        self.acknowledged = position
        self._pinged_bytes = 0

    def begin(self, wanted: int) -> None:
        """Begin with a new link, whose worker expects call ``wanted`` next."""
        self._pinged, self._pinged_bytes, self.acknowledged = (0, 0.0), 0, wanted - 1

    def ship(self, link: DataLink, cursor: Cursor) -> bool:
        """Send as many calls from the cursor on as the link accepts; return whether any was sent."""
        sent = 0
        try:
            self._tell_stood(link, cursor)
            while link.ready and not self._journal.at_end(cursor):
                if not self._tell_issued(link):
                    break
                chunk = LANE_CHUNK if link.lanes.lanes else CHUNK
                size = self._bulk.ship(link, cursor, chunk, self._journal.contents.after(cursor)) or \
                    self._modules.ship(link, cursor, chunk)
                if not size:
                    break  # the worker is about to report whether its node has the next module binary
                self._pinged_bytes += size
                sent += size
                if link.long_bytes >= LANES_FROM and link.lanes.wanted:
                    self._open_lanes(link)
                if sent > SERVED_BYTES:
                    break
            if link.ready and link.lanes.fresh:
                link.use_lanes()
            self._ping(link, cursor, time.monotonic())
            text = self._returns.text
            if link.ready and text.unconfirmed >= CONFIRM_BYTES:
                link.send(PRINTED, POSITION_LAYOUT.pack(text.confirm()))
        except LinkError as error:
            self._down(link, error)
        return sent > 0

    def _tell_stood(self, link: DataLink, cursor: Cursor) -> None:
        """Send a PING ahead of calls that piled up here, which marks them: the worker applies them as a backlog."""
        if not link.ready:
            self._blocked_since = self._blocked_since or time.monotonic()
            return
        if self._blocked_since:
            self._stood = self._stood or time.monotonic() - self._blocked_since > STOOD
            self._blocked_since = 0.0
        if self._stood:
            self._stood = False
            self._send_ping(link, self._journal.shipped(cursor), stood=True)

    def _tell_issued(self, link: DataLink) -> bool:
        """Send when the calls that follow were issued: the worker sees any delay of them, here or on the way.

        Not between long frames, of which one is sealed while another is sent. Return whether calls may follow.
        """
        now, oldest, self._since = time.monotonic_ns(), self._since, 0
        if now - self._told_issued < ISSUED_NS or link.protocol < 2 or not link.idle:
            return True
        since = oldest if now - OLDEST_NS < oldest < now else now
        if self._blocked_since:
            since = min(since, int(self._blocked_since * 1e9))
        self._told_issued = now
        link.send(ISSUED, Issued(now, since, self._journal.last_seq).pack())
        return link.ready

    # -- how far the worker is ----------------------------------------------------------
    @property
    def unanswered(self) -> float:
        """Monotonic seconds when the PING was sent that the worker has not answered; 0: there is none."""
        return self._pinged[1] if self._pinged[0] > self.acknowledged else 0.0

    def ping_lost(self) -> None:
        """Forget a PING that the worker will not answer: the next one may follow at once."""
        self._pinged = (0, 0.0)

    def _send_ping(self, link: DataLink, shipped: int, stood: bool = False) -> None:
        link.send(PING, Ping(shipped, self._journal.last_seq, self.usual, time.monotonic_ns(), stood).pack())

    def _ping(self, link: DataLink, cursor: Cursor, now: float) -> None:
        """Ask for the worker's position: from time to time, never for each call."""
        shipped = self._journal.shipped(cursor)
        much = min(PING_BYTES, self._journal.policy.limit // 4)
        due = self._pinged_bytes > much or now - self._pinged[1] > PING_INTERVAL
        waiting = self._pinged[0] > self.acknowledged  # at most one that was not answered
        if link.ready and due and not waiting and shipped > self.acknowledged:
            self._send_ping(link, shipped)
            self._pinged, self._pinged_bytes = (shipped, now), 0
