"""An image's pages to a device, by many threads: read into frames, checked, and copied from where they lie.

A run of pages whose chunks lie one behind the other in a pack is one read into
a frame, compressed ones beside it, and one copy to the device. What its chunks'
headers say is compared with the manifest, and while the copy is under way, so
are the names of the pages' bytes. What is wrong is read again and checked in
every way, so that the damage is named. Pages of module variables and pinned
memory are checked as they are read, and where names are not compared, so are
compressed ones.

The device hashes every page before the session runs, too
(:func:`rgpu.checkpoint.restore.finish`), and :meth:`Delivery.blame` says whose
fault a difference is. That finds any damage even without the names; but the key
of the page hashes stands in the manifest, and only the names keep out who can
write to the store and does not have the user's key.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from rgpu.checkpoint import blake3_native, chunk, image, pagehash
from rgpu.checkpoint.blobs import read_into
from rgpu.checkpoint.device import PAGE, Device
from rgpu.checkpoint.frames import FRAME_BYTES, FRAME_PAGES, PITCH, Frame
from rgpu.checkpoint.pages import page_size
from rgpu.session.errors import Corrupt

if TYPE_CHECKING:
    from rgpu.checkpoint.reader import Image

THREADS = min(16, 2 * (os.cpu_count() or 1))
BLAMED = 64  #: pages that are looked at to find what is wrong

Array = np.ndarray[Any, Any]


class Delivery:
    """One image into one device. ``times``: seconds of all threads together, by what they did.

    ``names``: whether the bytes of raw chunks are compared with their names.
    """

    def __init__(self, source: Image, device: Device, names: bool = True) -> None:
        self._image, self._device, self._names = source, device, names
        self._lock = threading.Lock()
        self.times = dict.fromkeys(("read", "names", "copy"), 0.0)

    def run(self) -> int:
        """Write every page that a fresh device does not have already; returns how many.

        Raises :class:`Corrupt`, :class:`StoreError`, :class:`DeviceError`.
        """
        if self._names:
            blake3_native.prepare()
        frames, count = self._device.frames(), 0
        frames.allow(THREADS * FRAME_BYTES)
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="restore")
        waiting: set[Future[int]] = set()
        try:
            for place in self._places():
                waiting.add(threads.submit(self._one, *place))
                while len(waiting) >= 2 * THREADS:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    count += sum(future.result() for future in done)
            return count + sum(future.result() for future in waiting)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
            frames.trim()

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """(region number, first page, pages), in the order of the regions."""
        for number, region in enumerate(self._image.state.regions):
            pages = pagehash.page_count(region.size)
            for start in range(0, pages, FRAME_PAGES):
                yield number, start, min(FRAME_PAGES, pages - start)

    def _one(self, number: int, start: int, count: int) -> int:
        region, source = self._image.state.regions[number], self._image
        numbers = source.table.pages[number][start:start + count]
        here = np.flatnonzero(numbers != image.ZERO_PAGE)
        whole = here[here + start < region.size // PAGE] if region.kind == "mapped" else here[:0]
        done = 0
        if len(whole):
            frames = self._device.frames()
            frame = frames.take()
            assert frame is not None
            try:
                for at in range(0, len(whole), len(frame.rows)):
                    some = whole[at:at + len(frame.rows)]
                    self._through(frame, numbers[some], region.address + (some + start) * PAGE)
                    done += len(some)
            finally:
                frames.give(frame)
        rest = here[len(whole):].tolist() if region.kind != "global" else range(count)
        if len(rest):
            done += self._one_by_one(number, start, rest)
        return done

    def _one_by_one(self, number: int, start: int, wanted: Sequence[int]) -> int:
        region, first = self._image.state.regions[number].region(), start + wanted[0]
        pages = self._image.read_pages(number, first, wanted[-1] - wanted[0] + 1)
        runs = [(region.address + index * PAGE, page_size(region, index), data)
                for index, data in enumerate(pages, first) if data is not None or region.kind == "global"]
        self._device.write_pages(runs)
        return len(runs)

    def _through(self, frame: Frame, numbers: Array, addresses: Array) -> None:
        """Chunks ``numbers`` into the first rows of the frame, and from there to ``addresses``, which ascend."""
        times = [time.monotonic()]
        unchecked = self._read(frame.rows, numbers)
        times.append(time.monotonic())
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(addresses) != PAGE) + 1])
        counts = np.diff(np.concatenate([firsts, [len(addresses)]]))
        pieces = list(zip(firsts.tolist(), addresses[firsts].tolist(), counts.tolist(), strict=True))
        frame.deliver(pieces)
        wrong = self._misnamed(frame.rows, numbers, unchecked) if self._names else []
        times.append(time.monotonic())
        frame.settle()
        if wrong:
            self._decode(frame.rows, numbers, wrong)
            frame.deliver(pieces)  # it is right now: somebody was still writing it
            frame.settle()
        times.append(time.monotonic())
        with self._lock:
            for name, start, end in zip(self.times, times, times[1:], strict=False):
                self.times[name] += end - start

    def _misnamed(self, rows: Array, numbers: Array, unchecked: Array) -> list[int]:
        """Which of the rows ``unchecked`` do not hold what their chunk is named for."""
        start = rows.ctypes.data + chunk.CHUNK_HEADER
        names = blake3_native.name_pages(start, rows.strides[0], len(numbers), self._image.key)
        found: list[int] = np.flatnonzero(unchecked & (names != self._image.names[numbers]).any(axis=1)).tolist()
        return found

    def _read(self, rows: Array, numbers: Array) -> Array:
        """Chunks into rows; returns which of them are not checked but for their headers."""
        table = self._image.table
        packs, offsets = table.packs[numbers], table.offsets[numbers].astype(np.int64)
        lengths = table.lengths[numbers]
        raw = lengths == PITCH
        apart = (np.diff(packs) != 0) | (np.diff(offsets) != lengths[:-1])
        if not self._names:
            apart |= raw[1:] != raw[:-1]
        starts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(numbers)]
        for start, end in zip(starts, starts[1:], strict=False):
            if raw[start] or self._names:
                self._read_run(rows, numbers, start, end)
            else:
                self._decode(rows, numbers, range(start, end))
        as_told = (rows[:len(numbers), :16] == chunk.raw_start()).all(axis=1)
        as_told &= (rows[:len(numbers), 16:48] == self._image.names[numbers]).all(axis=1)
        wrong = np.flatnonzero(~as_told & (raw | self._names))
        if len(wrong):  # compressed to just the length of a raw one, or damaged: then it is said how
            self._decode(rows, numbers, wrong.tolist())
        return as_told

    def _read_run(self, rows: Array, numbers: Array, start: int, end: int) -> None:
        """Chunks that lie one behind the other in a pack: raw ones into their rows, the others through memory beside.

        A row that holds a whole page has the header of a raw chunk afterwards, any other one has not.
        """
        table, into, beside = self._image.table, [], []
        lengths = table.lengths[numbers[start:end]]
        edges = [0, *(np.flatnonzero((lengths[1:] == PITCH) != (lengths[:-1] == PITCH)) + 1).tolist(), end - start]
        for first, last in zip(edges, edges[1:], strict=False):
            if lengths[first] == PITCH:
                into.append(rows[start + first:start + last].reshape(-1).data)
            else:
                into.append(memoryview(bytearray(int(lengths[first:last].sum()))))
                beside.append((first, last, into[-1]))
        blob = self._image.pack(int(table.packs[numbers[start]]))
        read_into(self._image.blobs, blob, int(table.offsets[numbers[start]]), *into)
        for first, last, packed in beside:
            at = 0
            for index in range(first, last):
                row, number, length = rows[start + index], int(numbers[start + index]), int(lengths[index])
                data = chunk.unpack_page(packed[at:at + length], table.name(number))
                row[:16] = chunk.raw_start() if data else 0
                row[16:48] = self._image.names[number]
                if data:
                    row[chunk.CHUNK_HEADER:] = np.frombuffer(data, np.uint8)
                at += length

    def _decode(self, rows: Array, numbers: Array, wanted: Sequence[int]) -> None:
        """These chunks checked, and unpacked. Raises :class:`Corrupt`."""
        found = self._image.read_chunks(numbers[np.asarray(wanted)])
        for row in wanted:
            data = found[int(numbers[row])]
            if len(data) != PAGE:
                raise Corrupt(f"image {self._image.name}: chunk {numbers[row]} has {len(data)} bytes, a page wanted",
                              offset=int(numbers[row]), reason="page length")
            rows[row, chunk.CHUNK_HEADER:] = np.frombuffer(data, np.uint8)

    def blame(self, number: int, indices: Array) -> None:
        """Pages of a region that the device has otherwise: raise :class:`Corrupt` if the store is to blame for one."""
        region, key = self._image.state.regions[number], self._image.state.hash_key
        hashes = region.page_hashes()
        for index in indices[:BLAMED].tolist():
            data = self._image.read_page(number, index)
            found = pagehash.zero_hash(key, page_size(region.region(), index)) if data is None \
                else pagehash.hash_page(data, key)
            if found != (int(hashes[index][0]), int(hashes[index][1])):
                raise Corrupt(f"image {self._image.name}: page {index} of {region.address:#x} does not have its hash",
                              offset=index, reason="page hash")
