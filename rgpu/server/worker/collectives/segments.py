"""Memory of long contributions. Workers of one node share it: the contributing worker writes it once, others map it.

Each contribution has a segment (a memfd) of its own, which no other process can write to. A segment is used again when
nothing here refers to it and every borrower has released it. Where a borrower ended without releasing it, the segment
is not used again: it stays unchanged until its last mapping ends. So the contribution of a lost worker outlives it.

Messages: docs/protocols/ranks.md, "The rank memory socket".
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rgpu.link.local import shared
from rgpu.link.messages.rank_memory import DROP, GPU_MEMORY, MEMORY, PAGE, RELEASED
from rgpu.server.collectives.numbers import Array
from rgpu.server.device import host_zone
from rgpu.session.errors import Corrupt, LinkError

SMALLEST = 1 << 18  #: bytes of a contribution that has a segment
MOST_SEGMENTS = 512  #: of one worker: each is a descriptor
LARGEST = 1 << 32  #: bytes of a segment
MOST_KEPT = 1 << 30  #: bytes of segments that nothing uses: what the log drops is what the next operations need
MOST_MAPPED = 1 << 36  #: bytes of one lender's segments that a borrower maps
WASTE = 2  #: how many times as large as asked for a segment may be
ANSWER_SECONDS = 5.0  #: limit for the arrival of a segment that was named
F_SEAL_FUTURE_WRITE = 0x10  #: linux/fcntl.h; Python names it from 3.12 on


@dataclass(eq=False, slots=True)
class _Segment:
    number: int
    fd: int
    size: int
    whole: Array
    used: bool = False  #: by this worker
    lent: Counter[Any] = field(default_factory=Counter)  #: by borrower: views that it did not give back
    known: set[Any] = field(default_factory=set)  #: borrowers that received its descriptor
    retired: bool = False  #: a borrower ended without releasing it: it is not written again


class OwnSegments:
    """Segments of this worker's contributions, and their borrowers (:class:`Borrower`). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: deque[int] = deque()  #: addresses; appended to by the garbage collector, in any thread
        self._segments: dict[int, _Segment] = {}  #: by address
        self._borrowers: set[Borrower] = set()
        self._numbers = 0
        self.copied = 0  #: bytes of contributions that were named rather than sent

    def take(self, size: int) -> Array | None:
        """Return memory for a contribution of ``size`` bytes, u8, not cleared; None: it is short, or there is none.

        It is the caller's until the array, and all memory views of it, are freed.
        """
        if not SMALLEST <= size <= LARGEST:
            return None
        with self._lock:
            self._collect()
            free = [one for one in self._segments.values()
                    if not one.used and not one.lent and size <= one.size <= WASTE * size]
            segment = min(free, key=lambda one: one.size) if free else self._make(size)
            if segment is None:
                return None
            segment.used = True
            view: Array = segment.whole[:size]
            address = _address(view)
        weakref.finalize(view, self._over.append, address).atexit = False
        return view

    def lend(self, data: Any, borrower: Borrower) -> tuple[int, int] | None:
        """Name a contribution for a borrower: (segment, bytes); None: it is in no segment, or cannot be handed over."""
        if len(data) < SMALLEST or not isinstance(data, memoryview):
            return None
        with self._lock:
            segment = self._segments.get(_address(np.frombuffer(data, np.uint8)))
            if segment is None or borrower not in self._borrowers:
                return None
            if borrower not in segment.known:
                try:
                    if not borrower.channel.send(MEMORY, segment.number, segment.size, fd=segment.fd):
                        return None
                except LinkError:
                    return None
                segment.known.add(borrower)
            segment.lent[borrower] += 1
            self.copied += len(data)
            return segment.number, len(data)

    def admit(self, borrower: Borrower) -> None:
        """Lend to a borrower from now on."""
        with self._lock:
            self._borrowers.add(borrower)

    def dismiss(self, borrower: Borrower) -> None:
        """Note that a borrower's link ended: it may still read what it was lent."""
        with self._lock:
            if borrower in self._borrowers:
                self._hear(borrower)
            self._borrowers.discard(borrower)
            borrower.channel.close()
            for segment in self._segments.values():
                segment.known.discard(borrower)
                if segment.lent.pop(borrower, 0):
                    segment.retired = True
            self._collect()

    def describe(self) -> dict[str, int]:
        """Return {segments, segment_bytes, shared_bytes: of contributions that were named rather than sent}."""
        with self._lock:
            return {"segments": len(self._segments), "segment_bytes": sum(s.size for s in self._segments.values()),
                    "shared_bytes": self.copied}

    # -- with the lock ----------------------------------------------------------------
    def _make(self, size: int) -> _Segment | None:
        """Return a new segment; None where none can be made."""
        if len(self._segments) >= MOST_SEGMENTS:
            return None
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            fd = os.memfd_create("rgpu-contribution", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.posix_fallocate(fd, 0, size)
            mapped = host_zone.shared(fd, size, writable=True, huge=True)
            # From here on no process can make a writable mapping of it: ours exists already.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared.SEALS | F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(fd)
            return None
        self._numbers += 1
        whole = np.frombuffer(mapped, np.uint8)
        segment = self._segments[_address(whole)] = _Segment(self._numbers, fd, size, whole)
        return segment

    def _collect(self) -> None:
        """Note what is not referred to any more, here and by borrowers."""
        while self._over:
            if (segment := self._segments.get(self._over.popleft())) is not None:
                segment.used = False
        for borrower in self._borrowers:
            self._hear(borrower)
        self._trim(MOST_KEPT)

    def _hear(self, borrower: Borrower) -> None:
        numbers = borrower.returned()
        if not numbers:
            return
        for segment in self._segments.values():
            if count := numbers.get(segment.number, 0):
                segment.lent[borrower] -= count
                if segment.lent[borrower] <= 0:
                    del segment.lent[borrower]

    def _trim(self, most: int) -> None:
        """Drop segments that will not be used again, and free ones beyond ``most`` bytes."""
        kept = 0
        for address, segment in list(self._segments.items()):
            if segment.used or segment.lent:
                continue
            kept += segment.size
            if segment.retired or kept > most:
                kept -= segment.size
                self._drop(address, segment)

    def _drop(self, address: int, segment: _Segment) -> None:
        del self._segments[address]
        os.close(segment.fd)
        for borrower in segment.known:
            borrower.forget(segment.number)


class Borrower:
    """The lender's end of one borrower's channel."""

    def __init__(self, channel: shared.Channel) -> None:
        channel.sock.setblocking(False)
        self.channel = channel
        self._forgotten: deque[int] = deque()

    def returned(self) -> Counter[int]:
        """Return how often each segment was given back since the last call."""
        found: Counter[int] = Counter()
        try:
            while (message := self.channel.receive()) is not None:
                if message.fd >= 0:
                    os.close(message.fd)
                if message.kind == RELEASED:
                    found[message.number] += message.size
        except (LinkError, Corrupt):  # its link notices as well
            pass
        return found

    def forget(self, number: int) -> None:
        """Have the borrower unmap a segment that nothing names, now or when this is called again."""
        self._forgotten.append(number)
        try:
            while self._forgotten and self.channel.send(DROP, self._forgotten[0]):
                self._forgotten.popleft()
        except LinkError:
            pass


class PeerSegments:
    """Segments lent by another worker of this node. :meth:`view` and :meth:`settle` are for one thread only, beside
    which any may call :meth:`refresh`.
    """

    def __init__(self, number: bytes, channel: shared.Channel,
                 direct: Callable[[shared.Message], None] | None = None) -> None:
        """Map nothing yet. ``number``: of the channel, by which the lender finds it; ``direct``: takes messages about
        memory for direct collectives, with their descriptors.
        """
        self.number, self.direct = number, direct
        channel.sock.settimeout(ANSWER_SECONDS)
        self._channel = channel
        self._come = select.poll()
        self._come.register(channel.sock, select.POLLIN)
        self._wholes: dict[int, Array] = {}
        self._mapped = 0
        self._over: deque[int] = deque()  #: segments of views that were freed; appended to in any thread
        self._receiving = threading.Lock()

    def view(self, number: int, size: int) -> memoryview:
        """Return ``size`` bytes of a segment, read-only; it is given back when nothing refers to them any more.

        Raises :class:`Corrupt`, :class:`LinkError` where the segment does not arrive.
        """
        with self._receiving:
            while number not in self._wholes:
                self._receive()
            whole = self._wholes[number]
        if not 0 < size <= whole.size:
            raise Corrupt(f"{size} bytes of a segment of {whole.size}", reason="size")
        view: Array = whole[:size]
        weakref.finalize(view, self._over.append, number).atexit = False
        return view.data

    def settle(self) -> None:
        """Give back segments that nothing refers to, and read messages received. Raises as :meth:`view` does."""
        numbers: Counter[int] = Counter()
        while self._over:
            numbers[self._over.popleft()] += 1
        for number, count in numbers.items():
            try:
                if not self._channel.send(RELEASED, number, count):
                    self._over.extend([number] * count)
            except LinkError:
                return
        with self._receiving:
            while self._come.poll(0):
                self._receive()

    def refresh(self) -> None:
        """Read messages received, unless the link's thread does. Errors are left to that."""
        if self._receiving.acquire(blocking=False):
            try:
                while self._come.poll(0):
                    self._receive()
            except (LinkError, Corrupt, OSError, ValueError):
                pass
            finally:
                self._receiving.release()

    def close(self) -> None:
        """Close the channel: what was lent stays mapped while anything refers to it."""
        self._channel.close()
        self._wholes.clear()

    def _receive(self) -> None:
        message = self._channel.receive()
        assert message is not None, "a socket with a time limit"
        if message.kind in (PAGE, GPU_MEMORY) and self.direct is not None:
            self.direct(message)
            return
        try:
            if message.kind == DROP:
                dropped = self._wholes.pop(message.number, None)
                self._mapped -= dropped.size if dropped is not None else 0
                return
            if message.kind != MEMORY or message.number in self._wholes or message.fd < 0:
                raise Corrupt(f"a message of type {message.kind} on a rank memory socket", reason="message")
            shared.check_sealed(message.fd, message.size, LARGEST)
            self._mapped += message.size
            if self._mapped > MOST_MAPPED:
                raise Corrupt(f"more than {MOST_MAPPED >> 30} GiB of one worker's segments", reason="size")
            try:
                mapped = host_zone.shared(message.fd, message.size)
            except OSError as error:
                raise LinkError(f"a segment of contributions cannot be mapped: {error}") from error
            whole = self._wholes[message.number] = np.frombuffer(mapped, np.uint8)
            whole.setflags(write=False)  # the mapping is read-only: a write would be a fault
        finally:
            if message.fd >= 0:
                os.close(message.fd)


def _address(data: Array) -> int:
    return int(data.__array_interface__["data"][0])
