"""Reader of a stored checkpoint: every chunk is checked as it is read, by several threads, in the order of the pages.

Memory is bounded: at most :data:`AHEAD` batches of :data:`BATCH` pages are read
ahead. Chunks that lie side by side are read in one piece.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from rgpu.checkpoint.blobs.base import Blobs
from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.codec.encoders import Encoders
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.packs import pack_blob
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import page_size
from rgpu.session.errors import Corrupt, StoreMissing

BATCH = 128  #: pages
THREADS = min(16, 2 * (os.cpu_count() or 1))
AHEAD = 2 * THREADS
GAP = 64 * 1024  #: two chunks at most so many bytes apart are read by one request
PIECE = 8 << 20  #: maximal bytes of one request
_STEP = 4 << 20

T = TypeVar("T")


class StoredCheckpoint:
    """A stored checkpoint, its manifest checked."""

    def __init__(self, name: str, table: manifest.Table, blobs: Blobs, prefix: str, key: bytes) -> None:
        self.name = name
        self.table = table
        self.blobs, self._prefix, self.key = blobs, prefix, key
        self.names = np.frombuffer(table.body.chunks.names, np.uint8).reshape(-1, chunk.NAME_SIZE)
        self._checked: dict[int, int] = {}  #: pack index → its version, once its length and header are checked
        self._lock = threading.Lock()
        self.processes: Encoders | None = None  #: processes that fill the frames of a restore

    @property
    def state(self) -> SessionState:
        return self.table.body.state

    @property
    def statistics(self) -> dict[str, Any]:
        return self.table.body.statistics

    # -- packs ----------------------------------------------------------------
    def pack(self, number: int) -> str:
        """Return the name of a pack's blob. Its length and header are checked once.

        Raises :class:`StoreMissing`, :class:`Corrupt`.
        """
        pack = self.table.body.packs[number]
        blob = pack_blob(self._prefix, pack.name)
        if number not in self._checked:
            size = self.blobs.size(blob)
            if size is None:
                raise StoreMissing(f"checkpoint {self.name}: pack {pack.name} is missing in the store",
                                   path=self.blobs.where(blob), reason="missing pack")
            if size != pack.size:
                raise Corrupt(f"checkpoint {self.name}: pack {pack.name} has {size} bytes, {pack.size} wanted",
                              offset=min(size, pack.size), reason="pack length", path=self.blobs.where(blob))
            version = chunk.check_pack_header(self.blobs.read_range(blob, 0, chunk.PACK_HEADER), pack.name)
            if (version >= 2) != bool(pack.hash):
                raise Corrupt(f"checkpoint {self.name}: pack {pack.name} is of another version than the manifest says",
                              offset=8, reason="pack version", path=self.blobs.where(blob))
            with self._lock:
                self._checked[number] = version
        return blob

    def pack_file(self, number: int) -> int:
        """Return a descriptor for reading the pack, which the caller closes. Only for a store whose packs are files.

        Raises as :meth:`pack` does.
        """
        found: int = self.blobs.open_file(self.pack(number))  # type: ignore[attr-defined]
        return found

    def _verify_pack(self, number: int) -> None:
        """Check the whole pack against its hash. Packs of version 1 have none."""
        blob, pack = self.pack(number), self.table.body.packs[number]
        if self._checked[number] < 2:
            return
        hasher, before = blake3(key=self.key), pack.size - chunk.PACK_END
        for at in range(0, before, _STEP):
            hasher.update(self.blobs.read_range(blob, at, min(_STEP, before - at)))
        digest = hasher.digest()
        chunk.check_pack_end(self.blobs.read_range(blob, max(0, before), chunk.PACK_END), before, digest, pack.name)
        if digest != pack.hash:
            raise Corrupt(f"checkpoint {self.name}: pack {pack.name} is not the one that was written", offset=before,
                          reason="pack hash", path=self.blobs.where(blob))

    # -- chunks ----------------------------------------------------------------
    def read_chunks(self, numbers: Any) -> dict[int, bytes]:
        """Read and check chunks; return their raw bytes by number. Raises :class:`Corrupt`, :class:`StoreError`."""
        table, found = self.table, {}
        wanted = np.unique(np.asarray(numbers, np.uint32))
        order = wanted[np.lexsort((table.offsets[wanted], table.packs[wanted]))] if len(wanted) else wanted
        run: list[int] = []
        for number in order.tolist():
            if run and not self._together(run[0], run[-1], number):
                found.update(self._read_run(run))
                run = []
            run.append(number)
        if run:
            found.update(self._read_run(run))
        return found

    def _together(self, first: int, last: int, number: int) -> bool:
        table = self.table
        if table.packs[first] != table.packs[number]:
            return False
        end = int(table.offsets[last]) + int(table.lengths[last])
        start, stop = int(table.offsets[number]), int(table.offsets[number]) + int(table.lengths[number])
        return start - end <= GAP and stop - int(table.offsets[first]) <= PIECE

    def _read_run(self, run: list[int]) -> dict[int, bytes]:
        table = self.table
        blob = self.pack(int(table.packs[run[0]]))
        start = int(table.offsets[run[0]])
        stop = max(int(table.offsets[number]) + int(table.lengths[number]) for number in run)
        data = memoryview(self.blobs.read_range(blob, start, stop - start))
        return {number: self._decode(number, data[int(table.offsets[number]) - start:], blob) for number in run}

    def _decode(self, number: int, data: memoryview, blob: str) -> bytes:
        offset = int(self.table.offsets[number])
        try:
            name, raw = chunk.decode(data[:int(self.table.lengths[number])], self.key, offset)
        except Corrupt as error:
            where = self.blobs.where(blob)
            raise Corrupt(f"checkpoint {self.name}: {where}: {error.message}", **{**error.detail,
                                                                                  "path": where}) from error
        if name != self.table.name(number):
            raise Corrupt(f"{self.blobs.where(blob)}, offset {offset}: another chunk than the manifest names",
                          offset=offset, reason="chunk name", path=self.blobs.where(blob))
        return raw

    # -- pages -------------------------------------------------------------------
    def read_page(self, region: int, index: int) -> bytes | None:
        """Read page ``index`` of the ``region``-th region; None for zeros. Raises as :meth:`read_pages` does."""
        return self.read_pages(region, index, 1)[0]

    def read_pages(self, region: int, start: int, count: int) -> list[bytes | None]:
        """Read ``count`` pages from ``start`` on, None for zeros. Raises :class:`Corrupt`, :class:`StoreError`."""
        numbers = self.table.pages[region][start:start + count]
        chunks = self.read_chunks(numbers[numbers != manifest.ZERO_PAGE])
        about, pages = self.state.regions[region].region(), []
        for index, number in enumerate(numbers.tolist(), start):
            data = chunks.get(number)
            if data is not None and len(data) != page_size(about, index):
                raise Corrupt(f"checkpoint {self.name}: page {index} of region {region} has {len(data)} bytes, "
                              f"{page_size(about, index)} wanted", offset=0, reason="page length")
            pages.append(data)
        return pages

    def _batches(self) -> Iterator[tuple[int, int, list[bytes | None]]]:
        """Yield (region number, first index, pages), read ahead by threads."""
        return self._in_threads(lambda number, start, count: (number, start, self.read_pages(number, start, count)))

    def _in_threads(self, work: Callable[[int, int, int], T]) -> Iterator[T]:
        """Call ``work`` (region number, first index, number of pages) for all pages; yield its results in order."""
        def places() -> Iterator[tuple[int, int, int]]:
            for number, region in enumerate(self.state.regions):
                pages = pagehash.page_count(region.size)
                for start in range(0, pages, BATCH):
                    yield number, start, min(BATCH, pages - start)

        if sum(len(column) for column in self.table.pages) <= BATCH:  # not worth a thread
            for place in places():
                yield work(*place)
            return
        waiting: deque[Future[T]] = deque()
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="restore")
        try:
            for place in places():
                waiting.append(threads.submit(work, *place))
                if len(waiting) >= AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def pages(self) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield (region address, index, bytes or None) of every page that a fresh device does not have already."""
        for number, start, pages in self._batches():
            region = self.state.regions[number]
            for index, data in enumerate(pages, start):
                if data is not None or region.kind == "global":
                    yield region.address, index, data

    def deliver(self, write: Callable[[list[tuple[int, int, Any]]], None]) -> int:
        """Write every page that a fresh device does not have already, by the threads that read them.

        ``write`` is called from several threads with (address, size, bytes or None for zeros) …, in batches that do not
        overlap. Returns how many pages; raises :class:`Corrupt`, :class:`StoreError`, and what ``write`` raises.
        """
        def one(number: int, start: int, count: int) -> int:
            region = self.state.regions[number]
            about = region.region()
            runs = [(region.address + index * pagehash.PAGE, page_size(about, index), data)
                    for index, data in enumerate(self.read_pages(number, start, count), start)
                    if data is not None or region.kind == "global"]
            if runs:
                write(runs)
            return len(runs)

        return sum(self._in_threads(one))

    def verify(self) -> dict[str, int]:
        """Read everything, compare every page with its recorded hash. Raises :class:`Corrupt` on the first difference.

        Returns the numbers of pages, chunks and packs.
        """
        for number in range(len(self.table.body.packs)):
            self._verify_pack(number)
        count, key = 0, self.state.hash_key
        for number, start, pages in self._batches():
            region = self.state.regions[number]
            hashes = region.page_hashes()
            for index, data in enumerate(pages, start):
                found = pagehash.zero_hash(key, page_size(region.region(), index)) if data is None \
                    else pagehash.hash_page(data, key)
                if found != (int(hashes[index][0]), int(hashes[index][1])):
                    raise Corrupt(f"checkpoint {self.name}: page {index} of {region.address:#x} does not have its hash",
                                  offset=index, reason="page hash")
                count += 1
        used = np.unique(np.concatenate([np.zeros(0, np.uint32), *self.table.pages]))
        rest = np.setdiff1d(np.arange(self.table.count, dtype=np.uint32), used)
        for at in range(0, len(rest), BATCH):
            self.read_chunks(rest[at:at + BATCH])
        return {"pages": count, "chunks": self.table.count, "packs": len(self.table.body.packs)}

    def close(self) -> None:
        """Do nothing: no file is held open between two reads."""

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
