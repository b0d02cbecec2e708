"""A user's derived file on a node: machine code compiled from PTX, descriptions of modules, each made once.

The daemon opens it and hands each worker a descriptor of its own (a worker's box lets it open nothing else), one file
for each user: an attacker that controls a worker can put wrong machine code there, but into no other user's sessions.
Format and checks: :mod:`.derived_format`. Nothing depends on it: an absent, damaged or unfit entry is made anew.

Reading takes no lock: an entry is used only if it verifies, and offsets read under another generation are discarded.
Writing, by a thread of its own, happens under flock(2). The next writer cuts off what a crash left at the end. A
full file is written anew with the newest half of its entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from rgpu.server.derived_format import (
    DIGEST,
    ENTRY,
    HEADER,
    Entry,
    pack_entry,
    pack_header,
    read_entry,
    read_generation,
)
from rgpu.session.errors import Corrupt

log = structlog.get_logger(__name__)

DEFAULT_SIZE = 512 << 20  #: bytes of one user's file
PENDING = 64 << 20  #: bytes that may wait to be written; entries beyond that are not kept
_OTHERS = 4  #: tries of a look-up while the file is written anew


@dataclass
class Counters:
    """Counters of this process. ``damaged``: entries that did not verify; ``begun_anew``: files with a bad header."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    damaged: int = 0
    begun_anew: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    at: int
    length: int


