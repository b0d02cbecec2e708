"""Frames of the ``cuda`` device: pinned host memory, filled and emptied by the copy engines.

Pages of 64 KiB are 64 bytes apart in a frame, so a run of them is one copy of
two dimensions (CUDA driver API, ``cuMemcpy2DAsync``). Pages that are scattered
over the device are gathered by the kernel that hashes them, in the
staging memory of the page ring, one half while the other is copied out.

A frame's memory is mapped by rgpu and registered with the driver, which therefore does
not place it: frames may be made at any time (SEMANTICS 12). They are made when the
first checkpoint is written or read, and a few stay.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint.codec.chunk import CHUNK_HEADER
from rgpu.checkpoint.codec.frames import FRAME_BYTES, FRAME_PAGES, PITCH, FramePool, Shared
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages.pagehash import Ranges
from rgpu.server.device import host_zone
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.pagehash import Hasher
from rgpu.server.device.cuda.memory.ring import CudaRing
from rgpu.session.errors import DeviceError

#: Mean pages of a run from which on each run is a copy of its own: the kernel costs more than so few calls.
LONG = 16
_HALVES = 2


class CudaFrames:
    """State shared by the frames of one device: a stream, staging memory. ``before(stream)``: see CudaRing.write."""

    def __init__(self, context: Any, ring: CudaRing, hasher: Hasher, before: Callable[[Any], None]) -> None:
        self.context, self.hasher, self.before = context, hasher, before
        self.lock = threading.Lock()
        least, _ = check(driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
        self.stream = check(driver.cuStreamCreateWithPriority(1, int(least)), "cuStreamCreateWithPriority")
        size = ring.staging_bytes // _HALVES
        self.half_pages = min(FRAME_PAGES, size // PAGE)
        self.halves = [ring.staging(0) + number * size for number in range(_HALVES)]
        self.emptied = [self.event() for _ in range(_HALVES)]  #: when a half was last copied out
        self.turn = 0
        self.pool = FramePool(lambda: CudaFrame(self))

    def use(self) -> None:
        """Make the session's context current in this thread."""
        check(driver.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")

    def event(self) -> Any:
        """Make an event without timing on which threads sleep."""
        flags = driver.CUevent_flags
        wanted = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        return check(driver.cuEventCreate(wanted), "cuEventCreate")

    def close(self) -> None:
        """Free everything; nothing where a fault has destroyed the context."""
        self.use()
        driver.cuStreamSynchronize(self.stream)
        self.pool.close()
        for event in self.emptied:
            driver.cuEventDestroy(event)
        driver.cuStreamDestroy(self.stream)


class CudaFrame:
    """One frame. See :class:`rgpu.checkpoint.codec.frames.Frame`."""

    def __init__(self, shared: CudaFrames) -> None:
        self._shared = shared
        shared.use()
        try:
            self.shared = Shared.make(FRAME_BYTES)
            self._memory = host_zone.shared(self.shared.fd, FRAME_BYTES, writable=True, huge=True)
        except OSError as error:
            raise DeviceError(f"the host has no {FRAME_BYTES} bytes for a frame", 2) from error
        try:
            flat = np.frombuffer(self._memory, np.uint8)
            flat[::4096] = 0  # before it is pinned, by the thread that makes it, beside other threads
            self.rows = flat.reshape(FRAME_PAGES, PITCH)
            self._address = int(flat.ctypes.data)
            check(driver.cuMemHostRegister(self._address, FRAME_BYTES, 0), "cuMemHostRegister")
            self._done = shared.event()
        except BaseException:
            os.close(self.shared.fd)
            raise

    def gather(self, ranges: Ranges, key: bytes) -> None:
        shared = self._shared
        table = np.asarray(ranges, np.uint64).reshape(-1, 2)
        counts = -(-table[:, 1].astype(np.int64) // PAGE)
        rows = np.concatenate([[0], np.cumsum(counts)])
        if rows[-1] > FRAME_PAGES:
            raise ValueError(f"{rows[-1]} pages for a frame of {FRAME_PAGES}")
        shared.use()
        with shared.lock:
            if rows[-1] >= LONG * len(table) and not (table[:, 1] % PAGE).any():
                for row, (address, _), count in zip(rows.tolist(), table.tolist(), counts.tolist(), strict=False):
                    self._copy(out_of=address, row=row, count=count)
            else:
                self._through_halves(table, counts, key)
            check(driver.cuEventRecord(self._done, shared.stream), "cuEventRecord")

    def _through_halves(self, table: Any, counts: Any, key: bytes) -> None:
        """Copy ranges of few pages each, in turns that fit a half; a long one is cut to fit."""
        shared, row, at = self._shared, 0, 0
        pieces: list[tuple[int, int, int]] = []  # address, bytes, pages
        for (address, size), pages in zip(table.tolist(), counts.tolist(), strict=True):
            for first in range(0, pages, shared.half_pages):
                some = min(shared.half_pages, pages - first)
                pieces.append((address + first * PAGE, min(size - first * PAGE, some * PAGE), some))
        while at < len(pieces):
            end, pages = at, 0
            while end < len(pieces) and pages + pieces[end][2] <= shared.half_pages:
                pages += pieces[end][2]
                end += 1
            half, shared.turn = shared.turn, (shared.turn + 1) % _HALVES
            check(driver.cuEventSynchronize(shared.emptied[half]), "staging memory")
            place = shared.halves[half]
            shared.hasher.copy_and_hash([(address, size) for address, size, _ in pieces[at:end]], place, key)
            self._copy(out_of=place, row=row, count=pages)
            check(driver.cuEventRecord(shared.emptied[half], shared.stream), "cuEventRecord")
            row, at = row + pages, end

    def _copy(self, *, row: int, count: int, out_of: int = 0, into: int = 0) -> None:
        """Copy pages between rows and one range of memory that the device reaches (its own or pinned)."""
        kinds = driver.CUmemorytype
        host, device = self._address + row * PITCH + CHUNK_HEADER, out_of or into
        copy = driver.CUDA_MEMCPY2D()
        copy.WidthInBytes, copy.Height = PAGE, count
        if out_of:
            copy.srcMemoryType, copy.srcDevice, copy.srcPitch = kinds.CU_MEMORYTYPE_UNIFIED, device, PAGE
            copy.dstMemoryType, copy.dstHost, copy.dstPitch = kinds.CU_MEMORYTYPE_HOST, host, PITCH
        else:
            copy.srcMemoryType, copy.srcHost, copy.srcPitch = kinds.CU_MEMORYTYPE_HOST, host, PITCH
            copy.dstMemoryType, copy.dstDevice, copy.dstPitch = kinds.CU_MEMORYTYPE_UNIFIED, device, PAGE
        check(driver.cuMemcpy2DAsync(copy, self._shared.stream), "cuMemcpy2DAsync")

    def settle(self) -> None:
        self._shared.use()
        check(driver.cuEventSynchronize(self._done), "pages on their way")

    def done(self) -> bool:
        (result,) = driver.cuEventQuery(self._done)
        if result == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((result,), "pages on their way")
        return True

    def deliver(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        shared = self._shared
        shared.use()
        with shared.lock:
            shared.before(shared.stream)
            for row, address, count in pieces:
                self._copy(into=address, row=row, count=count)
            check(driver.cuEventRecord(self._done, shared.stream), "cuEventRecord")

    def close(self) -> None:
        """Wait for the frame's copies and free its memory."""
        self._shared.use()
        driver.cuEventSynchronize(self._done)
        driver.cuMemHostUnregister(self._address)
        driver.cuEventDestroy(self._done)
        os.close(self.shared.fd)
        # The memory is freed once nothing refers to `rows` any more.
