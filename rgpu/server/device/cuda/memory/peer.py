"""A GPU's memory for another worker of the same host: exported handles, mapped there, pulled by its copy engines.

Source: CUDA driver API, "Virtual Memory Management" (cuMemExportToShareableHandle,
cuMemImportFromShareableHandle, cuMemSetAccess). The physical allocation behind a
mapping of the session's is exported; the importer maps it at addresses of
its own, behind the staging range, and gives its own device access. If that is
another GPU, it needs peer access to the first (NVLink, or PCIe where the two can
reach each other): otherwise the driver refuses the access, and the move uses
the connection. An imported allocation lives until the importer has unmapped it,
so a source may unmap at any time.

Copies run on one non-blocking stream of the importer's; the exporter's context,
its streams and its kernels have no part in them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog
from cuda.bindings import driver

from rgpu.checkpoint.peer import Imported
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.allocations import Memory
from rgpu.server.device.cuda.memory.staging import BASE as STAGING_BASE
from rgpu.server.device.cuda.memory.staging import SPAN, first_gap
from rgpu.server.device.cuda.memory.zeroing import Zeroing
from rgpu.session.addresses import GRANULE
from rgpu.session.errors import DeviceError

log = structlog.get_logger(__name__)

BASE = STAGING_BASE + SPAN  #: requested; the driver may choose another place
POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
INVALID_VALUE, NOT_SUPPORTED = 1, 801


class CudaPeer:
    """Implements :class:`rgpu.checkpoint.peer.PeerMemory`."""

    kind = "cuda"

    def __init__(self, use: Callable[[], None], ordinal: int, memory: Memory, zeroing: Zeroing) -> None:
        """Reserve the range for imports. ``use`` makes the device's context current, as it is now."""
        self._use = use
        self._memory = memory
        self._zeroing = zeroing
        self._lock = threading.Lock()
        # Like all memory that the driver places: in every worker, before any object of the session (SEMANTICS 12).
        reserved = driver.cuMemAddressReserve(SPAN, GRANULE, BASE, 0)
        self._base = 0 if int(reserved[0]) else int(reserved[1])
        self._blocks: dict[int, Imported] = {}  #: by the address where it is mapped
        self._readable = driver.CUmemAccessDesc()
        self._readable.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._readable.location.id = ordinal
        self._readable.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._stream = check(driver.cuStreamCreate(1), "cuStreamCreate")  # non-blocking

    # -- the source's part -------------------------------------------------------------
    def serial(self, address: int, size: int) -> int | None:
        return self._memory.serial(address, size)

    def export(self, address: int, size: int) -> tuple[int, int]:
        self._use()
        return self._memory.export(address, size)

    # -- the destination's part ----------------------------------------------------------
    def admit(self, granted: Sequence[tuple[int, int, int, int]]) -> list[Imported]:
        self._use()
        for address, size, _, _ in granted:
            if size <= 0 or size % GRANULE:
                raise DeviceError(f"memory of {size} bytes at 0x{address:x} is not made of granules", INVALID_VALUE)
        began = time.monotonic()
        with self._lock:
            if not self._base:
                raise DeviceError("the driver gave no addresses for memory of another worker", NOT_SUPPORTED)
            total = sum(size for _, size, _, _ in granted)
            start = first_gap(self._base, SPAN, {place: one.size for place, one in self._blocks.items()}, total)
            taken: list[Imported] = []
            try:
                at = start
                for address, size, serial, fd in granted:
                    self._map(at, size, fd)
                    self._blocks[at] = Imported(address, size, serial, at)
                    taken.append(self._blocks[at])
                    at += size
                self._allow(start, total)
            except DeviceError:
                self._unmap(taken)
                raise
        log.info("memory of another worker taken in", regions=len(granted), mib=total >> 20,
                 ms=round((time.monotonic() - began) * 1000, 3))
        return taken

    def _map(self, place: int, size: int, fd: int) -> None:
        """Map an imported handle and release it at once: the mapping keeps the memory."""
        handle = check(driver.cuMemImportFromShareableHandle(fd, POSIX), "cuMemImportFromShareableHandle")
        try:
            check(driver.cuMemMap(place, size, 0, handle, 0), "cuMemMap of imported memory")
        finally:
            driver.cuMemRelease(handle)

    def _allow(self, place: int, size: int) -> None:
        """Let this device read; where the driver does not support read-only access, read and write."""
        result = driver.cuMemSetAccess(place, size, [self._readable], 1)
        flags = driver.CUmemAccess_flags
        if int(result[0]) and self._readable.flags == flags.CU_MEM_ACCESS_FLAGS_PROT_READ:
            log.info("imported memory cannot be mapped for reading alone", result=int(result[0]))
            self._readable.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            result = driver.cuMemSetAccess(place, size, [self._readable], 1)
        check(result, "cuMemSetAccess to another worker's memory")

    def pull(self, copies: Sequence[tuple[Imported, int, int]]) -> None:
        self._use()
        self._zeroing.settle()  # memory just mapped is still being set to zero
        stream = self._stream
        for source, address, size in copies:
            check(driver.cuMemcpyDtoDAsync(address, source.place + (address - source.address), size, stream),
                  "pulling pages")
        check(driver.cuStreamSynchronize(stream), "pulling pages")

    def dismiss(self, imports: Sequence[Imported]) -> None:
        self._use()
        with self._lock:
            self._unmap(imports)

    def _unmap(self, imports: Sequence[Imported]) -> None:
        for one in imports:
            if self._blocks.get(one.place) is one:
                check(driver.cuMemUnmap(one.place, one.size), "cuMemUnmap of imported memory")
                del self._blocks[one.place]

    def close(self) -> None:
        """Free everything; nothing where a fault has destroyed the context."""
        self._use()
        with self._lock:
            for one in list(self._blocks.values()):
                with suppress(DeviceError):
                    self._unmap([one])
            self._blocks.clear()
            if self._base:
                driver.cuMemAddressFree(self._base, SPAN)
                self._base = 0
        driver.cuStreamDestroy(self._stream)
