"""Memory of the tests' plain device that another one can pull from: each mapping is a memfd."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rgpu.checkpoint.device import Region
from rgpu.checkpoint.peer import Imported
from rgpu.session.errors import DeviceError
from tests.support.worker.pages_device import PlainDevice


class SharingDevice(PlainDevice):
    """``peer`` is the device itself. What tests break: ``no_export``, ``no_import``, ``bad_pulls``."""

    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.peer = self
        self.no_export = self.no_import = ""
        self.bad_pulls = 0  #: so many pulls to come leave wrong bytes behind
        self.failing_pulls = 0
        self.pulls: list[tuple[int, int]] = []  #: (address, bytes)
        self.imports: set[int] = set()  #: descriptors that are held
        self._shared: dict[int, tuple[int, int, int]] = {}  #: address → (size, descriptor, serial)
        self._serial = 0

    def add(self, region: Region, data: Any = None) -> np.ndarray[Any, Any]:
        if region.kind != "mapped":
            return super().add(region, data)
        fd = os.memfd_create("pages")
        os.ftruncate(fd, region.size)
        memory = np.frombuffer(mmap.mmap(fd, region.size), np.uint8)
        if data is not None:
            memory[:] = data
        self._serial += 1
        self._shared[region.address] = (region.size, fd, self._serial)
        self.memory[region.address] = (region, memory)
        return memory

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        os.close(self._shared.pop(address)[1])

    def serial(self, address: int, size: int) -> int | None:
        held, _, serial = self._shared.get(address, (0, 0, 0))
        return serial if held == size else None

    def export(self, address: int, size: int) -> tuple[int, int]:
        serial = self.serial(address, size)
        if self.no_export or serial is None:
            raise DeviceError(self.no_export or "no such mapping", 1)
        return serial, os.dup(self._shared[address][1])

    def admit(self, granted: Sequence[tuple[int, int, int, int]]) -> list[Imported]:
        if self.no_import:
            raise DeviceError(self.no_import, 801)
        found = [Imported(address, size, serial, os.dup(fd)) for address, size, serial, fd in granted]
        self.imports |= {one.place for one in found}
        return found

    def pull(self, copies: Sequence[tuple[Imported, int, int]]) -> None:
        if self.failing_pulls:
            self.failing_pulls -= 1
            raise DeviceError("the copy engine is on fire", 999)
        for source, address, size in copies:
            self.pulls.append((address, size))
            room = self._find(address, size)
            assert os.preadv(source.place, [room.data], address - source.address) == size
            if self.bad_pulls:
                self.bad_pulls -= 1
                room[size // 2] ^= 1

    def dismiss(self, imports: Sequence[Imported]) -> None:
        for one in imports:
            os.close(one.place)
            self.imports.remove(one.place)
