"""The staging ring of a page stream: reusable frames of host memory that pages pass through.

A frame holds FRAME_PAGES pages in one run, with HEADROOM in front: the message
that precedes the pages is written there, right-aligned, so that message and
pages are sealed in place and need no gathering copy. ``copy_and_hash`` of a
device copies to :meth:`PageRing.staging`; :meth:`PageRing.fetch` returns once
the pages are in the frame.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from rgpu.session.addresses import PAGE

FRAME_PAGES = 32  #: 2 MiB: long enough to make the cost of a call negligible, short enough for a processor's cache
HEADROOM = 4096
FRAME = HEADROOM + FRAME_PAGES * PAGE  #: bytes of a frame
SLOTS = 16  #: frames of a ring: 32 MiB


class PageRing(Protocol):
    """See the module docstring. Each slot is used by one thread at a time."""

    slots: int

    def staging(self, slot: int) -> int:
        """Return the address for ``copy_and_hash``, a multiple of 16, with space for FRAME_PAGES pages."""

    def fetch(self, slot: int, pages: int) -> None:
        """Return when the first ``pages`` pages of the staging memory are in the frame. Raises DeviceError."""

    def frame(self, slot: int) -> memoryview:
        """Return the frame's FRAME bytes: headroom, then pages."""


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
        """Return at once: the pages are in the frame already."""

    def frame(self, slot: int) -> memoryview:
        """Return slot ``slot`` as writable memory, its headroom included."""
        memory = (ctypes.c_ubyte * FRAME).from_address(self._address + slot * FRAME)
        memory.ring = self  # type: ignore[attr-defined]  # the ring must outlive its views
        return memoryview(memory).cast("B")
