"""The bytes of a session's state on its GPUs: their regions, and reading, writing and hashing them.

A region is in the mappings of a GPU, in a variable of a module, or in a mirror of pinned memory, which is host memory.
Each GPU's own memory is read and written through its own context: no other reaches the variables of its modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint.device import Region
from rgpu.checkpoint.pages.pagehash import PageHashes
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.gpus import Gpus
from rgpu.server.device.cuda.memory.inplace import InPlace
from rgpu.server.device.cuda.memory.pagehash import Hasher, hash_regions
from rgpu.server.device.cuda.memory.pinned import Mirrors
from rgpu.server.device.cuda.memory.ring import CudaRing
from rgpu.server.device.cuda.work.loaded import LoadedModules


class StateBytes:
    """Access to the state; exact while the device is drained. Every method raises :class:`DeviceError`."""

    def __init__(self, gpus: Gpus, mirrors: Mirrors, modules: LoadedModules, hasher: Hasher) -> None:
        self._gpus, self._mirrors, self._modules, self._hasher = gpus, mirrors, modules, hasher
        self.in_place = InPlace(self._gone)  #: for callers that unmap some of the memory

    def regions(self) -> list[Region]:
        """Return the regions whose bytes belong to the state."""
        found = [Region(address, size, "mapped") for gpu in self._gpus
                 for address, (size, _) in sorted(gpu.memory.maps.items())]
        found.extend(Region(variable.address, variable.size, "global", number, variable.name)
                     for number, variable in self._modules.variables())
        found.extend(Region(address, size, "pinned") for address, size in sorted(self._mirrors.ranges.items()))
        return found

    def _gone(self, regions: Sequence[Region]) -> Region | None:
        inside = [gpu.memory.inside() for gpu in self._gpus]
        for region in regions:
            if region.kind == "mapped":
                there = any(mapped(region.address, region.size) for mapped in inside)
            elif region.kind == "global":
                there = not region.owner or region.owner in self._modules
            else:
                there = self._mirrors.contains(region.address, region.size)
            if not there:
                return region
        return None

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes of a region, or of a part of one."""
        if self._mirrors.contains(address, size):
            return self._mirrors.read(address, size)
        self._gpus.at(address)
        data = np.empty(size, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, size), "cuMemcpyDtoH")
        return data.tobytes()

    def write(self, address: int, data: Any) -> None:
        """Set the bytes of a region, or of a part of one."""
        if self._mirrors.contains(address, len(data)):
            self._mirrors.write(address, data)
            return
        self._gpus.at(address)
        source = np.frombuffer(data, np.uint8)
        check(driver.cuMemcpyHtoD(address, source.ctypes.data, source.nbytes), "cuMemcpyHtoD")
        self._hasher.wrote()

    def write_runs(self, runs: Sequence[tuple[int, int, Any]], ring: CudaRing) -> None:
        """Set many ranges, (address, bytes, data or None for zeros); a GPU's go through the staging ring at once."""
        on_device = []
        for address, size, data in runs:
            if self._mirrors.contains(address, size):
                self._mirrors.write(address, bytes(size) if data is None else data)
            elif data is None and len(self._gpus) > 1:
                self._clear(address, size)
            else:
                on_device.append((address, size, data))
        if on_device:
            ring.write(on_device, self._gpus.fence)

    def _clear(self, address: int, size: int) -> None:
        """Zero a range by the GPU whose memory it is: no other can set the variables of its modules."""
        self._gpus.at(address)
        check(driver.cuMemsetD8(address, 0, size), "cuMemsetD8")
        check(driver.cuStreamSynchronize(driver.CUstream(driver.CU_STREAM_LEGACY)), "cuStreamSynchronize")
        self._hasher.wrote()

    def hash(self, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
        """Hash the pages of regions, which stay mapped meanwhile."""
        with self.in_place.reading(regions):
            return hash_regions(self._hasher, self._mirrors, regions, key)
