"""Device memory for the copies of a cut, taken before the session stands still.

Taking it costs some ms for each GiB, which the pause need not hold. A caller that
needs the memory more may take it away at any time, as from the cut itself.
"""

from __future__ import annotations

import threading

from rgpu.checkpoint.device import PAGE, Device
from rgpu.session.errors import DeviceError

BLOCK = 4096  #: pages copied by one call, into memory that is given back as one
OUT_OF_MEMORY = 2  #: CUDA_ERROR_OUT_OF_MEMORY


class Room:
    """Thread-safe. ``limit``: bytes that may be taken, all together."""

    def __init__(self, device: Device, limit: int) -> None:
        self._device = device
        self._left = max(0, limit) // PAGE  #: pages that may still be taken
        self._ready: list[tuple[int, int]] = []  #: place, pages; not used yet
        self._lock = threading.Lock()
        self._over = False

    def prepare(self, pages: int) -> int:
        """Take room for so many pages, or as many as there is room for; returns how many."""
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
            return None  # somebody else was faster

    def take(self, pages: int) -> tuple[int, int] | None:
        """(place, pages, at most as many as asked for) of a block that is the caller's from here on; None: no more."""
        with self._lock:
            if self._ready:
                place, size = self._ready.pop(0)
                return place, min(size, pages)
        return self._new(pages)

    def release(self) -> int:
        """Give back what nobody took; nothing more is given. Returns the bytes."""
        with self._lock:
            self._over = True
            blocks, self._ready = self._ready, []
        for place, _ in blocks:
            self._device.unstage(place)
        return sum(pages for _, pages in blocks) * PAGE
