"""Runs a compiled kernel over a grid, on a few operating-system threads."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from rgpu.server.device.cpu.ptx import jit, printf
from rgpu.server.device.cpu.ptx import layout as at
from rgpu.server.device.cpu.ptx.calls import heap
from rgpu.server.device.cpu.ptx.codegen import KernelCode
from rgpu.server.device.cpu.ptx.schedule_ir import WORKER

Dim = tuple[int, int, int]

_CANCELLED, _DEADLOCK = 1, 2  # values of the stop word; 3 is a trap
_POLL_SECONDS = 0.002
_QUIET_POLLS = 25
_grid_ids = itertools.count(1)


class MemoryRanges:
    """The device memory that a kernel may touch: ``[base, end)`` pairs, fixed once made."""

    def __init__(self, ranges: Sequence[tuple[int, int]]):
        merged: list[list[int]] = []
        for base, end in sorted((b, e) for b, e in ranges if e > b):
            merged.append([base, end])
        self.table = np.array(merged, dtype=np.uint64).reshape(-1, 2)
        self.table.flags.writeable = False

    def room(self, address: int) -> int:
        """Return how many bytes from ``address`` on are valid."""
        i = int(np.searchsorted(self.table[:, 0], np.uint64(address), side="right")) - 1
        return max(0, int(self.table[i, 1]) - address) if i >= 0 else 0

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True)
class LaunchResult:
    """The outcome of a launch: 0, or the CUDA error and its address."""

    error: int
    address: int
    detail: str


class _Buffer:
    """Zeroed memory at an aligned address."""

    def __init__(self, size: int, align: int = 128):
        self._data = np.zeros(size + align + 64, dtype=np.uint8)
        self.address = -(-self._data.ctypes.data // align) * align


_WorkerType = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PrintType = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64)
_HeapType = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32)
_printers: dict[int, Callable[[int, int], None]] = {}


@_PrintType
def _print_callback(token: int, fmt: int, args: int) -> None:
    printer = _printers.get(token)
    if printer is not None:
        printer(fmt, args)


@_PrintType
def _condition_callback(token: int, handle: int, value: int) -> None:
    launch = _setters.get(token)
    if launch is not None:
        launch.set_condition(handle, value)


@_HeapType
def _heap_callback(token: int, memory: int, value: int, gives: int) -> int:
    launch = _setters.get(token)
    return 0 if launch is None else launch.use_heap(memory, value, bool(gives))


_setters: dict[int, Launch] = {}
_cooperating = threading.Lock()  # held by a launch that needs a thread for each of its blocks
_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    """Return the pool of threads, kept between launches; it has as many as are ever busy at once."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=512, thread_name_prefix="ptx")
        return _pool


@functools.cache
def _worker() -> Callable[[int], None]:
    """Return the function that a thread runs: blocks of the grid, one after the other, until none is left."""
    return _WorkerType(jit.address_of(WORKER))


class Overseer:
    """Checks the running launches every few milliseconds, in a thread that sleeps while there are none."""

    def __init__(self) -> None:
        self._running: dict[int, Launch] = {}
        self._started = threading.Lock()
        self._resting = threading.Event()  # the thread sleeps: a new launch must set ``_wake``
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, launch: Launch) -> None:
        """Watch a running launch, so that a long one gets more threads and a cancelled one stops."""
        self._running[launch.token] = launch
        if self._thread is None:
            with self._started:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ptx-overseer", daemon=True)
                    self._thread.start()
        if self._resting.is_set():
            self._wake.set()

    def forget(self, launch: Launch) -> None:
        """Stop watching a launch that ended."""
        self._running.pop(launch.token, None)

    def _run(self) -> None:
        quiet = 0
        while True:
            time.sleep(_POLL_SECONDS)
            for launch in list(self._running.values()):
                launch.oversee()
            quiet = 0 if self._running else quiet + 1
            if quiet > _QUIET_POLLS:
                self._wake.clear()
                self._resting.set()
                if not self._running:  # one added before ``_resting`` was set did not set ``_wake``
                    self._wake.wait()
                self._resting.clear()
                quiet = 0


overseer = Overseer()