class Derived:
    """See the module docstring. Thread-safe."""

    def __init__(self, descriptor: int = -1, limit: int = DEFAULT_SIZE) -> None:
        """``descriptor``: of the file, open for reading and writing, owned from now on; -1: nothing is kept."""
        self._fd, self._limit = descriptor, limit
        self.counters = Counters()
        self._lock = threading.Lock()
        self._generation = -1
        self._scanned = 0  #: everything before this offset was read
        self._places: dict[tuple[int, bytes], _Place] = {}
        self._queue: queue.SimpleQueue[tuple[int, bytes, bytes]] = queue.SimpleQueue()
        self._pending = 0
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def adopt(self, descriptor: int) -> None:
        """Use this file from now on; a file that is already in use stays. The descriptor is owned from now on."""
        with self._lock:
            if self._fd < 0:
                self._fd, descriptor = descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def keeps(self) -> bool:
        """Whether there is a file."""
        return self._fd >= 0

    # -- reading ------------------------------------------------------------------------
    def get(self, kind: int, key: bytes) -> bytes | None:
        """The verified payload kept under ``key``; None where there is none."""
        if not self.keeps:
            return None
        with self._lock:
            try:
                found = self._get(kind, key)
            except OSError as error:
                log.warning("the derived file cannot be read", reason=str(error))
                found = None
        if found is None:
            self.counters.misses += 1
        else:
            self.counters.hits += 1
        return found

    def _get(self, kind: int, key: bytes) -> bytes | None:
        for _ in range(_OTHERS):
            generation = self._look()
            place = self._places.get((kind, key))
            if place is None:
                return None
            data = os.pread(self._fd, ENTRY + place.length, place.at)
            with contextlib.suppress(Corrupt):
                entry, payload = read_entry(data, place.at), data[ENTRY:]
                if (entry.kind, entry.key) == (kind, key) and entry.holds(payload):
                    return payload
            if self._read_generation() == generation:
                self._damaged(kind, key, place)
                return None
        return None

    def _damaged(self, kind: int, key: bytes, place: _Place) -> None:
        self.counters.damaged += 1
        log.error("an entry of the derived file is damaged and is made anew", kind=kind, key=key.hex(), offset=place.at)
        self._places.pop((kind, key), None)

    def _read_generation(self) -> int:
        """The file's generation; -1: it has no header yet, or a bad one."""
        try:
            return read_generation(os.pread(self._fd, HEADER.size, 0))
        except Corrupt:
            return -1

    def _look(self) -> int:
        """Read the headers of entries written since the last look; return the file's generation."""
        generation = self._read_generation()
        if generation != self._generation:
            self._places.clear()
            self._generation, self._scanned = generation, HEADER.size
        size = os.fstat(self._fd).st_size if generation >= 0 else 0
        while self._scanned + ENTRY <= size:
            entry = self._entry(self._scanned, size)
            if entry is None:
                break
            self._places[entry.kind, entry.key] = _Place(self._scanned, entry.length)
            self._scanned += ENTRY + entry.length
        return generation

    def _entry(self, at: int, size: int) -> Entry | None:
        """The header of the entry at offset ``at``; None where the file, of ``size`` bytes, does not hold all of it."""
        try:
            entry = read_entry(os.pread(self._fd, ENTRY, at), at)
        except Corrupt:
            return None
        return entry if at + ENTRY + entry.length <= size else None

    # -- writing ------------------------------------------------------------------------
    def keep(self, kind: int, key: bytes, payload: bytes) -> None:
        """Queue an entry to be written; one that does not fit in the queue is discarded."""
        if not self.keeps or len(key) != DIGEST or ENTRY + len(payload) > self._limit // 4:
            return
        with self._changed:
            size = ENTRY + len(payload)
            if self._pending + size > PENDING:
                return
            self._pending += size
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="derived", daemon=True)
                self._writer.start()
        self._queue.put((kind, key, payload))

    def flush(self, seconds: float) -> bool:
        """Wait until everything was written; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    def _write_all(self) -> None:
        while True:
            kind, key, payload = self._queue.get()
            try:
                self._put(kind, key, payload)
            except OSError as error:
                log.warning("a result cannot be kept in the derived file; it is made again", reason=str(error))
            except Exception:
                log.exception("the derived file failed; the session goes on without")
            with self._changed:
                self._pending -= ENTRY + len(payload)
                self._changed.notify_all()

    def _put(self, kind: int, key: bytes, payload: bytes) -> None:
        entry = pack_entry(kind, key, payload)
        with self._alone(), self._lock:  # a writer that waits for the lock holds up no reader
            if self._look() < 0:
                if os.fstat(self._fd).st_size:
                    self.counters.begun_anew += 1
                    log.error("the derived file has no valid header and is begun anew")
                self._begin([])
            place = self._places.get((kind, key))
            if place is not None and os.pread(self._fd, len(entry), place.at) == entry:
                return  # another worker of this user has made the same entry
            if self._scanned + len(entry) > self._limit:
                self._begin(self._newest(self._limit // 2 - len(entry)))
            os.ftruncate(self._fd, self._scanned)  # remains of a crash, or bytes that are no entry
            _write(self._fd, entry, self._scanned)
            self._look()
        self.counters.stored += 1

    def _newest(self, room: int) -> list[bytes]:
        """The newest entries that verify and together fit into ``room`` bytes, in their order."""
        found: list[bytes] = []
        for (kind, key), place in sorted(self._places.items(), key=lambda item: item[1].at, reverse=True):
            data = os.pread(self._fd, ENTRY + place.length, place.at)
            if len(data) > room:
                break
            with contextlib.suppress(Corrupt):
                entry = read_entry(data, place.at)
                if (entry.kind, entry.key) == (kind, key) and entry.holds(data[ENTRY:]):
                    found.append(data)
                    room -= len(data)
        return found[::-1]

    def _begin(self, entries: list[bytes]) -> None:
        """Write the file anew. A reader finds another generation, or none, before it finds an entry elsewhere."""
        os.ftruncate(self._fd, 0)
        at = HEADER.size
        for entry in entries:
            _write(self._fd, entry, at)
            at += len(entry)
        _write(self._fd, pack_header(secrets.randbits(62)), 0)
        self._look()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def statistics(self) -> dict[str, int]:
        """Figures for ``rgpu ps``: what this worker found and kept."""
        return dict(vars(self.counters))


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
