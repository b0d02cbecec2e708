"""The journal's shared memory as the agent sees it: mapped read-only, walked record by record.

The other side may be broken or hostile, and can write at any moment. So each
header is copied out before it is looked at, every length is checked against
what was committed, and positions are remembered here, never read twice. Bytes
may still change later; the worker checks the checksums of the records.

A walk yields *runs*: stretches of wire bytes that can be read again until they
are dropped (:mod:`rgpu.client.journal.kept`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from collections import OrderedDict
from typing import Any

from rgpu.client.shim_link.local import NewSegment
from rgpu.link.data.module_refs import is_content
from rgpu.link.messages.shim import (
    SEGMENT_BULK,
    SEGMENT_COMMITTED,
    SEGMENT_FIRST_SEQ,
    SEGMENT_HEADER_LAYOUT,
    SEGMENT_LOG,
    SEGMENT_MAGIC,
    SEGMENT_NEXT,
)
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import AWAITED, EXTERNAL, HEADER, HEADER_SIZE, MAGIC, MAX_ARGS, MAX_PAYLOAD

SEGMENT_HEADER = SEGMENT_HEADER_LAYOUT.size
MAX_LOG = 64 * 1024 * 1024
MAX_BULK = (1 << 34) + 64 * 1024
MAX_SEGMENTS = 1 << 20  #: mapped at one time
RUN_BYTES = 128 * 1024  #: a run of small records ends at the first record past this

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COMMITTED, _NEXT, _FIRST_SEQ = SEGMENT_COMMITTED // 8, SEGMENT_NEXT // 8, SEGMENT_FIRST_SEQ // 8
_CALL = _FLAGS = struct.Struct("<H")
_EXTERNAL = struct.Struct("<IIQ")
_MADV_POPULATE_READ = 22
POPULATE = 8 * 1024 * 1024  #: bytes from which on a segment's page table is filled by a thread of its own

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
#: (device, inode, size): two descriptors of one memfd agree in it, and no other file does while one is mapped
Identity = tuple[int, int, int]


class Segment:
    """One mapped segment. ``uses``: runs in memory that need it; ``used``: bytes that the shim counts as taken."""

    __slots__ = ("index", "kind", "size", "view", "words", "uses", "used", "closed", "memory")

    def __init__(self, offer: NewSegment, mappings: Mappings) -> None:
        """Check, then map the segment; take ownership of ``offer.fd``. Raises :class:`Corrupt`."""
        try:
            self.memory: Memory | None = mappings.take(_check_offer(offer), offer)
        except OSError as error:
            raise Corrupt(f"segment {offer.index} cannot be mapped: {error}", segment=offer.index) from error
        finally:
            os.close(offer.fd)
        self.index, self.kind, self.size = offer.index, offer.kind, offer.size
        self.view = memoryview(self.memory.map)
        #: 8-byte words: reading one is one load, so a value is never seen half written
        self.words = self.view.cast("Q")
        self.uses = 0
        self.used = 0
        self.closed = False
        magic, index, kind, size, *_ = SEGMENT_HEADER_LAYOUT.unpack_from(self.view)
        if (magic, index, kind, size) != (SEGMENT_MAGIC, self.index, self.kind, self.size):
            self.unmap()
            raise Corrupt(f"segment {offer.index}: the header does not say what the message said",
                          segment=offer.index, reason="header")

    def unmap(self) -> None:
        """Unmap the segment; its memory may be mapped again."""
        self.words.release()
        self.view.release()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def retire(self, mappings: Mappings) -> None:
        """Keep the mapping of a released segment: the same memory may be offered again."""
        self.words.release()
        self.view.release()
        if self.memory is not None:
            mappings.keep(self.memory)
            self.memory = None


class Memory:
    """One memfd of the shim's, mapped here. ``number``: 1, 2, …, never used again in this agent."""

    __slots__ = ("identity", "map", "number", "fd")

    def __init__(self, identity: Identity, mapping: mmap.mmap, number: int, fd: int) -> None:
        """``fd``: read-only, for a reader in another process; -1: there is none."""
        self.identity, self.map, self.number, self.fd = identity, mapping, number, fd

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        _close(self.map)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Mappings:
    """Mappings of released segments, used again when the shim offers the same memory.

    Filling 16,384 entries of a page table takes as long as reading what they
    map. The memory stays allocated while it is mapped: hence the limit.
    """

    KEPT = 16
    LARGEST = 64 * 1024 * 1024 + 4096

    def __init__(self, share: bool = False) -> None:
        """``share``: keep a descriptor of each bulk segment, to be handed to a worker on this host."""
        self._share = share
        self._numbers = 0
        self._kept: OrderedDict[Identity, Memory] = OrderedDict()
        self.gone: list[int] = []  #: numbers of unmapped memory; emptied by the code that reports them

    def take(self, identity: Identity, offer: NewSegment) -> Memory:
        """Return a mapping of this memory, a kept one if there is one. Raises :class:`OSError`."""
        found = self._kept.pop(identity, None)
        if found is None:
            mapping = mmap.mmap(offer.fd, offer.size, mmap.MAP_SHARED, mmap.PROT_READ)
            if offer.size > POPULATE and offer.size <= self.LARGEST:
                threading.Thread(target=_populate, args=(mapping,), name="populate", daemon=True).start()
            self._numbers += 1
            found = Memory(identity, mapping, self._numbers,
                           _read_only(offer.fd) if self._share and offer.kind == SEGMENT_BULK else -1)
        return found

    def keep(self, memory: Memory) -> None:
        """Keep a mapping for its next use; the oldest is closed when there are too many."""
        if memory.identity[2] > self.LARGEST:
            self._let_go(memory)
            return
        self._kept[memory.identity] = memory
        while len(self._kept) > self.KEPT:
            self._let_go(self._kept.popitem(last=False)[1])

    def _let_go(self, memory: Memory) -> None:
        self.gone.append(memory.number)
        memory.close()

    def close(self) -> None:
        """Close every mapping that is kept."""
        for memory in self._kept.values():
            memory.close()
        self._kept.clear()


