"""The staging ring of a page stream: frames of host memory that pages pass through, each used again and again.

A frame has room for FRAME_PAGES pages in one run, with HEADROOM in front: what
goes out ahead of the pages is written there, right-aligned, so that message and
pages are sealed where they lie and no byte is gathered. ``copy_and_hash`` of a
device copies to :meth:`PageRing.staging`; :meth:`PageRing.fetch` gives the
frame once the pages are in it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from rgpu.session.addresses import PAGE

FRAME_PAGES = 32  #: 2 MiB: long enough for the cost of a call to vanish, short enough for a processor's cache
HEADROOM = 4096
FRAME = HEADROOM + FRAME_PAGES * PAGE  #: bytes of a frame
SLOTS = 16  #: frames of a ring: 32 MiB


class PageRing(Protocol):
    """See the module docstring. Each slot is used by one thread at a time."""

    slots: int

    def staging(self, slot: int) -> int:
        """Address for ``copy_and_hash``: room for FRAME_PAGES pages, a multiple of 16."""

    def fetch(self, slot: int, pages: int) -> None:
        """Return when the first ``pages`` pages of the staging memory are in the frame. Raises DeviceError."""

    def frame(self, slot: int) -> memoryview:
        """The frame's FRAME bytes: headroom, then pages."""


class HostRing:
    """Ring of a device whose staging memory is the frame itself. ``address``: of memory that outlives the ring."""

    def __init__(self, slots: int = SLOTS, address: int = 0) -> None:
        self.slots = slots
        self._owned: Any = None
        if not address:
            self._owned = np.empty(slots * FRAME + PAGE, np.uint8)  # touched when first used
            address = -(-self._owned.ctypes.data // 4096) * 4096
        self._address = address

    def staging(self, slot: int) -> int:
        """Return the address of slot ``slot`` at which pages are staged."""
        return self._address + slot * FRAME + HEADROOM

    def fetch(self, slot: int, pages: int) -> None:
        """The pages are there already."""

    def frame(self, slot: int) -> memoryview:
        """Return slot ``slot`` as writable memory, its headroom included."""
        memory = (ctypes.c_ubyte * FRAME).from_address(self._address + slot * FRAME)
        memory.ring = self  # type: ignore[attr-defined]  # what a view is of must not go before it
        return memoryview(memory).cast("B")
