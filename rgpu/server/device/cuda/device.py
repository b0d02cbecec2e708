"""The ``cuda`` device: a session's calls on a real GPU, through ``cuda.bindings``.

One context (the device's primary one) for each worker process, the session's
own addresses for its memory (:mod:`.memory`), completion learned from marker
events (:mod:`.streams`). Written thin: the calls of the first issue.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint import pagehash
from rgpu.checkpoint.device import DeviceFacts, Done, Launch, Region
from rgpu.server.device.cuda import modules, pinned
from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.server.device.cuda.hostfunctions import HostFunctions
from rgpu.server.device.cuda.launching import launch_ex
from rgpu.server.device.cuda.memory import Memory
from rgpu.server.device.cuda.streams import Completion, StreamState
from rgpu.session.errors import DeviceError
from rgpu.session.module_table import ModuleTable

CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_INVALID_HANDLE = 400
CUDA_ERROR_NOT_READY = 600
CUDA_ERROR_NOT_SUPPORTED = 801
LEGACY = 0
NON_BLOCKING = 1


class CudaDevice:
    """Implements :class:`rgpu.checkpoint.device.Device` on GPU ``ordinal``."""

    def __init__(self, ordinal: int = 0) -> None:
        pinned.reserve()
        check(driver.cuInit(0), "cuInit")
        self.ordinal = ordinal
        self._device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        self._context = check(driver.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain")
        self._use()
        self.facts = facts(ordinal)
        self.memory = Memory(ordinal)
        self.shadows = pinned.Shadows()
        self._error, self._detail = 0, ""
        self._lock = threading.RLock()
        self.completion = Completion(self._context, self._failed)
        self.completion.streams[LEGACY] = StreamState(driver.CUstream(driver.CU_STREAM_LEGACY))
        self._events: dict[int, Any] = {}
        self._event_streams: dict[int, int] = {}  #: event → the call that recorded it last
        self._restored: dict[int, int | None] = {}
        self._modules: dict[int, modules.Module] = {}
        self._host_functions = HostFunctions(self._context, self.completion.is_complete, self._failed)
        self._pinned: dict[int, list[tuple[Any, int]]] = {}
        self._clock_offset = -time.monotonic_ns()
        self._reference = self._timing_event()
        check(driver.cuEventRecord(self._reference, 0), "cuEventRecord")
        check(driver.cuEventSynchronize(self._reference), "cuEventSynchronize")
        self._reference_time = self.clock()
        self.completion.start()

    def _use(self) -> None:
        """Make the context current in this thread; costs a look at the driver's thread state."""
        check(driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def _failed(self, result: int, detail: str) -> None:
        if not self._error:
            self._error, self._detail = result, detail

    @property
    def error(self) -> int:
        return self._error

    def error_detail(self) -> str:
        return self._detail

    def _run(self, seq: int, stream: int, result: tuple[Any, ...], what: str) -> None:
        """Note ordered work ``seq``; an error of the call itself is raised, a sticky one kept."""
        code = int(result[0])
        if code in STICKY:
            self._failed(code, what)
        elif code:
            raise DeviceError(f"{what}: {driver.CUresult(code).name}", code)
        self.completion.submitted(stream, seq)

    def _stream(self, number: int) -> Any:
        state = self.completion.streams.get(number)
        if state is None:
            raise DeviceError(f"stream {number} does not exist", CUDA_ERROR_INVALID_HANDLE)
        return state.handle

    # -- memory ---------------------------------------------------------------
    def map(self, address: int, size: int) -> None:
        self._use()
        self.memory.map(address, size)

    def unmap(self, address: int, size: int) -> None:
        self._use()
        self.memory.unmap(address, size)

    def allocate(self, address: int, size: int) -> None:
        self.memory.allocate(address, size)

    def free(self, address: int) -> None:
        self.memory.free(address)

    def host_allocate(self, address: int, size: int) -> None:
        self._use()
        self.shadows.allocate(address, size)

    def host_free(self, address: int) -> None:
        self._use()
        self.shadows.free(address)

    def shadow_write(self, seq: int, stream: int, address: int, data: Any) -> None:
        self._use()
        if not self.shadows.contains(address, len(data)):
            raise DeviceError(f"0x{address:x} + {len(data)} is not in one shadow", CUDA_ERROR_INVALID_VALUE)
        self._run(seq, stream, self.shadows.upload(address, data, self._stream(stream)), "write to a shadow")

    def shadow_read(self, seq: int, stream: int, address: int, size: int, done: Done) -> None:
        self._use()
        if not self.shadows.contains(address, size):
            raise DeviceError(f"0x{address:x} + {size} is not in one shadow", CUDA_ERROR_INVALID_VALUE)
        self._stream(stream)

        def reached(result: int) -> None:
            done(result, None if result else self.shadows.read(address, size))

        self.completion.mark(stream, seq, reached)

    def _check_range(self, address: int, pitch: int, width: int, height: int) -> None:
        size = pitch * (height - 1) + width if height else 0
        if size and not (self.memory.contains(address, size) or self.shadows.contains(address, size)
                         or self._in_global(address, size)):
            raise DeviceError(f"0x{address:x} + {size} is not in one allocation", CUDA_ERROR_INVALID_VALUE)

    def _in_global(self, address: int, size: int) -> bool:
        return any(g.address <= address and address + size <= g.address + g.size
                   for module in self._modules.values() for g in module.table.globals)

    # -- objects ----------------------------------------------------------------
    def create_context(self, context: int, flags: int, primary: bool) -> None:
        """Contexts of a session share the worker's one context."""

    def destroy_context(self, context: int) -> None:
        """Its objects are destroyed by their own calls."""

    def set_limit(self, context: int, limit: int, value: int) -> None:
        self._use()
        check(driver.cuCtxSetLimit(driver.CUlimit(limit), value), "cuCtxSetLimit")

    def create_stream(self, stream: int, context: int, flags: int, priority: int) -> None:
        self._use()
        handle = check(driver.cuStreamCreateWithPriority(flags & NON_BLOCKING, priority), "cuStreamCreateWithPriority")
        with self.completion._lock:
            self.completion.streams[stream] = StreamState(handle)

    def destroy_stream(self, stream: int) -> None:
        self._use()
        handle = self._stream(stream)
        check(driver.cuStreamSynchronize(handle), "cuStreamSynchronize")
        self.completion.wait_complete(max(self.completion.streams[stream].pending, default=0), 5)
        with self.completion._lock:
            del self.completion.streams[stream]
        check(driver.cuStreamDestroy(handle), "cuStreamDestroy")

    def _timing_event(self) -> Any:
        return check(driver.cuEventCreate(0), "cuEventCreate")

    def create_event(self, event: int, context: int, flags: int) -> None:
        self._use()
        keep = flags & int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._events[event] = (check(driver.cuEventCreate(keep), "cuEventCreate"), not keep)

    def destroy_event(self, event: int) -> None:
        self._use()
        handle, _ = self._event(event)
        del self._events[event]
        self._restored.pop(event, None)
        check(driver.cuEventDestroy(handle), "cuEventDestroy")

    def _event(self, event: int) -> tuple[Any, bool]:
        if event not in self._events:
            raise DeviceError(f"event {event} does not exist", CUDA_ERROR_INVALID_HANDLE)
        return self._events[event]

    def load(self, module: int, image: bytes, options: bytes, library: bool) -> tuple[ModuleTable, str]:
        self._use()
        loaded, text = modules.load(image, options, library, self.facts.compute_capability)
        self._modules[module] = loaded
        return loaded.table, text

    def unload(self, module: int) -> None:
        self._use()
        if module not in self._modules:
            raise DeviceError(f"module {module} does not exist", CUDA_ERROR_INVALID_HANDLE)
        modules.unload(self._modules.pop(module))

    def link(self, inputs: list[tuple[int, str, bytes]], options: bytes) -> tuple[bytes, str]:
        self._use()
        state = check(driver.cuLinkCreate(0, [], []), "cuLinkCreate")
        try:
            for kind, name, data in inputs:
                number = driver.CUjitInputType(kind)
                check(driver.cuLinkAddData(state, number, data, len(data), name.encode(), 0, [], []),
                      f"cuLinkAddData({name})")
            pointer, size = check(driver.cuLinkComplete(state), "cuLinkComplete")
            return ctypes.string_at(int(pointer), int(size)), ""
        finally:
            driver.cuLinkDestroy(state)

    def function_attributes(self, module: int, function: int) -> tuple[int, ...]:
        self._use()
        handle = self._function(module, function)
        check(driver.cuFuncLoad(handle), "cuFuncLoad")
        return modules.attributes(handle)

    def set_function_attribute(self, module: int, function: int, attribute: int, value: int) -> None:
        self._use()
        number = driver.CUfunction_attribute(attribute)
        check(driver.cuFuncSetAttribute(self._function(module, function), number, value), "cuFuncSetAttribute")

    def _function(self, module: int, function: int) -> Any:
        loaded = self._modules.get(module)
        if loaded is None or function >= len(loaded.functions):
            raise DeviceError(f"module {module} has no function {function}", CUDA_ERROR_INVALID_HANDLE)
        return loaded.functions[function]

    # -- ordered work -------------------------------------------------------------
    def launch(self, seq: int, launch: Launch) -> None:
        self._use()
        function = self._function(launch.module, launch.function)
        if launch.attributes or launch.cooperative:
            self._run(seq, launch.stream, launch_ex(function, launch, self._stream(launch.stream)), "cuLaunchKernelEx")
            return
        data = ctypes.create_string_buffer(launch.parameters, max(1, len(launch.parameters)))
        size = ctypes.c_size_t(len(launch.parameters))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), None)
        self._run(seq, launch.stream, driver.cuLaunchKernel(
            function, *launch.grid, *launch.block, launch.shared, self._stream(launch.stream), 0,
            ctypes.addressof(extra)), "cuLaunchKernel")

    def copy_in(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, data: Any) -> None:
        self._use()
        self._check_range(destination, pitch, width, height)
        source = np.frombuffer(data, np.uint8)
        if height == 1:
            # The source is pageable: the driver has staged it when the call returns.
            result = driver.cuMemcpyHtoDAsync(destination, source.ctypes.data, width, self._stream(stream))
        else:
            result = driver.cuMemcpy2DAsync(_copy2d(width, height, destination=destination, destination_pitch=pitch,
                                                    host_source=source.ctypes.data), self._stream(stream))
        self._run(seq, stream, result, "copy to the device")
        if height > 1:
            check(driver.cuStreamSynchronize(self._stream(stream)), "cuStreamSynchronize")

    def copy_out(self, seq: int, stream: int, source: int, pitch: int, width: int, height: int, done: Done) -> None:
        self._use()
        self._check_range(source, pitch, width, height)
        size = width * height
        pinned, capacity = self._take_pinned(size)
        target = int(pinned)
        if height == 1:
            result = driver.cuMemcpyDtoHAsync(target, source, width, self._stream(stream))
        else:
            result = driver.cuMemcpy2DAsync(_copy2d(width, height, source=source, source_pitch=pitch,
                                                    host_destination=target), self._stream(stream))
        code = int(result[0])
        if code and code not in STICKY:
            raise DeviceError(f"copy from the device: {driver.CUresult(code).name}", code)

        def finished(result: int) -> None:
            data = ctypes.string_at(target, size) if result == 0 else None
            with self._lock:
                self._pinned.setdefault(capacity, []).append((pinned, capacity))
            done(result, data)

        self.completion.mark(stream, seq, finished)

    def _take_pinned(self, size: int) -> tuple[Any, int]:
        capacity = max(1 << 16, 1 << (size - 1).bit_length()) if size else 1 << 16
        with self._lock:
            if self._pinned.get(capacity):
                return self._pinned[capacity].pop()
        return check(driver.cuMemHostAlloc(capacity, 0), "cuMemHostAlloc"), capacity

    def copy(self, seq: int, stream: int, destination: int, destination_pitch: int, source: int, source_pitch: int,
             width: int, height: int) -> None:
        self._use()
        self._check_range(destination, destination_pitch, width, height)
        self._check_range(source, source_pitch, width, height)
        if height == 1:
            result = driver.cuMemcpyDtoDAsync(destination, source, width, self._stream(stream))
        else:
            result = driver.cuMemcpy2DAsync(_copy2d(width, height, source=source, source_pitch=source_pitch,
                                                    destination=destination, destination_pitch=destination_pitch),
                                            self._stream(stream))
        self._run(seq, stream, result, "copy on the device")

    def fill(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, element: int,
             value: int) -> None:
        self._use()
        self._check_range(destination, pitch, width * element, height)
        handle = self._stream(stream)
        name = {1: "D8", 2: "D16", 4: "D32"}[element]
        if height == 1:
            result = getattr(driver, f"cuMemset{name}Async")(destination, value, width, handle)
        else:
            result = getattr(driver, f"cuMemset{name.replace('D', 'D2D')}Async")(
                destination, pitch, value, width, height, handle)
        self._run(seq, stream, result, "memset")

    def record_event(self, seq: int, event: int, stream: int) -> None:
        self._use()
        handle, _ = self._event(event)
        self._run(seq, stream, driver.cuEventRecord(handle, self._stream(stream)), "cuEventRecord")
        self._event_streams[event] = seq
        self._restored.pop(event, None)

    def wait_event(self, seq: int, stream: int, event: int) -> None:
        self._use()
        handle, _ = self._event(event)
        self._run(seq, stream, driver.cuStreamWaitEvent(self._stream(stream), handle, 0), "cuStreamWaitEvent")

    def host_function(self, seq: int, stream: int, reached: Done) -> None:
        if self._error:
            reached(self._error, None)
            return
        self._use()
        handle = self._stream(stream)
        self._run(seq, stream, self._host_functions.enqueue(seq, handle, reached), "cuStreamWaitValue32")

    def host_function_done(self, seq: int) -> None:
        self._host_functions.done(seq)

    def synchronize(self, seq: int, stream: int | None, done: Done) -> None:
        self._use()
        if stream is not None:
            self._stream(stream)
            self.completion.mark(stream, seq, lambda result: done(self._error or result, None))
            return
        numbers = list(self.completion.streams)
        left = [len(numbers)]

        def one(result: int) -> None:
            with self._lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                done(self._error or result, None)

        for number in numbers:
            self.completion.mark(number, seq, one)

    def synchronize_event(self, seq: int, event: int, done: Done) -> None:
        self._event(event)
        recorded = self._event_streams.get(event)
        if recorded is None or self.completion.is_complete(recorded):
            done(self._error, None)
            return

        def wait() -> None:
            self.completion.wait_complete(recorded, None)
            done(self._error, None)

        threading.Thread(target=wait, name="cuda-event-wait", daemon=True).start()

    # -- progress -------------------------------------------------------------------
    def on_progress(self, notify: Callable[[], None]) -> None:
        self.completion.on_progress(notify)

    def progress(self) -> tuple[set[int], dict[int, int]]:
        return self.completion.progress()

    def is_complete(self, seq: int) -> bool:
        return self.completion.is_complete(seq)

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        return self.completion.wait_complete(seq, timeout)

    def drain(self, timeout: float) -> bool:
        return self.completion.wait_idle(timeout)

    # -- state ------------------------------------------------------------------------
    def regions(self) -> list[Region]:
        found = [Region(address, size, "mapped") for address, (size, _) in sorted(self.memory.maps.items())]
        for number, module in sorted(self._modules.items()):
            found.extend(Region(g.address, g.size, "global", number) for g in module.table.globals)
        found.extend(Region(address, size, "pinned") for address, size in sorted(self.shadows.ranges.items()))
        return found

    def pins(self) -> list[str]:
        return sorted({pin for module in list(self._modules.values()) for pin in module.pins})

    def read(self, address: int, size: int) -> bytes:
        if self.shadows.contains(address, size):
            return self.shadows.read(address, size)
        self._use()
        data = np.empty(size, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, size), "cuMemcpyDtoH")
        return data.tobytes()

    def write(self, address: int, data: Any) -> None:
        if self.shadows.contains(address, len(data)):
            self.shadows.write(address, data)
            return
        self._use()
        source = np.frombuffer(data, np.uint8)
        check(driver.cuMemcpyHtoD(address, source.ctypes.data, source.nbytes), "cuMemcpyHtoD")

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray:
        return pagehash.hash_pages(self.read(region.address, region.size), key)

    def _time(self, event: int) -> int:
        """Session-clock ns of the event's last completed record."""
        handle, timing = self._event(event)
        if not timing:
            raise DeviceError(f"event {event} was made without timing", CUDA_ERROR_INVALID_HANDLE)
        restored = self._restored.get(event)
        if restored is not None:
            return restored
        if event not in self._event_streams:
            raise DeviceError(f"event {event} was never recorded", CUDA_ERROR_INVALID_HANDLE)
        milliseconds = check(driver.cuEventElapsedTime(self._reference, handle), "cuEventElapsedTime")
        return self._reference_time + int(milliseconds * 1e6)

    def elapsed(self, start: int, end: int) -> float:
        self._use()
        both_here = start not in self._restored and end not in self._restored
        if both_here and start in self._event_streams and end in self._event_streams:
            return float(check(driver.cuEventElapsedTime(self._event(start)[0], self._event(end)[0]),
                               "cuEventElapsedTime"))
        return (self._time(end) - self._time(start)) / 1e6

    def event_states(self) -> dict[int, int | None]:
        states: dict[int, int | None] = {}
        for event, (_, timing) in self._events.items():
            if event in self._restored or event in self._event_streams:
                states[event] = self._time(event) if timing else 0
            else:
                states[event] = None
        return states

    def restore_event_states(self, states: dict[int, int | None]) -> None:
        self._restored = {event: when for event, when in states.items() if when is not None}

    def clock(self) -> int:
        return time.monotonic_ns() + self._clock_offset

    def set_clock(self, now: int) -> None:
        shift = now - self.clock()
        self._clock_offset += shift
        self._reference_time += shift

    def close(self) -> None:
        self._host_functions.stop()
        self.completion.stop()
        self._use()
        self.shadows.close()
        self.memory.close()
        driver.cuDevicePrimaryCtxRelease(self._device)


