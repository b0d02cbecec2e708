"""Delivery of a checkpoint's pages to a device by many threads and processes: pages are read into frames, checked, and
copied from there.

Threads read a few pages and compare the names of their bytes with the
manifest's (:mod:`rgpu.checkpoint.codec.filling`); where there are enough processors, processes do it
(:mod:`rgpu.checkpoint.codec.prefetch_pool`), since only one thread at a time holds the GIL, and
every compressed page needs it. Then the frame is copied to the device. Pages that
do not match are read again and fully checked, so that the damage is reported.
Pages of module variables and pinned memory are checked as they are read.

The device also hashes every page before the session runs
(:func:`rgpu.checkpoint.session.restore.finish`), and :meth:`Delivery.blame` finds out whether the
store is the reason for a difference. That finds any damage even without the names. But the key
of the page hashes is in the manifest, and only the names protect against an attacker who can
write to the store and does not have the user's key.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from rgpu.checkpoint.blobs.base import read_into
from rgpu.checkpoint.codec import chunk, filling
from rgpu.checkpoint.codec.encoders import Encoders
from rgpu.checkpoint.codec.frames import FRAME_BYTES, FRAME_PAGES, Frame
from rgpu.checkpoint.codec.prefetch_pool import Job, PrefetchPool, Work
from rgpu.checkpoint.device import PAGE, Device
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.native import blake3_native
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import page_size
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.session.errors import Corrupt

THREADS = min(16, 2 * (os.cpu_count() or 1))
BLAMED = 64  #: pages that are examined to find what is wrong

Array = np.ndarray[Any, Any]


class Delivery:
    """Delivery of one checkpoint to one device. ``times``: seconds of all threads or processes together, by step.

    ``names``: whether the bytes of chunks are compared with their names. ``processes``: processes that fill frames
    instead of threads; not used if the store's packs are no files of this machine.
    """

    def __init__(self, source: StoredCheckpoint, device: Device, names: bool = True,
                 processes: Encoders | None = None) -> None:
        self._checkpoint, self._device, self._names = source, device, names
        files = names and hasattr(source.blobs, "open_file")
        self._processes = processes if files else None
        self._lock = threading.Lock()
        self.times = dict.fromkeys(("read", "copy"), 0.0)

    def run(self) -> int:
        """Write every page that a fresh device does not have already; returns how many.

        Raises :class:`Corrupt`, :class:`StoreError`, :class:`DeviceError`.
        """
        count, rest = 0, list[tuple[int, int, Sequence[int]]]()

        def counted() -> Iterator[Job]:
            nonlocal count
            for job in self._jobs(rest):
                count += len(job.numbers)
                yield job

        frames, jobs = self._device.frames(), counted()
        try:
            if self._processes is not None:
                work = Work(self._checkpoint.key, self._wanted, self._checkpoint.pack_file, self._deliver)
                pages = sum(int(np.count_nonzero(numbers != manifest.ZERO_PAGE))
                            for numbers in self._checkpoint.table.pages)
                jobs = iter(PrefetchPool(self._processes, frames, work, self.times).run(jobs, -(-pages // frames.rows)))
            self._by_threads(functools.partial(self._fill, job) for job in jobs)
            return count + self._by_threads(functools.partial(self._one_by_one, *some) for some in rest)
        finally:
            if self._processes is not None:
                self._processes.forget()
            frames.trim()

    def _by_threads(self, tasks: Iterator[Callable[[], int]]) -> int:
        """Run the tasks in threads; return the sum of their results."""
        if (first := next(tasks, None)) is None:
            return 0
        if self._names:
            blake3_native.prepare()
        self._device.frames().allow(THREADS * FRAME_BYTES)
        count, threads = 0, ThreadPoolExecutor(THREADS, thread_name_prefix="restore")
        waiting = {threads.submit(first)}
        try:
            for task in tasks:
                waiting.add(threads.submit(task))
                while len(waiting) >= 2 * THREADS:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    count += sum(future.result() for future in done)
            return count + sum(future.result() for future in waiting)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _jobs(self, rest: list[tuple[int, int, Sequence[int]]]) -> Iterator[Job]:
        """Yield the pages that pass through frames, by region. Others are added to ``rest``, see _one_by_one."""
        most = self._device.frames().rows
        for number, region in enumerate(self._checkpoint.state.regions):
            pages, table = pagehash.page_count(region.size), self._checkpoint.table.pages[number]
            for start in range(0, pages, FRAME_PAGES):
                count = min(FRAME_PAGES, pages - start)
                numbers = table[start:start + count]
                here = np.flatnonzero(numbers != manifest.ZERO_PAGE)
                whole = here[here + start < region.size // PAGE] if region.kind == "mapped" else here[:0]
                for at in range(0, len(whole), most):
                    some = whole[at:at + most]
                    yield Job(numbers[some], region.address + (some + start) * PAGE)
                single = here[len(whole):].tolist() if region.kind != "global" else range(count)
                if len(single):
                    rest.append((number, start, single))

    def _one_by_one(self, number: int, start: int, wanted: Sequence[int]) -> int:
        region, first = self._checkpoint.state.regions[number].region(), start + wanted[0]
        pages = self._checkpoint.read_pages(number, first, wanted[-1] - wanted[0] + 1)
        runs = [(region.address + index * PAGE, page_size(region, index), data)
                for index, data in enumerate(pages, first) if data is not None or region.kind == "global"]
        self._device.write_pages(runs)
        return len(runs)

    def _wanted(self, numbers: Array) -> Array:
        table, wanted = self._checkpoint.table, np.empty(len(numbers), filling.WANTED)
        wanted["pack"], wanted["length"] = table.packs[numbers], table.lengths[numbers]
        wanted["offset"], wanted["name"] = table.offsets[numbers], self._checkpoint.names[numbers]
        return wanted

    def _fill(self, job: Job) -> int:
        """Fill and deliver one frame, in a thread of its own."""
        frames, times = self._device.frames(), [time.monotonic()]
        frame = frames.take()
        assert frame is not None
        try:
            key = self._checkpoint.key if self._names else None
            right = filling.fill(frame.rows, self._wanted(job.numbers), key, self._read)
            times.append(time.monotonic())
            self._deliver(frame, job, right)
            frame.settle()
            times.append(time.monotonic())
        finally:
            frames.give(frame)
        with self._lock:
            for name, start, end in zip(self.times, times, times[1:], strict=False):
                self.times[name] += end - start
        return 0

    def _deliver(self, frame: Frame, job: Job, right: Array) -> None:
        """Begin to copy the frame. ``right``: which rows hold their checked page; the others are read again."""
        if len(wrong := np.flatnonzero(~right)):
            # Compressed to exactly the length of a raw chunk, still being written, or damaged: this raises how.
            self._decode(frame.rows, job.numbers, wrong.tolist())
        addresses = job.addresses
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(addresses) != PAGE) + 1])
        counts = np.diff(np.concatenate([firsts, [len(addresses)]]))
        frame.deliver(list(zip(firsts.tolist(), addresses[firsts].tolist(), counts.tolist(), strict=True)))

    def _read(self, pack: int, offset: int, buffers: list[memoryview]) -> None:
        read_into(self._checkpoint.blobs, self._checkpoint.pack(pack), offset, *buffers)

    def _decode(self, rows: Array, numbers: Array, wanted: Sequence[int]) -> None:
        """Read, check and unpack the chunks of these rows. Raises :class:`Corrupt`."""
        found = self._checkpoint.read_chunks(numbers[np.asarray(wanted)])
        for row in wanted:
            data = found[int(numbers[row])]
            if len(data) != PAGE:
                raise Corrupt(f"checkpoint {self._checkpoint.name}: chunk {numbers[row]} has {len(data)} bytes, a page "
                              f"wanted",
                              offset=int(numbers[row]), reason="page length")
            rows[row, chunk.CHUNK_HEADER:] = np.frombuffer(data, np.uint8)

    def blame(self, number: int, indices: Array) -> None:
        """Examine pages of a region that differ on the device; raise :class:`Corrupt` if the store is the reason."""
        region, key = self._checkpoint.state.regions[number], self._checkpoint.state.hash_key
        hashes = region.page_hashes()
        for index in indices[:BLAMED].tolist():
            data = self._checkpoint.read_page(number, index)
            found = pagehash.zero_hash(key, page_size(region.region(), index)) if data is None \
                else pagehash.hash_page(data, key)
            if found != (int(hashes[index][0]), int(hashes[index][1])):
                raise Corrupt(f"checkpoint {self._checkpoint.name}: page {index} of {region.address:#x} does not have "
                              f"its hash",
                              offset=index, reason="page hash")