def _read_only(fd: int) -> int:
    """Return a descriptor of that memfd that does not allow writing (OWNERSHIP 12); -1 where there is none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _close(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        pass  # a slice is still being sent; the mapping is freed with it


def _populate(mapping: mmap.mmap) -> None:
    """Fill the page table ahead of the reader, without the interpreter's lock. Old kernels may refuse: no harm."""
    import numpy as np  # imported here: it takes a tenth of the agent's start

    try:
        array = np.frombuffer(mapping, np.uint8)
    except ValueError:
        return  # closed already
    _libc.madvise(array.ctypes.data, array.nbytes, _MADV_POPULATE_READ)


def _check_offer(offer: NewSegment) -> Identity:
    """Check an offer, and return which memory it is. Raises :class:`Corrupt`."""
    limit = {SEGMENT_LOG: MAX_LOG, SEGMENT_BULK: MAX_BULK}.get(offer.kind, 0)
    if not SEGMENT_HEADER < offer.size <= limit or offer.size % 8:
        raise Corrupt(f"segment {offer.index} of kind {offer.kind} has {offer.size} bytes", segment=offer.index,
                      reason="size")
    try:
        seals = fcntl.fcntl(offer.fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise Corrupt(f"segment {offer.index} is no memfd: {error}", segment=offer.index, reason="memfd") from error
    status = os.fstat(offer.fd)
    if seals & _SEALS != _SEALS or status.st_size != offer.size or status.st_blocks * 512 < offer.size:
        raise Corrupt(f"segment {offer.index} is not sealed, not of the size said, or not allocated: touching it "
                      "could kill the agent", segment=offer.index, reason="seals")
    return status.st_dev, status.st_ino, offer.size


class InlineRun:
    """Records that are wholly in a log segment. The newest run grows."""

    __slots__ = ("first", "last", "segment", "start", "end")

    def __init__(self, seq: int, segment: Segment, start: int, end: int) -> None:
        self.first = self.last = seq
        self.segment = segment
        self.start, self.end = start, end

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self.segment,)

    def read(self, offset: int, limit: int) -> list[Any]:
        """Return the bytes from ``offset`` on, ``limit`` at most, as one piece."""
        return [self.segment.view[self.start + offset:min(self.end, self.start + offset + limit)]]