def _copy2d(width: int, height: int, *, source: int = 0, source_pitch: int = 0, host_source: int = 0,
            destination: int = 0, destination_pitch: int = 0, host_destination: int = 0) -> Any:
    """A CUDA_MEMCPY2D between pitched device memory and packed host memory."""
    copy = driver.CUDA_MEMCPY2D()
    host, device = driver.CUmemorytype.CU_MEMORYTYPE_HOST, driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    if host_source:
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = host, host_source, width
    else:
        copy.srcMemoryType, copy.srcDevice, copy.srcPitch = device, source, source_pitch
    if host_destination:
        copy.dstMemoryType, copy.dstHost, copy.dstPitch = host, host_destination, width
    else:
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = device, destination, destination_pitch
    copy.WidthInBytes, copy.Height = width, height
    return copy


def facts(ordinal: int) -> DeviceFacts:
    """What the driver says about GPU ``ordinal``; makes no context."""
    check(driver.cuInit(0), "cuInit")
    device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
    attributes = {}
    for attribute in driver.CUdevice_attribute:
        error, value = driver.cuDeviceGetAttribute(attribute, device)
        if int(error) == 0:
            attributes[int(attribute)] = int(value)
    name = check(driver.cuDeviceGetName(128, device), "cuDeviceGetName")
    return DeviceFacts(
        name=name.split(b"\0", 1)[0].decode(),
        uuid=bytes(check(driver.cuDeviceGetUuid(device), "cuDeviceGetUuid").bytes),
        total_memory=int(check(driver.cuDeviceTotalMem(device), "cuDeviceTotalMem")),
        pci=(attributes.get(50, 0), attributes.get(33, 0), attributes.get(34, 0)),
        compute_capability=(attributes.get(75, 0), attributes.get(76, 0)),
        driver_version=int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion")), attributes=attributes)
