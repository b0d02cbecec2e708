"""A device of plain Python memory: enough of the protocol for cuts, checkpoints and restores."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rgpu.checkpoint.codec.frames import FramePool, host_pool
from rgpu.checkpoint.device import PAGE, DeviceFacts, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.ring import HostRing
from rgpu.session.errors import DeviceError


@dataclass
class FakeDevice:
    """``memory``: (region, bytes) by address."""

    memory: dict[int, tuple[Region, bytearray]] = field(default_factory=dict)
    events: dict[int, int | None] = field(default_factory=dict)
    now: int = 0
    error: int = 0
    drains: bool = True
    room: int = 0  #: bytes that stage() gives, all together
    blocks: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    facts: DeviceFacts = DeviceFacts("fake", bytes(16), 1 << 30, (0, 0, 0), (7, 5), 13000)
    ring: HostRing = field(default_factory=lambda: HostRing(2))
    frame_rows: int = 5

    def __post_init__(self) -> None:
        self.pool = host_pool(self, self.frame_rows, keep=2)  # type: ignore[arg-type]

    def add(self, address: int, size: int, kind: str = "mapped", owner: int = 0, name: str = "",
            data: bytes = b"") -> Region:
        region = Region(address, size, kind, owner, name)
        self.memory[address] = (region, bytearray(data.ljust(size, b"\0")))
        return region

    def drain(self, timeout: float) -> bool:
        return self.drains

    def error_detail(self) -> str:
        return "failed on purpose"

    def regions(self) -> list[Region]:
        return [self.memory[address][0] for address in sorted(self.memory)]

    def _find(self, address: int, size: int) -> tuple[bytearray, int]:
        for region, data in self.memory.values():
            if region.address <= address and address + size <= region.address + region.size:
                return data, address - region.address
        raise AssertionError(f"access outside every region: {address:#x}+{size}")

    def read(self, address: int, size: int) -> bytes:
        data, at = self._find(address, size)
        return bytes(data[at:at + size])

    def write(self, address: int, data: Any) -> None:
        target, at = self._find(address, len(data))
        target[at:at + len(data)] = data

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        for address, size, data in runs:
            assert data is None or len(data) == size
            self.write(address, bytes(size) if data is None else data)

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray:
        if region.address not in self.memory:
            raise DeviceError("no such region", 1)
        return pagehash.hash_pages(bytes(self.memory[region.address][1]), key)

    def spread_arrays(self) -> None:
        """It has none."""

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[pagehash.PageHashes]:
        return [pagehash.examine_pages(self.read(region.address, region.size), key) for region in regions]

    def copy_and_hash(self, pages: Sequence[tuple[int, int]], staging: int, key: bytes) -> pagehash.PageHashes:
        found, at = [], staging
        for address, size in [(int(address), int(size)) for address, size in pages]:
            data = self.read_staged(address, size) if self._block(address, size) else self.read(address, size)
            padded = data.ljust(pagehash.page_count(size) * PAGE, b"\0")
            ctypes.memmove(at, padded, len(padded))
            at += len(padded)
            found.append(pagehash.examine_pages(data, key))
        return pagehash.PageHashes(np.concatenate([one.hashes for one in found]),
                                   np.concatenate([one.zero for one in found]))

    def frames(self) -> FramePool:
        return self.pool

    def page_ring(self) -> HostRing:
        return self.ring

    def free_memory(self) -> int:
        return self.room - sum(block.nbytes for block in self.blocks.values())

    def stage(self, size: int) -> int:
        if size > self.free_memory():
            raise DeviceError("the fake device has no room", 2)
        block = np.zeros(size, np.uint8)
        self.blocks[int(block.ctypes.data)] = block
        return int(block.ctypes.data)

    def unstage(self, address: int) -> None:
        self.blocks.pop(address)[:] = 0xDD  # who still reads it is found out

    def _block(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + block.nbytes
                   for start, block in self.blocks.items())

    def read_staged(self, address: int, size: int) -> bytes:
        assert self._block(address, size), "not staged, or not any more"
        return ctypes.string_at(address, size)

    def event_states(self) -> dict[int, int | None]:
        return dict(self.events)

    def restore_event_states(self, states: dict[int, int | None]) -> None:
        self.events.update(states)

    def clock(self) -> int:
        return self.now

    def set_clock(self, now: int) -> None:
        self.now = now