class ExternalRun:
    """One record whose payload is in a bulk segment."""

    __slots__ = ("first", "last", "segment", "bulk", "_pieces", "size", "call", "payload", "payload_at")

    def __init__(self, seq: int, segment: Segment, bulk: Segment, head: bytes, payload: tuple[int, int]) -> None:
        """``head``: header (EXTERNAL cleared) and padded arguments, copied; payload: offset and length in ``bulk``."""
        self.first = self.last = seq
        self.segment, self.bulk = segment, bulk
        offset, length = self.payload = payload
        self.call: int = _CALL.unpack_from(head, 4)[0]
        self.payload_at = len(head)  #: offset of the payload in the run
        pad = bytes(-length % 8)
        self._pieces: tuple[Any, ...] = (head, (offset, length), pad)
        self.size = len(head) + length + len(pad)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (self.segment, self.bulk)

    def read(self, offset: int, limit: int) -> list[Any]:
        """Return the bytes from ``offset`` on, ``limit`` at most, in pieces: head, payload, padding."""
        head, (start, length), pad = self._pieces
        found: list[Any] = []
        end = offset + limit
        at = 0
        for piece in (head, self.bulk.view[start:start + length], pad):
            low, high = max(0, offset - at), min(len(piece), end - at)
            if low < high:
                found.append(piece[low:high])
            at += len(piece)
        return found


Run = InlineRun | ExternalRun