class Launch:
    """One launch's memory, from start to result."""

    def __init__(
        self,
        code: KernelCode,
        entry_point: int,
        globals_table: np.ndarray,
        grid: Dim,
        block: Dim,
        dynamic_shared: int,
        params: bytes,
        ranges: MemoryRanges,
        cooperative: bool = False,
        textures: np.ndarray | None = None,
        conditions: dict[int, int] | None = None,
    ):
        self.conditions = conditions if conditions is not None else {}
        self.code, self.grid, self.block = code, grid, block
        self.ranges, self.cooperative = ranges, cooperative
        self.blocks = grid[0] * grid[1] * grid[2]
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // at.LANES)
        self.dynamic_shared = dynamic_shared
        self.entry_point = entry_point
        self.globals_table = globals_table
        self.textures = np.zeros(1, np.uint64) if textures is None else textures
        self.record = np.zeros(at.LAUNCH_WORDS, dtype=np.int64)
        self.params = _Buffer(max(len(params), code.param_bytes))
        ctypes.memmove(self.params.address, params, len(params))
        self.param_end = self.params.address + max(len(params), code.param_bytes)
        self.token = next(_grid_ids)
        self._keep: list[object] = []
        self._wanted = 1
        self._cancel: threading.Event | None = None
        self._lock = threading.Lock()  # of the following
        self._others: list[Future[None]] = []
        self._seen = self._ended = False

    def _thread_record(self, number: int) -> np.ndarray:
        code = self.code
        static = code.dynamic_shared if self.dynamic_shared else code.static_shared
        shared_bytes = static + self.dynamic_shared
        shared = _Buffer(shared_bytes, 1024)
        stride = code.local_bytes
        local = _Buffer(stride * at.LANES * self.warps, 1024)
        frames = _Buffer(code.frame_bytes * self.warps)
        self._thread_indices(frames)
        cache = np.zeros(2 * max(code.sites, 1), dtype=np.uint64)
        words = np.zeros(at.THREAD_WORDS, dtype=np.uint64)
        values = {
            at.T_LAUNCH: self.record.ctypes.data,
            at.T_RANGES: self.ranges.table.ctypes.data,
            at.T_RANGE_COUNT: len(self.ranges),
            at.T_CACHE: cache.ctypes.data,
            at.T_SHARED: shared.address,
            at.T_SHARED_END: shared.address + shared_bytes,
            at.T_LOCAL: local.address,
            at.T_LOCAL_END: local.address + stride * at.LANES * self.warps,
            at.T_PARAM: self.params.address,
            at.T_PARAM_END: self.param_end,
            at.T_LOCAL_STRIDE: stride,
            at.T_THREADS: self.threads,
            at.T_WARPS: self.warps,
            at.T_BLOCKS: self.blocks,
            at.T_FRAMES: frames.address,
            at.T_FRAME_SIZE: code.frame_bytes,
            at.T_KERNEL: self.entry_point,
            at.T_ENTRY: code.entry,
            at.T_GRID_ID: self.token,
            at.T_SM: number,
            at.T_DYNAMIC_SHARED: self.dynamic_shared,
            at.T_GLOBALS: self.globals_table.ctypes.data,
            at.T_PRINTF: ctypes.cast(_print_callback, ctypes.c_void_p).value or 0,
            at.T_TOKEN: self.token,
            at.T_COOPERATIVE: int(self.cooperative),
            at.T_TEXTURES: self.textures.ctypes.data,
            at.T_TEXTURE_COUNT: len(self.textures),
            at.T_CONDITION: ctypes.cast(_condition_callback, ctypes.c_void_p).value or 0,
            at.T_HEAP: ctypes.cast(_heap_callback, ctypes.c_void_p).value or 0,
        }
        for index, value in values.items():
            words[index] = value
        words[at.T_GRID_X : at.T_GRID_X + 3] = self.grid
        words[at.T_BLOCK_X : at.T_BLOCK_X + 3] = self.block
        self._keep += [shared, local, frames, cache, words]
        return words

    def _thread_indices(self, frames: _Buffer) -> None:
        """Write each lane's %tid into every warp's frame."""
        words = self.code.frame_bytes // 4
        view = np.ctypeslib.as_array((ctypes.c_uint32 * (words * self.warps)).from_address(frames.address))
        view = view.reshape(self.warps, words)
        linear = np.arange(self.warps * at.LANES, dtype=np.uint32).reshape(self.warps, at.LANES)
        width, height = self.block[:2]
        for place, value in (
            (at.F_TID_X, linear % width),
            (at.F_TID_Y, linear // width % height),
            (at.F_TID_Z, linear // (width * height)),
        ):
            view[:, place : place + at.LANES] = value

    def run(
        self, threads: int, cancel: threading.Event | None, print_: Callable[[bytes], None] | None
    ) -> LaunchResult:
        """Run every block; returns when the last has ended."""
        if print_ is not None:
            _printers[self.token] = functools.partial(self._print, print_)
        _setters[self.token] = self
        try:
            if self.cooperative:  # its blocks wait for each other: all of them run at once, each in a thread
                with _cooperating:
                    self._run(self.blocks, cancel)
            else:
                self._run(max(1, min(threads, self.blocks)), cancel)
        finally:
            _printers.pop(self.token, None)
            _setters.pop(self.token, None)
        return self._result()

    def _print(self, print_: Callable[[bytes], None], form: int, arguments: int) -> None:
        """Execute one lane's vprintf. An address that it must not read is an error of the program, as for a load."""
        try:
            print_(printf.format_message(form, arguments, self._readable))
        except printf.BadAddressError as error:
            self._fault(error.address)

    def use_heap(self, memory: int, value: int, gives: bool) -> int:
        """Execute one lane's malloc of ``value`` bytes, or free of a pointer; a pointer to no block is a fault."""
        try:
            if gives:
                return heap.allocate(memory, value) if self.ranges.room(memory) >= heap.BYTES else 0
            heap.release(value, self.ranges.room)
        except heap.HeapError as error:
            self._fault(error.address)
        return 0

    def _fault(self, address: int) -> None:
        with self._lock:
            if not self.record[at.L_ERROR]:
                self.record[at.L_ADDRESS] = address - (address >> 63 << 64)
                self.record[at.L_ERROR] = at.ILLEGAL_ADDRESS

    def set_condition(self, handle: int, value: int) -> None:
        """Execute one lane's cudaGraphSetConditional. A handle that is none of the launching graph's is a fault."""
        with self._lock:
            if handle in self.conditions:
                self.conditions[handle] = value
            elif not self.record[at.L_ERROR]:
                self.record[at.L_ADDRESS] = handle - (handle >> 63 << 64)
                self.record[at.L_ERROR] = at.ILLEGAL_ADDRESS

    def _readable(self, address: int) -> int:
        """Return how many bytes from ``address`` on a lane may read: device memory, or a buffer of this launch."""
        room = self.ranges.room(address)
        if room:
            return room
        for words in self._keep:
            if isinstance(words, np.ndarray) and len(words) == at.THREAD_WORDS:
                for low in (at.T_SHARED, at.T_LOCAL, at.T_PARAM):
                    if int(words[low]) <= address < int(words[low + 1]):
                        return int(words[low + 1]) - address
        return 0

    def _run(self, threads: int, cancel: threading.Event | None) -> None:
        if cancel is not None and cancel.is_set():
            self.record[at.L_STOP] = _CANCELLED
            return
        self._wanted, self._cancel = threads, cancel
        if threads > 1 or cancel is not None:
            overseer.watch(self)
        try:
            first = self._thread_record(0)
            if self.cooperative:
                with self._lock:
                    self._start_others()
            _worker()(first.ctypes.data)
            with self._lock:
                self._ended = True
            if self._others:
                wait(self._others)
        finally:
            overseer.forget(self)

    def oversee(self) -> None:
        """Start the remaining threads of a launch that takes long; stop a cancelled one. Called regularly while it
        runs.

        Most launches end before another thread would have woken up, so each starts with one. Since threads take the
        next block each time, threads that start later take what is left.
        """
        if self._cancel is not None and self._cancel.is_set():
            self.record[at.L_STOP] = _CANCELLED
            return
        with self._lock:
            if self._seen and not self._others and not self._ended:
                self._start_others()
            self._seen = True

    def _start_others(self) -> None:
        self._others = [_threads().submit(_worker(), self._thread_record(number).ctypes.data)
                        for number in range(1, self._wanted)]

    def _result(self) -> LaunchResult:
        error, address = int(self.record[at.L_ERROR]), int(self.record[at.L_ADDRESS]) & (1 << 64) - 1
        stop, line = int(self.record[at.L_STOP]), int(self.record[at.L_LINE])
        if error == at.ILLEGAL_ADDRESS:
            return LaunchResult(error, address, f"{self.code.name}: illegal address {address:#x}")
        if error == at.MISALIGNED:
            return LaunchResult(error, address, f"{self.code.name}: misaligned address {address:#x}")
        if error == at.ASSERT:
            return LaunchResult(error, 0, f"{self.code.name}: assertion failed (PTX line {line})")
        if stop == _DEADLOCK:
            return LaunchResult(at.FAILED, 0, f"{self.code.name}: threads wait at a barrier that can never complete")
        if error:
            return LaunchResult(error, 0, f"{self.code.name}: trap (PTX line {line})")
        if stop == _CANCELLED:
            return LaunchResult(at.FAILED, 0, "cancelled")
        return LaunchResult(at.OK, 0, "")
