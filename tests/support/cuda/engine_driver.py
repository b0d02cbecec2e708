"""As much of ``cuda.bindings.driver`` as our kernels' callers use, on the PTX engine instead of a GPU.

Device memory is this process's memory, pointers are its addresses, and every
kernel runs the committed PTX at its launch. Streams are real enough to catch
what matters: work given to a stream is done only when something waits for it
(or a later wait of another stream on its event), so results that are fetched
too early are seen missing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from rgpu.server.device.cpu.ptx import MemoryRanges, parse_module

OK = (0,)
CU_STREAM_LEGACY = 1


@dataclass
class Stream:
    """Work not yet done, in order."""

    work: list[Callable[[], None]] = field(default_factory=list)
    flags: int = 0
    priority: int = 0

    def finish(self) -> None:
        while self.work:
            self.work.pop(0)()


@dataclass
class Event:
    finish: Callable[[], None] = lambda: None


class EngineDriver:
    """Stands for the module ``cuda.bindings.driver``, one that knows no cubins."""

    CU_STREAM_LEGACY = CU_STREAM_LEGACY
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)

    def __init__(self) -> None:
        self.log: list[str] = []  #: loads and launches
        self.buffers: dict[int, np.ndarray] = {}
        self.streams: list[Stream] = []
        self.legacy = Stream()
        self.capturing = False
        self.fail_launch = 0
        self.fail_register = 0
        self.registered: dict[int, int] = {}  #: pinned memory of ours

    @staticmethod
    def CUresult(value: int) -> Any:
        return SimpleNamespace(name=f"CUDA_ERROR_{value}")

    def CUstream(self, number: int) -> Stream:
        assert number == CU_STREAM_LEGACY
        return self.legacy

    # -- memory
    def give(self, array: np.ndarray) -> int:
        """Make an array device memory; its address."""
        self.buffers[array.ctypes.data] = array
        return array.ctypes.data

    def allocate(self, size: int, align: int = 256) -> int:
        array = np.full(size + align, 0xA5, np.uint8)
        at = -array.ctypes.data % align
        self.buffers[array.ctypes.data + at] = array[at:at + size]
        return array.ctypes.data + at

    def cuMemAlloc(self, size: int) -> Any:
        return 0, self.allocate(size)

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:
        return 0, self.allocate(size, 4096)

    def cuMemFree(self, address: int) -> Any:
        del self.buffers[address]
        return OK

    cuMemFreeHost = cuMemFree

    def _copy(self, to: int, source: int, size: int, stream: Stream) -> Any:
        stream.work.append(lambda: ctypes.memmove(to, source, size) and None)
        return OK

    def cuMemcpyHtoDAsync(self, to: int, source: Any, size: int, stream: Stream) -> Any:
        if isinstance(source, bytes):  # pageable: it has left the buffer when the call returns
            kept = source[:size]
            stream.work.append(lambda: ctypes.memmove(to, kept, size) and None)
            return OK
        return self._copy(to, source, size, stream)

    def cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: Stream) -> Any:
        return self._copy(to, source, size, stream)

    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_UNIFIED=4)
    CUDA_MEMCPY2D = SimpleNamespace

    def cuMemcpy2DAsync(self, copy: Any, stream: Stream) -> Any:
        out = copy.dstMemoryType == 1
        assert (copy.srcMemoryType, copy.dstMemoryType) == ((4, 1) if out else (1, 4))
        source, to = (copy.srcDevice, copy.dstHost) if out else (copy.srcHost, copy.dstDevice)
        device, pitch = (source, copy.srcPitch) if out else (to, copy.dstPitch)
        whole = [at for at, array in self.buffers.items() if at <= device
                 and device + pitch * (copy.Height - 1) + copy.WidthInBytes <= at + array.nbytes]
        assert whole, "a copy of two dimensions outside one range of memory"
        self.log.append(f"copy {'out' if out else 'in'} {copy.Height}")

        def run() -> None:
            for row in range(copy.Height):
                ctypes.memmove(to + row * copy.dstPitch, source + row * copy.srcPitch, copy.WidthInBytes)

        stream.work.append(run)
        return OK

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> Any:
        if self.fail_register:
            return (self.fail_register,)
        assert address % 4096 == 0 and size % 4096 == 0
        self.registered[address] = size
        return OK

    def cuMemHostUnregister(self, address: int) -> Any:
        del self.registered[address]
        return OK

    # -- modules
    def cuCtxSetCurrent(self, context: Any) -> Any:
        return OK

    def cuModuleLoadData(self, image: bytes) -> Any:
        if image.startswith(b"\x7fELF"):
            self.log.append("cubin refused")
            return (209,)
        self.log.append("PTX loaded")
        return 0, parse_module(image.rstrip(b"\0").decode(), max_target=75).link({})

    def cuModuleUnload(self, module: Any) -> Any:
        return OK

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        return 0, (module, name.decode())

    def cuFuncLoad(self, function: Any) -> Any:
        return OK

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, threads: int, shared: int) -> Any:
        return 0, 3

    def cuLaunchKernel(self, function: Any, x: int, y: int, z: int, bx: int, by: int, bz: int, shared: int,
                       stream: Stream, parameters: Any, extra: int) -> Any:
        if self.fail_launch:
            return (self.fail_launch,)
        pointers = (ctypes.c_void_p * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(pointers[3] or 0).value
        data = ctypes.string_at(pointers[1] or 0, size)
        module, name = function
        per_warp = f" per_warp {struct.unpack_from('<QIII', data)[3]}" if "hash" in name else ""
        self.log.append(f"{name} blocks {x}{per_warp}")

        def run() -> None:
            ranges = MemoryRanges([(at, at + array.nbytes) for at, array in self.buffers.items()])
            result = module.launch(name, (x, y, z), (bx, by, bz), shared, data, ranges, threads=2)
            assert not result.error, result.detail

        stream.work.append(run)
        return OK

    # -- streams and events
    def cuCtxGetStreamPriorityRange(self) -> Any:
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        self.streams.append(Stream(flags=flags, priority=priority))
        return 0, self.streams[-1]

    def cuStreamSynchronize(self, stream: Stream) -> Any:
        stream.finish()
        return OK

    def cuStreamDestroy(self, stream: Stream) -> Any:
        return OK

    def cuStreamIsCapturing(self, stream: Stream) -> Any:
        return (906, None) if self.capturing else (0, 0)

    def cuStreamWaitEvent(self, stream: Stream, event: Event, flags: int) -> Any:
        stream.work.append(event.finish)
        return OK

    def cuEventCreate(self, flags: int) -> Any:
        return 0, Event()

    def cuEventRecord(self, event: Event, stream: Stream) -> Any:
        def marker() -> None:
            """Where the event stands in the stream."""

        stream.work.append(marker)

        def finish() -> None:
            while marker in stream.work:
                stream.work.pop(0)()

        event.finish = finish
        return OK

    def cuEventSynchronize(self, event: Event) -> Any:
        event.finish()
        return OK

    def cuEventDestroy(self, event: Event) -> Any:
        return OK
