"""Device memory for the copies of a consistent snapshot, allocated before the session is paused.

Allocating it takes some ms for each GiB, which would otherwise lengthen the
pause. The memory can be released at any time, as that of the snapshot itself.
"""

from __future__ import annotations

import threading

from rgpu.checkpoint.device import PAGE, Device
from rgpu.session.errors import DeviceError

BLOCK = 4096  #: pages copied by one call, into memory that is freed as a whole
OUT_OF_MEMORY = 2  #: CUDA_ERROR_OUT_OF_MEMORY


class Room:
    """Blocks of device memory for copies. Thread-safe. ``limit``: bytes that may be allocated, all together."""

    def __init__(self, device: Device, limit: int) -> None:
        self._device = device
        self._left = max(0, limit) // PAGE  #: pages that may still be taken
        self._ready: list[tuple[int, int]] = []  #: place, pages; not used yet
        self._lock = threading.Lock()
        self._over = False

    def prepare(self, pages: int) -> int:
        """Allocate memory for ``pages`` pages, or for as many as fit; returns how many."""
        found = 0
        while found < pages and (block := self._new(pages - found)) is not None:
            with self._lock:
                if not self._over:
                    self._ready.append(block)
                    found += block[1]
                    continue
            self._device.unstage(block[0])
        return found

    def _new(self, pages: int) -> tuple[int, int] | None:
        with self._lock:
            pages = 0 if self._over else min(pages, BLOCK, self._left)
            self._left -= pages
        if not pages:
            return None
        try:
            return self._device.stage(pages * PAGE), pages
        except DeviceError as error:
            with self._lock:
                self._left = 0
            if error.result != OUT_OF_MEMORY:
                raise
            return None  # the free memory was allocated by another thread or process

    def take(self, pages: int) -> tuple[int, int] | None:
        """Hand a block of at most ``pages`` pages over to the caller: (place, pages); None: there is no more memory."""
        with self._lock:
            if self._ready:
                place, size = self._ready.pop(0)
                return place, min(size, pages)
        return self._new(pages)

    def release(self) -> int:
        """Free the blocks that were not taken; :meth:`take` returns None from now on. Returns the bytes freed."""
        with self._lock:
            self._over = True
            blocks, self._ready = self._ready, []
        for place, _ in blocks:
            self._device.unstage(place)
        return sum(pages for _, pages in blocks) * PAGE
