"""Writer of one checkpoint: takes pages, writes packs, and the manifest last.

:meth:`CheckpointWriter.add_page` hands pages to threads that name, compress and
store them. It waits while more than ``staging`` bytes are under way, so memory
is bounded whatever the session's size; a caller that pauses the session
meanwhile can end the pause once its last page is taken.
:meth:`CheckpointWriter.add_rows` does so for many pages in a frame (:mod:`rgpu.checkpoint.codec.frames`),
in place; there, the owner of the frames bounds the memory.

Until :meth:`CheckpointWriter.finish` has returned, the checkpoint does not exist; leaving
the ``with`` block by an exception removes everything that was written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np

from rgpu.checkpoint.blobs.base import Blobs
from rgpu.checkpoint.codec import chunk, encoding
from rgpu.checkpoint.codec.encoders import Encoders
from rgpu.checkpoint.codec.frames import PITCH, Shared
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.chunk_table import ChunkTable
from rgpu.checkpoint.manifest.columns import PageColumns
from rgpu.checkpoint.manifest.packs import Packs
from rgpu.checkpoint.manifest.reuse import Array, Base, Wanted
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import Page, PageList
from rgpu.checkpoint.store.intents import BEAT_SECONDS, Announced
from rgpu.checkpoint.store.pace import Pace
from rgpu.session.errors import AlreadyExists, Corrupt, LimitReached, RgpuError, StoreError, StoreUnreachable

STAGING = 256 << 20  #: bytes of pages under way between :meth:`CheckpointWriter.add_page` and the store
BATCH = 1 << 20  #: bytes that one thread takes at a time
STILL_PATIENCE = 10.0  #: seconds for which a store may take nothing while a session is paused
ROWS = 64  #: pages of a frame that one thread takes at a time
THREADS = min(16, max(2, 3 * (os.cpu_count() or 1) // 4))  #: the session's own threads run beside them
PACKS = 8  #: packs filled at a time, at most


class CheckpointWriter:
    """Writer made by :meth:`rgpu.checkpoint.store.checkpoint_store.CheckpointStore.writer`. One thread calls it.

    ``bases``: older checkpoints whose packs all exist; the first is the previous one of the session.
    ``pace``: limit of the write rate. ``encoders``: processes that encode frames instead of this process's threads.
    ``most``: bytes that it may add to the store, None: no limit; beyond, it ends with :class:`LimitReached`.
    """

    def __init__(self, blobs: Blobs, prefix: str, name: str, key: bytes, announced: Announced, bases: list[Base],
                 staging: int = STAGING, pace: Pace | None = None, encoders: Encoders | None = None,
                 most: int | None = None) -> None:
        self.name = name
        self._most, self._added = most, 0
        self._blobs, self._prefix, self._key, self._announced = blobs, prefix, key, announced
        self._manifest = manifest_name(prefix, name)
        self._started, self._clock = time.time(), time.monotonic()
        self._bases = bases
        self.staging = staging
        self.pace = pace or Pace()
        self._encoders = encoders
        self._lock = threading.Lock()  #: table and counts
        self._table = ChunkTable(bases)
        self._packs = Packs(blobs, prefix, announced.intent.id, key, min(PACKS, THREADS))
        self._columns = PageColumns()
        self._batch: list[tuple[int, Any]] = []  #: place among the columns, bytes
        self._batch_bytes = 0
        self._room = threading.BoundedSemaphore(max(1, staging // BATCH))
        self._threads = ThreadPoolExecutor(encoders.count + 1 if encoders is not None else THREADS,
                                           thread_name_prefix="image")
        self._patience: float | None = None  #: seconds that adding pages may wait for the store
        self._under_way: set[Future[None]] = set()
        self._failure: BaseException | None = None
        self.counts = dict.fromkeys(("pages", "zero_pages", "unchanged_pages", "new_chunks", "reused_chunks",
                                     "raw_bytes", "stored_bytes", "compressed_chunks"), 0)
        self._open, self._manifest_put = True, False

    # -- pages ------------------------------------------------------------------
    def prepare(self) -> None:
        """Do lengthy preparations (compile code, choose packs to avoid) before the session is paused. Optional."""
        encoding.prepare()
        if self._encoders is not None:
            self._encoders.prepare()
        if self._bases:
            self._bases[0].prepare()

    def wanted(self, hash_key: bytes, regions: list[RegionState]) -> Wanted:
        """Return at once what :meth:`inherit` will return for a state with these regions: for use in a pause."""
        if not self._bases:
            return Wanted.everything([pagehash.page_count(region.size) for region in regions])
        return self._bases[0].unchanged(hash_key, regions).wanted()

    def inherit(self, state: SessionState) -> list[Array]:
        """Take over every page that is unchanged since the previous checkpoint of the session.

        Returns, for each region of ``state``, the indices of the pages that are
        to be added. Call it once; pages that it does not take over may have been added before.
        """
        if not self._bases:
            return [np.arange(pagehash.page_count(region.size)) for region in state.regions]
        found = self._bases[0].unchanged(state.hash_key, state.regions)
        kept = np.flatnonzero(found.kept)
        with self._lock:  # pages of a long pause may be under way already
            at = self._columns.whole(state.regions)[kept]
            self._columns.numbers[at] = self._table.adopt(0, found.numbers[kept])
            self._columns.hashes[at] = _hashes_of(state)[kept]
            self.counts["reused_chunks"] = self._table.adopted
        self.counts["pages"] += len(kept)
        self.counts["unchanged_pages"] += len(kept)
        return found.changed()

    def add_page(self, page: Page) -> None:
        """Store a page. Raises :class:`StoreError`.

        Waits while too many pages are under way. The page's bytes must not change afterwards.
        """
        with self._lock:
            at = self._columns.place(page.region, page.index)
        self._columns.hashes[at] = page.hash
        self.counts["pages"] += 1
        if page.data is None:
            self.counts["zero_pages"] += 1
            return
        self._append(at, page.data)

    def add_rows(self, rows: Array, pages: PageList, hash_key: bytes, done: Callable[[], None],
                 memory: Shared | None = None) -> None:
        """Add whole pages that are not zeros, as :meth:`add_page` does, from ``rows`` of a frame. Does not wait.

        ``memory``: the frame's memory, for other processes; its first row is the first of ``rows``.

        ``done`` is called, from any thread, once nothing refers to the rows any more, also when this raises.
        A page that does not have its hash ends the checkpoint: :class:`DeviceError`.
        """
        try:
            if self._failure is not None:
                self._raise()
            with self._lock:
                at = self._columns.places(pages)
            self._columns.hashes[at] = pages.hashes
            self.counts["pages"] += len(pages)
            self._announced.beat()
        except BaseException:
            done()
            raise
        step = len(pages) if memory is not None and self._encoders is not None else ROWS
        parts = range(0, len(pages), step)
        left, lock = [len(parts)], threading.Lock()

        def over(_: Any) -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                done()

        for first in parts:
            end = min(first + step, len(pages))
            future = self._threads.submit(self._work_rows, rows[first:end], memory, pages.part(first, end),
                                          at[first:end], hash_key)
            with self._lock:
                self._under_way.add(future)
            future.add_done_callback(over)
            future.add_done_callback(self._row_done)

    def _append(self, at: int, data: Any) -> None:
        self._batch.append((at, data))
        self._batch_bytes += len(data)
        if self._batch_bytes >= BATCH:
            self._submit()

    def add_zeros(self, pages: PageList) -> None:
        """Add pages that are all zeros."""
        with self._lock:
            at = self._columns.places(pages)
        self._columns.hashes[at] = pages.hashes
        self.counts["pages"] += len(pages)
        self.counts["zero_pages"] += len(pages)

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Write without a rate limit during the block, as a session is paused; a store that takes nothing for
        STILL_PATIENCE fails the checkpoint.
        """
        self._patience = STILL_PATIENCE
        try:
            with self.pace.exempt():
                yield
        finally:
            self._patience = None

    def give_up(self, why: RgpuError) -> None:
        """Give the checkpoint up, from any thread: nothing more is written; adding pages and finishing raise
        ``why``.
        """
        if self._failure is None:
            self._failure = why
        self.pace.stop()

    def takes_nothing(self) -> RgpuError:
        """Make the error of a store for which the session was paused for STILL_PATIENCE."""
        return StoreUnreachable(f"checkpoint {self.name}: the store took nothing for {STILL_PATIENCE:.0f} s while the "
                                "session was paused for it")

    def check(self) -> None:
        """Raise the first error of a thread, if there was one."""
        if self._failure is not None:
            self._raise()

    def _submit(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if not batch:
            return
        if not self._room.acquire(timeout=self._patience):
            raise self.takes_nothing()
        if self._failure is not None:
            self._room.release()
            self._raise()
        self._announced.beat()
        future = self._threads.submit(self._work, batch)
        with self._lock:
            self._under_way.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        self._row_done(future)
        self._room.release()

    def _row_done(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and self._failure is None:
            self._failure = error
        with self._lock:
            self._under_way.discard(future)

    def _raise(self) -> None:
        if isinstance(self._failure, RgpuError):
            raise self._failure
        raise StoreError(f"checkpoint {self.name} cannot be written: {self._failure}") from self._failure

    def _work(self, batch: list[tuple[int, Any]]) -> None:
        """Store one batch of pages as chunks; runs in a thread."""
        if self._failure is not None:
            return
        names = [chunk.chunk_name(data, self._key) for _, data in batch]
        with self._lock:
            numbers, fresh = self._table.number_many(np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32))
            self._columns.numbers[[at for at, _ in batch]] = numbers
            self.counts["reused_chunks"] = self._table.adopted
        for row in np.flatnonzero(fresh).tolist():
            data = batch[row][1]
            if not self._store_one(numbers[row:row + 1], chunk.encode(bytes(data), names[row]), len(data)):
                return

    def _store_one(self, number: Array, data: bytes, raw: int) -> bool:
        """Store one chunk; ``number``: its number, as an array of one. False: the checkpoint was given up, and
        `finish` raises why.
        """
        if not self._admit(len(data)) or not self.pace.wait(len(data)):
            return False
        for pack, offset, _ in self._packs.append(data):
            with self._lock:
                self._table.place_many(number, pack, offset, np.array([len(data)]))
        self._count(1, raw, len(data), len(data) < chunk.CHUNK_HEADER + raw)
        return True

    def _admit(self, size: int) -> bool:
        """Whether ``size`` more bytes may be stored; else the checkpoint is given up."""
        if self._most is None:
            return True
        with self._lock:
            self._added += size
            within = self._added <= self._most
        if not within:
            self.give_up(LimitReached(f"checkpoint {self.name} adds more than {self._most} bytes, which is all that it "
                                      "may add to the store", limit="checkpoints", most=self._most))
        return within

    def _count(self, chunks: int, raw: int, stored: int, compressed: int) -> None:
        with self._lock:
            self.counts["compressed_chunks"] += compressed
            self.counts["new_chunks"] += chunks
            self.counts["raw_bytes"] += raw
            self.counts["stored_bytes"] += stored

    def _work_rows(self, rows: Array, memory: Shared | None, pages: PageList, at: Array, hash_key: bytes) -> None:
        """Encode rows of a frame into chunks, in place, here or in another process, and store new ones; in a thread.

        ``at``: the pages' places in the columns.
        """
        if self._failure is not None:
            return
        try:
            if memory is not None and self._encoders is not None:
                found = self._encoders.encode(memory, len(rows), pages.hashes, hash_key, self._key)
            else:
                found = encoding.encode(rows, pages.hashes, hash_key, self._key)
        except encoding.PageChanged as changed:
            raise pages.changed(changed.row) from None
        with self._lock:
            numbers, fresh = self._table.number_many(found.names)
            self._columns.numbers[at] = numbers
            self.counts["reused_chunks"] = self._table.adopted
        self._store_encoded(rows.reshape(-1), found.lengths, numbers, fresh)

    def _store_encoded(self, data: Array, lengths: Array, numbers: Array, fresh: Array) -> None:
        """Store the ``fresh`` ones of chunks that lie one behind the other; neighbours are written by one call."""
        where, starts = np.flatnonzero(fresh), np.concatenate([[0], np.cumsum(lengths)])
        for some in np.split(where, np.flatnonzero(np.diff(where) != 1) + 1) if len(where) else ():
            part, sizes, at = data[starts[some[0]]:starts[some[-1] + 1]], lengths[some], 0
            if not self._admit(part.nbytes) or not self.pace.wait(part.nbytes):
                return
            for pack, offset, count in self._packs.append(part, sizes):
                with self._lock:
                    self._table.place_many(numbers[some[at:at + count]], pack, offset, sizes[at:at + count])
                at += count
            self._count(len(some), len(some) * pagehash.PAGE, part.nbytes, int((sizes < PITCH).sum()))

    # -- end ---------------------------------------------------------------------
    def finish(self, state: SessionState, statistics: dict[str, Any] | None = None,
               facts: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the checkpoint exist; returns its statistics. ``state`` must hold the page hashes.

        Raises :class:`StoreError`, :class:`Corrupt` if a page of ``state`` was not added with its hash,
        :class:`LimitReached` if it adds more than it may, :class:`Fenced` if the collector ended this writer as dead.
        """
        self._submit()
        self._wait_stored()
        if self._failure is not None:
            self._raise()
        self._check_pages(state)
        written = self._packs.finish()
        if self._failure is not None:
            self._raise()
        counted = {**self.counts, "seconds": round(time.monotonic() - self._clock, 3), **(statistics or {})}
        packs, chunks = self._table.result(written)
        body = manifest.Body(
            image=self.name, created=self._started, state=state, statistics=counted, packs=packs, chunks=chunks,
            pages=self._page_numbers(state),
            base=self._bases[0].table.body.image if self._bases else "", facts=facts or {})
        self._announced.check()
        pieces = manifest.encode_pieces(body, self._key)
        if not self._admit(sum(map(len, pieces))):
            self._raise()
        self._put_manifest(pieces)
        self._announced.check()  # else packs that it names may have been removed: `abort` removes the manifest
        self._open = False
        with contextlib.suppress(StoreError):
            self._announced.end()  # the checkpoint exists; the collector removes an intent that is left
        return counted

    def _wait_stored(self) -> None:
        """Wait until every page is in a pack; the intent is renewed meanwhile."""
        while True:
            with self._lock:
                under_way = set(self._under_way)
            if not under_way:
                break
            wait(under_way, timeout=BEAT_SECONDS / 2)
            if self._failure is None:
                self._announced.beat()
        self._threads.shutdown(wait=True)
        if self._encoders is not None:
            self._encoders.forget()

    def _put_manifest(self, data: list[bytes]) -> None:
        self._manifest_put = True  # set before the attempt: an error may be reported although the manifest was put
        try:
            self._blobs.put(self._manifest, *data, new=True)
        except AlreadyExists as error:
            whole = b"".join(data)
            if self._blobs.read(self._manifest, len(whole) + 1) != whole:  # equal: a retry after a put that succeeded
                self._manifest_put = False
                raise StoreError(f"checkpoint {self.name} exists", path=self._blobs.where(self._manifest),
                                 reason="exists") from error

    def _page_numbers(self, state: SessionState) -> list[bytes]:
        at = self._columns.whole(state.regions)
        numbers = self._columns.numbers[at].astype("<u4").tobytes()
        ends = [0, *accumulate(4 * pagehash.page_count(region.size) for region in state.regions)]
        return [numbers[start:end] for start, end in pairwise(ends)]

    def _check_pages(self, state: SessionState) -> None:
        """Check that every page of the state was added with its hash; pages never added must be zeros."""
        at = self._columns.whole(state.regions)
        found, wanted = self._columns.hashes[at], _hashes_of(state)
        if not pagehash.differ(found, wanted).any():
            return  # the usual case; the loop over thousands of regions takes as long as a step of the session
        start = 0
        for region in state.regions:
            count = pagehash.page_count(region.size)
            hashes = found[start:start + count]
            blank = (hashes == 0).all(axis=1)
            if blank.any():
                hashes[blank] = pagehash.zero_hash(state.hash_key)
                if blank[-1]:
                    hashes[-1] = pagehash.zero_hash(state.hash_key, (region.size - 1) % pagehash.PAGE + 1)
            bad = np.flatnonzero(pagehash.differ(hashes, wanted[start:start + count]))
            if len(bad):
                raise Corrupt(f"checkpoint {self.name}: page {bad[0]} of {region.address:#x} was not written as the "
                              f"state "
                              "has it", offset=int(bad[0]), reason="page not written")
            start += count

    def abort(self) -> None:
        """Remove what was written. Does nothing after :meth:`finish`; never raises."""
        if not self._open:
            return
        self._open = False
        self.pace.stop()
        self._failure = self._failure or StoreError(f"checkpoint {self.name} was given up")
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._encoders is not None:
            self._encoders.forget()
        self._packs.discard()
        try:
            if self._manifest_put:
                self._blobs.delete(self._manifest)  # first: no manifest may name packs that were removed
            self._packs.remove()
            self._announced.end()
        except StoreError:
            pass  # the collector removes packs and intent later

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.abort()


def _hashes_of(state: SessionState) -> Array:
    """Return the hashes of all pages, one region behind the other."""
    return pagehash.unpack(b"".join(region.hashes for region in state.regions))


def manifest_name(prefix: str, name: str) -> str:
    """Return the name of the blob that holds the manifest of checkpoint ``name``."""
    return f"{prefix}images/{quote(name, safe='')}.image"
