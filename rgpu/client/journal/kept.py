"""The journal as the agent keeps it: in shared memory and in spilled files, until it is not needed any more.

With ``recover`` every call is kept until a durable checkpoint covers it
(:meth:`Journal.cut`); without, until the worker has applied it
(:meth:`Journal.applied`). Long before the limit the oldest calls are
written to journal files, and their memory is given back to the shim.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.client.journal.contents import Contents
from rgpu.client.journal.cursor import Cursor
from rgpu.client.journal.keeping import Rules
from rgpu.client.journal.spill import FiledRun, SpillFile, SpillJob
from rgpu.client.shim_link.local import NewSegment
from rgpu.client.shim_link.segments import ExternalRun, InlineRun, Run, Segment, Walker
from rgpu.link.messages.shim import SEGMENT_NEXT
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import HEADER, HEADER_SIZE, MAGIC

_HEADER_BLOCK = 64 * 1024
_CLOSED = SEGMENT_NEXT // 8  #: word of a bulk segment's header
SPILL_BYTES = 16 * 1024 * 1024  #: of records in one file, about
#: Share of the limit from which on calls are spilled: the shim stops publishing at the limit, so the agent must act
#: before. :mod:`rgpu.client.journal.keeping` decides what follows beyond.
SPILL_AT = 0.5


@dataclass(frozen=True, slots=True)
class Policy:
    """How much of the journal is kept, and where. ``limit``: bytes. ``on_full``: ``block`` or ``unprotected``."""

    recover: bool = False
    limit: int = 1 << 30
    directory: Path | None = None
    on_full: str = "block"
    max_age: float = 0.0  #: seconds; 0: no limit
    max_replay: float = 0.0  #: seconds; 0: no limit
    divergence: str = "warn"  #: ``warn`` or ``stop``

    @property
    def rules(self) -> Rules:
        """The rules for :func:`rgpu.client.journal.keeping.decide`."""
        return Rules(self.limit, self.recover, self.on_full, self.max_age, self.max_replay, self.directory is not None)


class Journal:
    """The journal of one session. Used by one thread; spilling runs on others, on a :class:`SpillJob`."""

    def __init__(self, policy: Policy, share: bool = False) -> None:
        """``share``: a worker on this host may be given the bulk segments."""
        self.policy = policy
        self.walker = Walker(share)
        self._runs: deque[Run | FiledRun] = deque()
        self._base = 0  #: number of self._runs[0]
        self.contents = Contents()  #: the module binaries in the runs
        self.first_seq = 1  #: oldest call kept
        self.protected = policy.recover  #: False for good after :meth:`unprotect`
        self.given_up = ""  #: why recovery was given up, if for another reason than a full journal
        self.memory_bytes = 0
        self.filed_bytes = 0
        self.total_bytes = 0  #: of all calls ever published
        self._open_size = 0  #: bytes of the newest run that were counted
        self._spilling = False
        self.spill_error = ""
        self.news_closed = False  #: a segment was closed; reset by the loop once it has released segments
        self._entered = 0
        self._closing: dict[int, tuple[int, int]] = {}  #: closed bulk segments: as :attr:`Walker.readable` was then
        self.stalled = False  #: the shim published calls in a segment that it has not announced yet

    @property
    def last_seq(self) -> int:
        """The newest call that was published."""
        return self.walker.next_seq - 1

    @property
    def kept_bytes(self) -> int:
        return self.memory_bytes + self.filed_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory that the shim cannot use again: more than the calls, as segments are given back whole.

        The shim counts these bytes against the limit, so every action before the limit is based on them. Of a segment
        that is still written only the calls count: the shim closes it when it waits for space.
        """
        closed, still = self.walker.used_bytes()
        return max(self.memory_bytes, closed + min(still, self.memory_bytes))

    # -- taking in --------------------------------------------------------------------
    def offer(self, offer: NewSegment) -> Segment:
        """Take a segment that the shim offers. Raises :class:`Corrupt`."""
        return self.walker.offer(offer)

    def advance(self) -> list[tuple[int, int, int]]:
        """Read the calls published since the last time: [(seq, call id, flags)]. Raises :class:`Corrupt`."""
        bulks = self.walker.bulks
        closing = {index for index, bulk in bulks.items() if not bulk.closed and bulk.words[_CLOSED]} if bulks else None
        runs, calls, whole = self.walker.walk()
        self.stalled = not whole
        if calls:
            self._take_in(runs)
        if whole and closing and self.walker.entered:  # without a log segment no call that refers to it was read
            for index in closing:  # closed before the walk: no call still to be read refers to it
                bulks[index].closed = True
            self.news_closed = True
        if self.walker.entered != self._entered:
            self._entered = self.walker.entered
            self.news_closed = True
        return calls

    def advance_to(self, place: int) -> list[tuple[int, int, int]]:
        """Read the calls published since the last time, up to offset ``place`` of the current segment, as
        :meth:`advance` does. Raises :class:`Corrupt`."""
        self._note_closed()
        runs, calls = self.walker.walk_to(place)
        self._take_in(runs)
        self._close_read()
        return calls

    def _note_closed(self) -> None:
        """Note which bulk segments the shim has closed, and up to where calls may refer to them."""
        walker = self.walker
        found = [index for index, bulk in walker.bulks.items() if not bulk.closed and bulk.words[_CLOSED]
                 and index not in self._closing]
        if found and (read := walker.readable) is not None:
            self._closing.update(dict.fromkeys(found, read))

    def _close_read(self) -> None:
        """Close the bulk segments of :meth:`_note_closed` to which no call still to be read refers."""
        for index, read in list(self._closing.items()):
            if self.walker.has_read(*read):
                del self._closing[index]
                if (bulk := self.walker.bulks.get(index)) is not None:
                    bulk.closed = self.news_closed = True

    def _take_in(self, runs: list[Run]) -> None:
        self._count_growth()
        for run in runs:
            for segment in run.segments:
                segment.uses += 1
            self.contents.note(self._base + len(self._runs), run)
            self._runs.append(run)
            self._add(run.size)
            self._open_size = run.size

    def _count_growth(self) -> None:
        if self._runs and isinstance(self._runs[-1], InlineRun):
            self._add(self._runs[-1].size - self._open_size)
            self._open_size = self._runs[-1].size

    def _add(self, size: int) -> None:
        self.memory_bytes += size
        self.total_bytes += size

    # -- reading ----------------------------------------------------------------------
    def cursor(self, seq: int) -> Cursor:
        """Return the place where the record ``seq`` starts; ``last_seq + 1`` is the end.

        Raises :class:`Corrupt` for a record that is not kept any more, or not published yet.
        """
        if not self.first_seq <= seq <= self.last_seq + 1:
            raise Corrupt(f"call {seq} is wanted; the journal holds {self.first_seq} to {self.last_seq}", seq=seq,
                          reason="not kept")
        low, high = 0, len(self._runs)
        while low < high:
            middle = (low + high) // 2
            if self._runs[middle].last < seq:
                low = middle + 1
            else:
                high = middle
        if low == len(self._runs):
            end = len(self._runs) - 1
            return Cursor(self._base + end, self._runs[end].size) if self._runs else Cursor(self._base, 0)
        return Cursor(self._base + low, _offset_of(self._runs[low], seq))

    @property
    def first_number(self) -> int:
        """Number of the oldest run that is kept."""
        return self._base

    def run(self, number: int) -> Run | FiledRun:
        """Return the kept run of that number."""
        return self._runs[number - self._base]

    def take(self, cursor: Cursor, limit: int, until: tuple[int, int] | None = None) -> list[Any]:
        """Return up to ``limit`` bytes of wire records from the cursor on, and move the cursor behind them.

        ``until`` (run number, offset): a place behind the cursor at which to end.
        The buffers are views of shared memory: use them before the next method
        call that drops runs.
        """
        found: list[Any] = []
        while limit > 0:
            position = cursor.number - self._base
            if position >= len(self._runs):
                break
            run = self._runs[position]
            left = run.size - cursor.offset
            if left <= 0:
                if position + 1 >= len(self._runs):
                    break
                cursor.number, cursor.offset = cursor.number + 1, 0
                continue
            count = min(left, limit)
            if until is not None and cursor.number == until[0]:
                count = min(count, until[1] - cursor.offset)
                if not count:
                    break
            found.extend(run.read(cursor.offset, count))
            cursor.offset += count
            limit -= count
        return found

    def bulk_ahead(self, cursor: Cursor, limit: int) -> tuple[int, ExternalRun] | None:
        """Return (number, run) of the next payload in a bulk segment that begins within ``limit`` bytes."""
        position, offset = cursor.number - self._base, cursor.offset
        while position < len(self._runs) and limit > 0:
            run = self._runs[position]
            if isinstance(run, ExternalRun) and offset <= run.payload_at:
                return self._base + position, run
            limit -= run.size - offset
            position, offset = position + 1, 0
        return None

    def at_end(self, cursor: Cursor) -> bool:
        """Tell whether nothing is published behind the cursor."""
        position = cursor.number - self._base
        return position >= len(self._runs) or \
            position == len(self._runs) - 1 and cursor.offset >= self._runs[position].size

    def shipped(self, cursor: Cursor) -> int:
        """Return the newest call whose record is wholly before the cursor."""
        position = cursor.number - self._base
        if position >= len(self._runs):
            return self.last_seq
        run = self._runs[position]
        return run.last if cursor.offset >= run.size else run.first - 1

    # -- dropping ---------------------------------------------------------------------
    def cut(self, position: int, shipping: Cursor | None) -> None:
        """Drop the calls up to ``position``, which a durable checkpoint covers. ``shipping``: the link's cursor."""
        self._drop(position, shipping)

    def applied(self, position: int, shipping: Cursor | None) -> None:
        """Drop the calls up to ``position``, which the worker has applied, if no recovery needs them."""
        if not self.policy.recover or not self.protected:
            self._drop(position, shipping)

    def _drop(self, position: int, shipping: Cursor | None) -> None:
        """Drop whole runs up to ``position``; never calls that are still to be shipped."""
        while self._runs and self._runs[0].last <= position:
            if shipping is not None and (shipping.number < self._base or (
                    shipping.number == self._base and shipping.offset < self._runs[0].size)):
                break
            run = self._runs[0]
            if len(self._runs) == 1 and isinstance(run, InlineRun) and not run.segment.closed:
                break  # it may still grow
            self._runs.popleft()
            self._base += 1
            self.first_seq = run.last + 1
            self._let_go(run)
        self.contents.forget(self._base)
        if shipping is not None and shipping.number < self._base:
            shipping.number, shipping.offset = self._base, 0

    def _let_go(self, run: Run | FiledRun) -> None:
        if isinstance(run, FiledRun):
            self.filed_bytes -= run.size
            run.drop()
            return
        self.memory_bytes -= run.size
        for segment in run.segments:
            segment.uses -= 1

    @property
    def releasable(self) -> bool:
        """Whether :meth:`released` would return any."""
        walker = self.walker
        return any(segment.closed and segment.uses == 0 and segment is not walker.current
                   for segments in (walker.logs, walker.bulks) for segment in segments.values())

    def released(self) -> list[int]:
        """Return the indices of segments that are not needed any more, each once, and retire these segments."""
        walker, found = self.walker, []
        for segment in [*walker.logs.values(), *walker.bulks.values()]:
            if segment.closed and segment.uses == 0 and segment is not walker.current:
                walker.forget(segment)
                found.append(segment.index)
        return found

    # -- spilling ---------------------------------------------------------------------
    def spill_job(self) -> SpillJob | None:
        """Return a job for the oldest calls, when memory nears the limit and no other job runs; else None."""
        if not (self.policy.recover and self.protected and self.policy.directory) or self.spill_error:
            return None
        if self.held_bytes <= self.policy.limit * SPILL_AT or self._spilling:
            return None
        runs: list[Run] = []
        size = 0
        for position, run in enumerate(self._runs):
            if isinstance(run, FiledRun):
                continue
            # The oldest runs are spilled first; the newest run may still grow.
            newest = position == len(self._runs) - 1
            if size >= SPILL_BYTES or newest and isinstance(run, InlineRun) and not run.segment.closed:
                break
            runs.append(run)
            size += run.size
        if not runs:
            return None
        self._spilling = True
        for run in runs:  # a run that is being written must stay mapped, even if it is cut meanwhile
            for segment in run.segments:
                segment.uses += 1
        return SpillJob(tuple(runs), self.policy.directory)

    def spilled(self, job: SpillJob, file: SpillFile | None, error: str = "") -> None:
        """Note the end of a job: its runs are read from ``file`` from now on. None: it failed with ``error``."""
        self._spilling = False
        for run in job.runs:
            for segment in run.segments:
                segment.uses -= 1
        if file is None:
            self.spill_error = error
            return
        wanted = {id(run): position for position, run in enumerate(self._runs)}
        offset = file.start
        for run in job.runs:
            position = wanted.get(id(run))
            if position is not None:  # else it was cut meanwhile
                self._let_go(run)
                filed = FiledRun(run.first, run.last, file, offset, run.size)
                self.filed_bytes += filed.size
                self._runs[position] = filed
            offset += run.size
        file.settle()

    def unprotect(self, why: str = "") -> None:
        """Give recovery up: calls are dropped once the worker has applied them. ``why``: empty for the policy
        ``unprotected``.
        """
        self.protected = False
        self.given_up = self.given_up or why

    def close(self, keep_files: bool) -> None:
        """Unmap everything, and delete the journal files unless ``keep_files``."""
        for run in self._runs:
            if isinstance(run, FiledRun) and not keep_files:
                run.drop()
        self._runs.clear()
        self.walker.close()


def _offset_of(run: Run | FiledRun, seq: int) -> int:
    """Return the offset of record ``seq`` in a run."""
    if run.first == seq:
        return 0
    data = b"".join(run.read(0, run.size)) if run.size <= 16 * _HEADER_BLOCK else None
    at = 0
    while data is not None and at + HEADER_SIZE <= len(data):
        magic, _, _, number, _, args, payload, _, _ = HEADER.unpack_from(data, at)
        if magic != MAGIC:
            break
        if number == seq:
            return at
        at += HEADER_SIZE + (args + 7 & ~7) + (payload + 7 & ~7)
    raise Corrupt(f"call {seq} cannot be found where the journal has it", seq=seq, reason="changed")


def prepare_directory(directory: Path) -> Path:
    """Make ``directory`` for journal files, private (mode 0700), and return it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(directory, 0o700)
    return directory
