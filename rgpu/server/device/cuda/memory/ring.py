"""The staging ring of the ``cuda`` device: page frames in pinned host memory, staging on the GPU, one copy stream.

Pages are copied to staging by the kernel that hashes them (:mod:`.pagehash`),
from there to the frame by the copy engine; frames that arrived are copied to their
pages by the copy engine too. The stream has the lowest priority and is
non-blocking: the session's work does not wait for it. All memory is taken in
the constructor, before any object of the session exists (SEMANTICS 12), and
pinned once: pinning costs more than the copies.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages.ring import FRAME, FRAME_PAGES, HEADROOM, SLOTS, HostRing
from rgpu.server.device.cuda.errors import check


class CudaRing(HostRing):
    """A ring of slots. Thread-safe for threads that use different slots. Every method raises :class:`DeviceError`."""

    def __init__(self, context: Any, slots: int = SLOTS) -> None:
        self._context = context
        self._use()
        self._host = int(check(driver.cuMemHostAlloc(slots * FRAME, 0), "cuMemHostAlloc"))
        self.staging_bytes = slots * FRAME_PAGES * PAGE  #: of all slots, one behind the other
        self._device = int(check(driver.cuMemAlloc(self.staging_bytes), "cuMemAlloc"))
        least, _ = check(driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
        self.stream = check(driver.cuStreamCreateWithPriority(1, int(least)), "cuStreamCreateWithPriority")
        flags = driver.CUevent_flags
        wanted = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        self._done = [check(driver.cuEventCreate(wanted), "cuEventCreate") for _ in range(slots)]
        self._lock = threading.Lock()
        self._free = list(self._done)
        super().__init__(slots, self._host)

    def _use(self) -> None:
        check(driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def staging(self, slot: int) -> int:
        return self._device + slot * FRAME_PAGES * PAGE

    def fetch(self, slot: int, pages: int) -> None:
        self._use()
        place = self._host + slot * FRAME + HEADROOM
        self._run(lambda: [driver.cuMemcpyDtoHAsync(place, self.staging(slot), pages * PAGE, self.stream)], "fetch")

    def write(self, runs: Sequence[tuple[int, int, Any]], before: Callable[[Any], None]) -> None:
        """Write (address, bytes, data or None) to device memory; ``before(stream)`` makes it wait for earlier work."""
        self._use()

        def give() -> list[Any]:
            before(self.stream)
            return [driver.cuMemsetD8Async(address, 0, size, self.stream) if data is None else
                    driver.cuMemcpyHtoDAsync(address, np.frombuffer(data, np.uint8).ctypes.data, size, self.stream)
                    for address, size, data in runs]

        self._run(give, "write")

    def _run(self, give: Callable[[], list[Any]], what: str) -> None:
        """Submit work to the stream and return when it is done, without delaying another thread's."""
        with self._lock:
            event = self._free.pop() if self._free else None
            results = give()
            if event is not None:
                check(driver.cuEventRecord(event, self.stream), "cuEventRecord")
        try:
            check(driver.cuStreamSynchronize(self.stream) if event is None else driver.cuEventSynchronize(event), what)
            for result in results:
                check(result, f"page stream: {what}")
        finally:
            if event is not None:
                with self._lock:
                    self._free.append(event)

    def frame(self, slot: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * FRAME).from_address(self._host + slot * FRAME)).cast("B")

    def close(self) -> None:
        """Free everything; nothing where a fault has destroyed the context."""
        self._use()
        driver.cuStreamSynchronize(self.stream)
        for event in self._done:
            driver.cuEventDestroy(event)
        driver.cuStreamDestroy(self.stream)
        driver.cuMemFree(self._device)
        driver.cuMemFreeHost(self._host)
