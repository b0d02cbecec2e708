"""Copies of pages of the ``cpu`` device outside the session's state: made, hashed as they are made, and read."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages import pagehash
from rgpu.server.device.cpu import addressspace
from rgpu.server.device.cpu.memory import Memory
from rgpu.session.errors import DeviceError

OUT_OF_MEMORY = 2


class StagedPages:
    """Blocks of the host's memory by their addresses. Thread-safe."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._lock = threading.Lock()

    def stage(self, size: int) -> int:
        """Allocate ``size`` bytes and return their address. Raises :class:`DeviceError` (2) where the host has none."""
        try:
            block = np.zeros(size, np.uint8)
        except MemoryError as error:
            raise DeviceError(f"the host has no {size} bytes for copies of pages", OUT_OF_MEMORY) from error
        with self._lock:
            self._blocks[int(block.ctypes.data)] = block
        return int(block.ctypes.data)

    def unstage(self, address: int) -> None:
        """Free the block at ``address``."""
        with self._lock:
            del self._blocks[address]

    def readable(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """Return bytes of the session's state, or of a staged copy of it. Raises :class:`DeviceError`."""
        with self._lock:
            for start, block in self._blocks.items():
                if start <= address and address + size <= start + block.nbytes:
                    return block[address - start:address - start + size]
        return self._memory.state_view(address, size)

    def copy_and_hash(self, pages: pagehash.Ranges, staging: int, key: bytes) -> pagehash.PageHashes:
        """See :meth:`rgpu.checkpoint.device.Device.copy_and_hash`."""
        if not len(pages):
            return pagehash.PageHashes(np.empty((0, 2), np.uint64), np.empty(0, np.bool_))
        found = []
        at = 0
        pages = [(int(address), int(size)) for address, size in pages]
        while at < len(pages):  # neighbours are copied together: a call costs more than a page
            address, size = pages[at]
            at += 1
            while at < len(pages) and pages[at][0] == address + size and not size % PAGE:
                size += pages[at][1]
                at += 1
            whole = PAGE * pagehash.page_count(size)
            place = addressspace.view(staging, whole)
            place[:size] = self.readable(address, size)
            place[size:] = 0
            found.append(pagehash.examine_pages(place[:size], key))
            staging += whole
        return pagehash.PageHashes(np.concatenate([one.hashes for one in found]),
                                   np.concatenate([one.zero for one in found]))
