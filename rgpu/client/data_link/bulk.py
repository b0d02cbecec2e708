"""Bulk for a worker on this host: payloads are named by their place in memory, and kept until the worker has read them.

A payload of a copy to the device is in a bulk segment of the shim's. The
worker maps that memory (:mod:`rgpu.link.local.shared`) and is sent the place instead
of the bytes. From then on two things keep the segment from being used again:
the journal, and a *hold* of this module, until the worker's watermark reports
the call complete. A device may read the memory long after the call was applied,
so that does not end the hold, nor does a broken link. Only the attachment
of another worker ends the holds of the one before: that one is fenced, so what
it reads does not count (OWNERSHIP 1).

The holds may take half of the journal's limit, counted in whole segments.
Beyond that payloads are sent: a program that fills its segments while the
device waits for one of its later calls proceeds as it would over TCP.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rgpu.client.data_link.host_link import HostLink
from rgpu.client.shim_link.segments import ExternalRun, Memory, Segment
from rgpu.link.local import shared
from rgpu.link.loggers import get_logger
from rgpu.link.messages.memory import DROP, MAPPED, MEMORY, REFUSED
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt, LinkError, TimedOut

if TYPE_CHECKING:
    from rgpu.client.data_link.connection import DataLink
    from rgpu.client.journal.contents import Content
    from rgpu.client.journal.cursor import Cursor
    from rgpu.client.journal.kept import Journal

log = get_logger(__name__)

#: Calls whose payload the device reads and the worker does not keep; others (module binaries, graphs) are copied from
#: a frame.
NAMED = frozenset(BY_NAME[name].id for name in ("memcpy_h2d", "memcpy2d_h2d"))


class SameHost:
    """Named payloads of one session; used by the shipper's loop. ``held``: bytes of segments that have a hold."""

    def __init__(self, session: str, journal: Journal, closing: Callable[[int], object] = lambda fd: None) -> None:
        """``closing``: called with the channel's descriptor before it is closed from here."""
        self._session, self._journal, self._closing = session, journal, closing
        self._limit = journal.policy.limit // 2
        self._holds: deque[tuple[int, Segment]] = deque()
        self._held: dict[int, int] = {}  #: index of a segment → holds on it
        self.held = 0
        self._worker = ""  #: the worker that the holds are for
        self._link: HostLink | None = None
        self._offered: set[int] = set()
        self._mapped: set[int] = set()
        self._waiting: deque[tuple[int, int, int, int]] = deque()  #: messages that the socket did not take yet
        self.named_bytes = 0  #: of payloads that were named and not sent
        self.refused = ""  #: why the worker could not map some memory
        self.changes = 0  #: of what :meth:`nameable` returns
        self._tight = True  #: that depends on the holds

    # -- attachments --------------------------------------------------------------------
    def attached(self, link: HostLink) -> None:
        """Note another connection; payloads under way on the one before are shipped again."""
        if link.worker != self._worker or not link.worker:
            self._drop_all()
        self._worker, self._link = link.worker, link if link.channel is not None else None
        self._offered.clear()
        self._mapped.clear()
        self.changes += 1
        self._waiting.clear()
        self._journal.walker.mappings.gone.clear()
        if self._link is not None:
            for segment in self._journal.walker.bulks.values():
                self.announce(segment)

    def detached(self) -> None:
        """Note that the connection was closed; memory that the worker may still read stays held."""
        self._link = None
        self.changes += 1

    def fileno(self) -> int:
        """File descriptor of the channel; -1: there is none."""
        return self._link.channel.fileno() if self._link is not None and self._link.channel is not None else -1

    def ready(self) -> None:
        """Read the messages on the channel. If the channel breaks, only it is closed: bulk is sent in frames."""
        try:
            while self._link is not None and self._link.channel is not None:
                message = self._link.channel.receive()
                if message is None:
                    return
                self._take(message)
        except (LinkError, TimedOut, Corrupt) as error:
            self._give_up(error.message)

    def _take(self, message: shared.Message) -> None:
        if message.fd >= 0:
            os.close(message.fd)
        if message.kind == MAPPED and message.number in self._offered:
            self._mapped.add(message.number)
            self.changes += 1
        elif message.kind == REFUSED:
            self.refused = message.data.decode("utf-8", "replace")
            log.warning("the worker cannot map a segment: its bytes go over TCP", session=self._session,
                        reason=self.refused)
        else:
            raise Corrupt(f"a message of type {message.kind} on the memory channel", reason="message")

    def _give_up(self, reason: str) -> None:
        log.info("memory is not shared any more on this connection", session=self._session, reason=reason)
        if self._link is not None:
            self._link.reason = reason
            self._closing(self.fileno())
            self._link.close()
        self._link = None
        self.changes += 1

    # -- memory ---------------------------------------------------------------------------
    def announce(self, segment: Segment) -> None:
        """Have the worker map the memory of a segment of the shim's, before it is needed."""
        memory = segment.memory
        if self._link is None or memory is None or memory.fd < 0 or memory.number in self._offered:
            return
        self._offered.add(memory.number)
        self._waiting.append((MEMORY, memory.number, memory.identity[2], memory.fd))
        self.flush()

    def flush(self) -> None:
        """Send the waiting messages, and DROP for memory that was unmapped."""
        gone = self._journal.walker.mappings.gone
        if gone and self._link is not None:
            self._waiting.extend((DROP, number, 0, -1) for number in gone if number in self._offered)
            self._waiting = deque(item for item in self._waiting if item[0] != MEMORY or item[1] not in gone)
            self._mapped.difference_update(gone)
            self.changes += 1
            self._offered.difference_update(gone)
        gone.clear()
        try:
            while self._waiting and self._link is not None and self._link.channel is not None:
                kind, number, size, fd = self._waiting[0]
                if not self._link.channel.send(kind, number, size, fd=fd):
                    return
                self._waiting.popleft()
        except LinkError as error:
            self._give_up(error.message)

    # -- shipping ----------------------------------------------------------------------------
    def ship(self, link: DataLink, cursor: Cursor, limit: int, content: Content | None) -> int:
        """Name the next payload, if one begins within ``limit`` bytes; return how many bytes of the stream were sent.

        0: there is none that may be named. ``content``: the next module binary, which is shipped separately.
        """
        if self._link is None:
            return 0
        found = self._journal.bulk_ahead(cursor, limit)
        if found is None:
            return 0
        number, run = found
        memory = run.bulk.memory
        if memory is None or not self._may_name(run, memory) or content is not None and content.place < (number, 0):
            return 0
        before = self._journal.take(cursor, limit + run.payload_at, (number, run.payload_at))
        offset, length = run.payload
        self._hold(run.last, run.bulk)
        cursor.number, cursor.offset = number, run.payload_at + length
        self.named_bytes += length
        link.send_calls_at(before, memory.number, offset, length)
        return sum(len(buffer) for buffer in before) + length

    def nameable(self) -> list[Segment]:
        """Return the segments in which other code may name payloads of ``memcpy_h2d``, and report it to
        :meth:`named`."""
        bulks = self._journal.walker.bulks.values() if self._link is not None else ()
        found = [one for one in bulks if one.memory is not None and one.memory.number in self._mapped]
        others = [one for one in found if one.index not in self._held]
        room = self._limit - self.held
        self._tight = sum(one.size for one in others) > room
        if not self._tight:
            return found
        allowed = [one for one in found if one.index in self._held]
        for one in others:
            if one.size <= room:
                allowed.append(one)
                room -= one.size
        return allowed

    def named(self, seq: int, index: int, length: int) -> None:
        """Note that other code has named a payload of call ``seq`` in a segment that :meth:`nameable` returned."""
        self._hold(seq, self._journal.walker.bulks[index])
        self.named_bytes += length

    def _may_name(self, run: ExternalRun, memory: Memory) -> bool:
        if run.call not in NAMED or run.payload[1] < shared.SMALLEST:
            return False
        if memory.number not in self._mapped:
            self.announce(run.bulk)
            return False
        return run.bulk.index in self._held or self.held + run.bulk.size <= self._limit

    # -- holds ---------------------------------------------------------------------------------
    def _hold(self, seq: int, segment: Segment) -> None:
        self._holds.append((seq, segment))
        segment.uses += 1
        count = self._held.get(segment.index, 0)
        self._held[segment.index] = count + 1
        if not count:
            self.held += segment.size
            self.changes += self._tight

    def _drop(self, segment: Segment) -> None:
        segment.uses -= 1
        self._held[segment.index] -= 1
        if not self._held[segment.index]:
            del self._held[segment.index]
            self.held -= segment.size
            self.changes += self._tight

    def complete(self, position: int) -> bool:
        """End the holds of calls ≤ ``position``, which the attached worker reports complete; return True if any ended.

        Holds are in the order of the calls, but for payloads named anew after the stream
        went back: their holds wait for those before, so none ends too early.
        """
        ended = False
        while self._holds and self._holds[0][0] <= position:
            self._drop(self._holds.popleft()[1])
            ended = True
        return ended

    def _drop_all(self) -> None:
        while self._holds:
            self._drop(self._holds.popleft()[1])