class Walker:
    """Follows the chain of log segments from record 1 on."""

    def __init__(self, share: bool = False) -> None:
        """``share``: as for :class:`Mappings`."""
        self.mappings = Mappings(share)
        self.logs: dict[int, Segment] = {}
        self.bulks: dict[int, Segment] = {}
        self.next_seq = 1
        self.entered = 0  #: log segments begun
        self.bulk_changes = 0  #: bulk segments offered and forgotten
        self._current: Segment | None = None
        self._at = SEGMENT_HEADER
        self._run: InlineRun | None = None

    def offer(self, offer: NewSegment) -> Segment:
        """Map a segment that the shim announced. Raises :class:`Corrupt`."""
        if offer.index in self.logs or offer.index in self.bulks or len(self.logs) + len(self.bulks) >= MAX_SEGMENTS:
            os.close(offer.fd)
            raise Corrupt(f"segment {offer.index} was announced twice, or there are too many", segment=offer.index,
                          reason="index")
        segment = Segment(offer, self.mappings)
        (self.logs if segment.kind == SEGMENT_LOG else self.bulks)[segment.index] = segment
        self.bulk_changes += segment.kind == SEGMENT_BULK
        if self._current is None and segment.kind == SEGMENT_LOG:
            self._enter(segment)
        return segment

    @property
    def current(self) -> Segment | None:
        """The segment that is being walked."""
        return self._current

    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes used (in closed segments, in open ones) of those that were not given back."""
        closed = still = 0
        for segment in (*self.logs.values(), *self.bulks.values()):
            if segment.closed:
                closed += segment.used
            else:
                still += segment.used
        return closed, still

    @property
    def place(self) -> int:
        """Offset in the current segment behind the records that were walked."""
        return self._at

    @property
    def readable(self) -> tuple[int, int] | None:
        """The segment that is being walked, and the place up to which it can be; None where another follows it."""
        segment = self._current
        if segment is None:
            return None
        committed = segment.words[_COMMITTED]
        return None if segment.words[_NEXT] else (segment.index, committed)

    def has_read(self, index: int, place: int) -> bool:
        """Whether the records up to ``place`` of segment ``index``, which was :attr:`readable`, were walked."""
        return self._current is None or self._current.index != index or self._at >= place

    def has_more(self) -> bool:
        """Return whether there are committed records that were not walked. Cheap: called before each sleep."""
        segment = self._current
        return segment is not None and (segment.words[_COMMITTED] != self._at or
                                        bool(segment.words[_NEXT]) and segment.words[_NEXT] - 1 in self.logs)

    def walk(self) -> tuple[list[Run], list[tuple[int, int, int]], bool]:
        """Read everything committed by now: (new runs, [(seq, call id, flags)], whether the end was reached).

        An inline run that was returned before may have grown instead. The
        end is not reached while a segment has not been announced yet. Raises
        :class:`Corrupt` with segment and offset.
        """
        runs: list[Run] = []
        calls: list[tuple[int, int, int]] = []
        while (segment := self._current) is not None:
            following = segment.words[_NEXT]  # read before `committed`: a closed segment gets no more records
            committed = segment.words[_COMMITTED]
            if not self._at <= committed <= segment.size or committed % 8:
                raise self._corrupt("commits an impossible position", committed=committed)
            if self._at < committed and not self._walk_segment(segment, committed, runs, calls):
                return runs, calls, False
            if not following:
                return runs, calls, True
            if segment.words[_COMMITTED] != committed or following - 1 <= segment.index:
                raise self._corrupt("went on after it was closed, or is followed by an older one")
            segment.closed = True
            if following - 1 not in self.logs:
                return runs, calls, False
            self._enter(self.logs[following - 1])
        return runs, calls, True

    def walk_to(self, place: int) -> tuple[list[Run], list[tuple[int, int, int]]]:
        """Read the records of the current segment up to offset ``place``, as :meth:`walk` does. Raises
        :class:`Corrupt`."""
        runs: list[Run] = []
        calls: list[tuple[int, int, int]] = []
        segment = self._current
        if segment is None or not self._at <= place <= segment.words[_COMMITTED]:
            raise self._corrupt("commits less than before", committed=place)
        if not self._walk_segment(segment, place, runs, calls):
            raise self._corrupt("refers to a bulk segment that was shipped, and is not there")
        return runs, calls

    def _enter(self, segment: Segment) -> None:
        if segment.words[_FIRST_SEQ] != self.next_seq:
            raise Corrupt(f"segment {segment.index} starts with call {segment.words[_FIRST_SEQ]}, not {self.next_seq}",
                          segment=segment.index, reason="sequence")
        self._current, self._at, self._run = segment, SEGMENT_HEADER, None
        self.entered += 1

    def _walk_segment(self, segment: Segment, committed: int, runs: list[Run],
                      calls: list[tuple[int, int, int]]) -> bool:
        """Read the records of one segment up to ``committed``; return False when a bulk segment is missing."""
        view, at, seq, run = segment.view, self._at, self.next_seq, self._run
        unpack = HEADER.unpack_from
        try:
            while at < committed:
                if committed - at < HEADER_SIZE:
                    raise self._corrupt("holds half a header", at)
                magic, call, flags, number, _, args, payload, _, _ = unpack(view, at)
                if magic != MAGIC or number != seq or flags & ~(EXTERNAL | AWAITED) or args > MAX_ARGS \
                        or payload > MAX_PAYLOAD:
                    raise self._corrupt(f"holds no valid header for call {seq}", at)
                end = at + HEADER_SIZE + (args + 7 & ~7) + (_EXTERNAL.size if flags & EXTERNAL else payload + 7 & ~7)
                if end > committed:
                    raise self._corrupt(f"holds call {seq} only in part", at)
                if flags & EXTERNAL:
                    external = self._external(segment, at, end, seq, flags, payload)
                    if external is None:
                        return False
                    runs.append(external)
                    run = None
                elif is_content(call, payload):  # alone in its run, where it is found again
                    runs.append(InlineRun(seq, segment, at, end))
                    run = None
                elif run is not None and run.end - run.start < RUN_BYTES:
                    run.end, run.last = end, seq
                else:
                    run = InlineRun(seq, segment, at, end)
                    runs.append(run)
                calls.append((seq, call, flags))
                at, seq = end, seq + 1
        finally:
            self._at, self.next_seq, self._run = at, seq, run
            segment.used = at - SEGMENT_HEADER
        return True

    def _external(self, segment: Segment, at: int, end: int, seq: int, flags: int, payload: int) -> ExternalRun | None:
        index, zero, offset = _EXTERNAL.unpack_from(segment.view, end - _EXTERNAL.size)
        bulk = self.bulks.get(index)
        if bulk is None:
            return None
        if zero or not SEGMENT_HEADER <= offset <= bulk.size or payload > bulk.size - offset:
            raise self._corrupt(f"call {seq} points outside of bulk segment {index}", at)
        bulk.used = max(bulk.used, offset + payload - SEGMENT_HEADER)
        head = bytearray(segment.view[at:end - _EXTERNAL.size])
        _FLAGS.pack_into(head, 6, flags & ~EXTERNAL)
        return ExternalRun(seq, segment, bulk, bytes(head), (offset, payload))

    def forget(self, segment: Segment) -> None:
        """Drop a segment that was released."""
        (self.logs if segment.kind == SEGMENT_LOG else self.bulks).pop(segment.index, None)
        self.bulk_changes += segment.kind == SEGMENT_BULK
        segment.retire(self.mappings)

    def _corrupt(self, what: str, offset: int | None = None, **detail: Any) -> Corrupt:
        index = self._current.index if self._current else -1
        at = self._at if offset is None else offset
        return Corrupt(f"log segment {index} {what} (offset {at})", segment=index, offset=at, reason="log segment",
                       **detail)

    def close(self) -> None:
        """Unmap all segments."""
        for segment in [*self.logs.values(), *self.bulks.values()]:
            segment.unmap()
        self.mappings.close()
        self.logs.clear()
        self.bulks.clear()
        self._current = self._run = None
