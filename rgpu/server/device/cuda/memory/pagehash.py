"""Hashes pages on the GPU: loads rgpu's kernels, feeds them ranges of memory, fetches the results.

The kernels (``kernels/pagehash.cu``) compute :mod:`rgpu.checkpoint.pages.pagehash`.
They run on streams of their own, non-blocking and of the lowest priority, so
the session's work does not wait for them nor they for it. If the session's kernels
write meanwhile, the hash is that of a mixture, as with any read
of live memory. Writes of the *worker* through the legacy stream (pages that arrived,
fresh memory set to zero) are waited for: see :meth:`PageHasher.wrote`.

Everything that the driver places is made once, in the constructor, which the
worker calls before any object of the session exists: module, streams and two
buffers of fixed size. So later modules get the same addresses on every node
(SEMANTICS 12). Work uses two slots in turn: while one's results are
fetched, the other's pages are hashed.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.pages.pagehash import HashKey, PageHashes, Ranges, examine_pages, expand_key, page_count
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.pinned import Mirrors
from rgpu.session.errors import DeviceError

KERNELS = Path(__file__).parents[1] / "kernels"
SLOTS = 2
SLOT_PAGES = 1 << 18  #: 16 GiB of memory a launch
SLOT_SEGMENTS = 1 << 14
WARPS = 8  #: of a block; one takes a page at a time
#: Pages for each warp of a block, at most: a block ends after about 0.2 ms, and then yields to work of higher priority.
PAGES_PER_WARP = 4
SEGMENT = np.dtype([("address", "<u8"), ("bytes", "<u8"), ("first", "<u8")])
_KEY_WORDS = 520  #: 518, padded to 16 bytes
_KEY_BYTES = 4 * _KEY_WORDS + 2 * 257 * 8
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*
_CAPTURE_IMPLICIT = 906


def segment_table(ranges: Ranges) -> np.ndarray:
    """Convert (address, bytes) ranges to segments; ``first``: the pages before each. Empty ranges have none."""
    pairs = np.array(ranges, np.uint64).reshape(-1, 2)
    pairs = pairs[pairs[:, 1] > 0]
    table = np.empty(len(pairs), SEGMENT)
    table["address"], table["bytes"] = pairs[:, 0], pairs[:, 1]
    ends = np.cumsum(-(-pairs[:, 1].astype(np.int64) // PAGE))
    table["first"][:1] = 0
    table["first"][1:] = ends[:-1]
    return table


def pages_of(table: np.ndarray) -> int:
    """Return the number of pages of a table's segments together."""
    return int(table["first"][-1]) + -(-int(table["bytes"][-1]) // PAGE) if len(table) else 0


def chunks(table: np.ndarray, most_pages: int = SLOT_PAGES, most_segments: int = SLOT_SEGMENTS
           ) -> Iterator[tuple[np.ndarray, int]]:
    """Yield parts of a table that fit a slot: (a table of its own, its pages). Long segments are cut between pages."""
    total = pages_of(table)
    at = 0  # the page where the next part begins
    while at < total:
        low = int(np.searchsorted(table["first"], at, "right")) - 1
        high = min(int(np.searchsorted(table["first"], at + most_pages, "left")), low + most_segments)
        part = table[low:high].copy()
        end = min(int(table["first"][high]) if high < len(table) else total, at + most_pages)
        begun = (at - int(part["first"][0])) * PAGE
        part["address"][0] += np.uint64(begun)
        part["bytes"][0] -= np.uint64(begun)
        part["first"][0] = at
        part["bytes"][-1] = min(int(part["bytes"][-1]), (end - int(part["first"][-1])) * PAGE)
        part["first"] -= np.uint64(at)
        yield part, end - at
        at = end


def pages_per_warp(pages: int, resident_warps: int) -> int:
    """Return the pages of each warp: few pages are spread over the whole device; with many, a block serves several."""
    return max(1, min(PAGES_PER_WARP, pages // (4 * max(1, resident_warps))))


def packed_key(key: HashKey) -> bytes:
    """Return ``struct Key`` of the kernels."""
    words = key.words.astype("<u4").tobytes().ljust(4 * _KEY_WORDS, b"\0")
    return words + key.multipliers.astype("<u8").tobytes()


def load_kernels(name: str, capability: tuple[int, int]) -> tuple[Any, str]:
    """Load kernels of ours; return the module and its file: the cubin where one fits, else the PTX.

    ``name``: of the files, without what follows the first dot. Raises :class:`DeviceError`.
    """
    cubin = KERNELS / f"{name}.sm_{capability[0]}0.cubin"
    if cubin.exists():
        with suppress(DeviceError):  # where the driver does not support the cubin, it compiles the PTX
            return check(driver.cuModuleLoadData(cubin.read_bytes()), "cuModuleLoadData"), cubin.name
    text = (KERNELS / f"{name}.ptx").read_bytes() + b"\0"
    return check(driver.cuModuleLoadData(text), "loading our own kernels (the driver must know CUDA 13.0)"), \
        f"{name}.ptx"


@dataclass
class _Slot:
    """A stream with its own part of the two buffers. Offsets and sizes are the same in both."""

    stream: Any
    done: Any  #: event behind the results
    device: int  #: address of segments, hashes, flags
    host: int

    SEGMENTS = 0
    HASHES = SLOT_SEGMENTS * SEGMENT.itemsize
    ZERO = HASHES + SLOT_PAGES * 16
    BYTES = ZERO + SLOT_PAGES

    def view(self, offset: int, size: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.host + offset))


class Hasher(Protocol):
    """The common interface of :class:`PageHasher` and the hasher for several GPUs."""

    def wrote(self) -> None:
        """Note that hashed memory was written."""

    def hash(self, ranges: Ranges, key: bytes) -> PageHashes:
        """Hash pages where they are, under ``key``."""

    def copy_and_hash(self, ranges: Ranges, staging: int, key: bytes) -> PageHashes:
        """Copy pages to the address ``staging`` and hash them there under ``key``."""

    def close(self) -> None:
        """Free the hasher's memory and module."""


class PageHasher:
    """Hasher of one GPU. Thread-safe; one call at a time uses the device. Methods raise :class:`DeviceError`."""

    def __init__(self, context: Any, capability: tuple[int, int], multiprocessors: int) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._use()
        self._module, self.loaded_from = load_kernels("pagehash", capability)
        self._hash = self._function("rgpu_hash_pages")
        self._copy_hash = self._function("rgpu_copy_hash_pages")
        blocks = check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._hash, 32 * WARPS, 0), "occupancy")
        self._resident_warps = int(blocks) * WARPS * multiprocessors
        least, _ = check(driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
        self._device = int(check(driver.cuMemAlloc(_KEY_BYTES + SLOTS * _Slot.BYTES), "cuMemAlloc"))
        self._host = int(check(driver.cuMemHostAlloc(SLOTS * _Slot.BYTES, 0), "cuMemHostAlloc"))
        self._slots = [self._slot(number, int(least)) for number in range(SLOTS)]
        self._before = check(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)), "cuEventCreate")
        self._key = b""
        self._wrote = False

    def _use(self) -> None:
        check(driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def _function(self, name: str) -> Any:
        function = check(driver.cuModuleGetFunction(self._module, name.encode()), "cuModuleGetFunction")
        check(driver.cuFuncLoad(function), "cuFuncLoad")  # now, also where modules are loaded lazily
        return function

    def _slot(self, number: int, priority: int) -> _Slot:
        flags = driver.CUevent_flags
        return _Slot(
            check(driver.cuStreamCreateWithPriority(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), priority),
                  "cuStreamCreateWithPriority"),
            check(driver.cuEventCreate(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)),
                  "cuEventCreate"),
            # The key lies behind the slots.
            self._device + number * _Slot.BYTES, self._host + number * _Slot.BYTES)

    # -- use ----------------------------------------------------------------------
    def wrote(self) -> None:
        """Note a write through the legacy stream: no hash runs before it (and what it waits for) is done."""
        self._wrote = True

    def hash(self, ranges: Ranges, key: bytes) -> PageHashes:
        """Hash the pages of (address, bytes) ranges of device memory, in order. The last page of each may be short."""
        return self._run(ranges, key, None)

    def copy_and_hash(self, ranges: Ranges, staging: int, key: bytes) -> PageHashes:
        """Copy page i to ``staging`` + 64 KiB · i and hash exactly the bytes that were copied.

        The rest of a short page's place becomes zeros. ``staging``: memory that the device can write
        (its own, or pinned host memory), a multiple of 16. The caller's earlier reads of it must be
        over; when this returns, the pages are there.
        """
        if staging % 16:
            raise ValueError(f"staging at 0x{staging:x}: not a multiple of 16")
        return self._run(ranges, key, staging)

    def _run(self, ranges: Ranges, key: bytes, staging: int | None) -> PageHashes:
        table = segment_table(ranges)
        total = pages_of(table)
        result = PageHashes(np.empty((total, 2), np.uint64), np.empty(total, np.bool_))
        if not total:
            return result
        with self._lock:
            self._use()
            try:
                self._set_key(key)
                self._order()
                self._through_slots(table, staging, result)
            except BaseException:
                for slot in self._slots:  # work under way must not overlap the next call
                    driver.cuStreamSynchronize(slot.stream)
                raise
        return result

    def _through_slots(self, table: np.ndarray, staging: int | None, result: PageHashes) -> None:
        busy: deque[tuple[_Slot, int, int]] = deque()
        at = 0
        for number, (part, pages) in enumerate(chunks(table)):
            if len(busy) == SLOTS:
                self._collect(*busy.popleft(), result)
            slot = self._slots[number % SLOTS]
            self._submit(slot, part, pages, None if staging is None else staging + at * PAGE)
            busy.append((slot, at, pages))
            at += pages
        while busy:
            self._collect(*busy.popleft(), result)

    def _set_key(self, key: bytes) -> None:
        if key == self._key:
            return
        self._key = b""
        data = packed_key(expand_key(key))
        # On a stream of this hasher and from pageable memory: it is read completely when the call returns.
        stream = self._slots[0].stream
        check(driver.cuMemcpyHtoDAsync(self._device + SLOTS * _Slot.BYTES, data, len(data), stream), "the hash key")
        check(driver.cuStreamSynchronize(stream), "the hash key")
        self._key = key

    def _order(self) -> None:
        """Order the next hash behind the worker's own writes, if there were any since the last time."""
        if not self._wrote:
            return
        legacy = driver.CUstream(int(driver.CU_STREAM_LEGACY))
        capturing = driver.cuStreamIsCapturing(legacy)
        if int(capturing[0]) == _CAPTURE_IMPLICIT:
            return  # the legacy stream may not be used until the capture ends; until then a hash is only a hint
        check(capturing, "cuStreamIsCapturing")
        self._wrote = False
        check(driver.cuEventRecord(self._before, legacy), "cuEventRecord")
        for slot in self._slots:
            check(driver.cuStreamWaitEvent(slot.stream, self._before, 0), "cuStreamWaitEvent")

    def _submit(self, slot: _Slot, part: np.ndarray, pages: int, staging: int | None) -> None:
        slot.view(slot.SEGMENTS, part.nbytes)[:] = part.view(np.uint8)
        check(driver.cuMemcpyHtoDAsync(slot.device, slot.host, part.nbytes, slot.stream), "the list of pages")
        per_warp = pages_per_warp(pages, self._resident_warps)
        parameters = struct.pack("<QIII4xQQQ", slot.device, len(part), pages, per_warp,
                                 self._device + SLOTS * _Slot.BYTES, slot.device + slot.HASHES, slot.device + slot.ZERO)
        function = self._hash
        if staging is not None:
            function, parameters = self._copy_hash, parameters + struct.pack("<Q", staging)
        launch(function, -(-pages // (WARPS * per_warp)), parameters, slot.stream)
        for offset, size in ((slot.HASHES, 16 * pages), (slot.ZERO, pages)):
            check(driver.cuMemcpyDtoHAsync(slot.host + offset, slot.device + offset, size, slot.stream), "the hashes")
        check(driver.cuEventRecord(slot.done, slot.stream), "cuEventRecord")

    def _collect(self, slot: _Slot, at: int, pages: int, result: PageHashes) -> None:
        check(driver.cuEventSynchronize(slot.done), "hashing pages")
        result.hashes[at:at + pages] = slot.view(slot.HASHES, 16 * pages).view("<u8").reshape(pages, 2)
        result.zero[at:at + pages] = slot.view(slot.ZERO, pages).view(np.bool_)

    def close(self) -> None:
        """Free everything; nothing where a fault has destroyed the context."""
        with self._lock:
            self._use()
            for slot in self._slots:
                driver.cuStreamSynchronize(slot.stream)
                driver.cuEventDestroy(slot.done)
                driver.cuStreamDestroy(slot.stream)
            driver.cuEventDestroy(self._before)
            driver.cuMemFree(self._device)
            driver.cuMemFreeHost(self._host)
            driver.cuModuleUnload(self._module)


def hash_regions(hasher: Hasher, mirrors: Mirrors, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
    """Hash each region's pages: device memory on the device, all at once; mirrors where they are, in host memory."""
    on_device = [region for region in regions if region.kind != "pinned"]
    together = hasher.hash([(region.address, region.size) for region in on_device], key)
    ends = np.cumsum([page_count(region.size) for region in on_device])
    parts = iter([PageHashes(together.hashes[end - page_count(region.size):end],
                             together.zero[end - page_count(region.size):end])
                  for region, end in zip(on_device, ends, strict=True)])
    return [examine_pages(mirrors.read(region.address, region.size), key) if region.kind == "pinned" else next(parts)
            for region in regions]


def launch(function: Any, blocks: int, parameters: bytes, stream: Any, threads: int = 32 * WARPS) -> None:
    """Launch one of rgpu's kernels with packed parameters, ``threads`` in each block. Raises :class:`DeviceError`."""
    data = ctypes.create_string_buffer(parameters, len(parameters))
    size = ctypes.c_size_t(len(parameters))
    extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, ctypes.addressof(data), _BUFFER_SIZE, ctypes.addressof(size), None)
    check(driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, 0, ctypes.addressof(extra)),
          "cuLaunchKernel")
