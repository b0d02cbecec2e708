"""A device of plain memory, with what a page stream asks for: two of them fit into one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.ring import HostRing
from rgpu.server.device.cpu import addressspace
from rgpu.session.errors import DeviceError


class PlainDevice:
    """Regions by address. ``gate``: writes wait for it."""

    def __init__(self) -> None:
        self.memory: dict[int, tuple[Region, np.ndarray[Any, Any]]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.writes = 0
        self._ring = HostRing(8)

    def map(self, address: int, size: int) -> None:
        self.add(Region(address, size, "mapped"))

    def unmap(self, address: int, size: int) -> None:
        del self.memory[address]

    def add(self, region: Region, data: Any = None) -> np.ndarray[Any, Any]:
        memory = np.zeros(region.size, np.uint8)
        if data is not None:
            memory[:] = data
        self.memory[region.address] = (region, memory)
        return memory

    def placed(self) -> None:
        """No module was placed."""

    def _find(self, address: int, size: int) -> np.ndarray[Any, Any]:
        for region, data in self.memory.values():
            if region.address <= address and address + size <= region.address + region.size:
                return data[address - region.address:address - region.address + size]
        raise DeviceError(f"{address:#x}+{size} is in no region", 1)

    def regions(self) -> list[Region]:
        return [self.memory[address][0] for address in sorted(self.memory)]

    def read(self, address: int, size: int) -> bytes:
        return self._find(address, size).tobytes()

    def spread_arrays(self) -> None:
        """It has none."""

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[pagehash.PageHashes]:
        return [pagehash.examine_pages(self._find(region.address, region.size), key) for region in regions]

    def copy_and_hash(self, pages: Sequence[tuple[int, int]], staging: int, key: bytes) -> pagehash.PageHashes:
        sizes = [PAGE * pagehash.page_count(size) for _, size in pages]
        place, at = addressspace.view(staging, sum(sizes)), 0
        for (address, size), whole in zip(pages, sizes, strict=True):
            place[at:at + size] = self._find(address, size)
            at += whole
        return pagehash.examine_pages(place, key)

    def page_ring(self) -> HostRing:
        return self._ring

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        assert self.gate.wait(20)
        for address, size, data in runs:
            self._find(address, size)[:] = 0 if data is None else np.frombuffer(data, np.uint8)
            self.writes += 1
