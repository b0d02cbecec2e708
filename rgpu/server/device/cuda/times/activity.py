"""NVIDIA's CUPTI in the worker: when the GPU began and ended the work of a driver call.

The library is the node's own, of a CUDA toolkit or of the wheels that frameworks install (``RGPU_CUPTI``: a path, or
``off``). It is loaded when the first call is timed, records while calls are timed, and rests ``IDLE`` seconds after the
last one. ``native/activity.cpp`` collects its records: start and end of each kernel, copy and memset, with the
correlation id of the driver call that launched it (NVIDIA, "CUPTI", Activity API).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import structlog

from rgpu.server.device.cuda.engine import Engine

IDLE = 5.0  #: seconds without a timed call after which it ends to record
COLLECT = 0.005  #: seconds between two collections of records
CLOCK_SECONDS = 1.0  #: age at which the offset of its clock is measured again
CLOCK_TRIES = 5  #: readings of both clocks; the narrowest counts
ROOM = 4096  #: records fetched at once
KEPT = 1 << 16  #: records kept for calls that were not asked for yet; older ones are dropped

log = structlog.get_logger(__name__)


class _Work(ctypes.Structure):
    _fields_ = [("correlation", ctypes.c_uint32), ("kind", ctypes.c_uint32), ("start", ctypes.c_uint64),
                ("end", ctypes.c_uint64)]


def libraries() -> Iterator[Path]:
    """Yield where a node may have CUPTI: as RGPU_CUPTI says, or in wheels, then in toolkits; newest first."""
    named = os.environ.get("RGPU_CUPTI", "")
    if named:
        yield from () if named == "off" else (Path(named),)
        return
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        yield Path(folder) / "cu13" / "lib" / "libcupti.so.13"
        yield Path(folder) / "cuda_cupti" / "lib" / "libcupti.so.12"
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        for name in ("libcupti.so.13", "libcupti.so.12") if home else ():
            yield Path(home or "") / "extras" / "CUPTI" / "lib64" / name
            yield Path(home or "") / "lib64" / name


class Activity:
    """CUPTI of this process, for all its GPUs; every method may be called by any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._loaded: bool | None = None  #: None: nobody asked yet
        self._recording = False
        self._used = 0.0
        self._records: dict[int, tuple[int, int]] = {}  #: correlation id → (start, end), ns of the monotonic clock
        self._collected = 0.0  #: when the last collection began
        self._offset = (0.0, 0)  #: (when it was measured, ns that CUPTI's clock is ahead of the monotonic one)
        self._buffer = (_Work * ROOM)()

    def record(self) -> bool:
        """Record from now on, if this node can; whether it does."""
        if self._recording and time.monotonic() - self._used < IDLE / 5:
            return True
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            self._used = time.monotonic()
            if self._loaded and not self._recording:
                result = self._engine.activity_record(1)
                self._recording = self._loaded = not result
                if result:
                    log.warning("cupti.refused", result=result, note="calls are timed by events around them")
            return self._recording

    def rest(self) -> None:
        """End to record, if no call was timed for ``IDLE`` seconds."""
        with self._lock:
            if self._recording and time.monotonic() - self._used >= IDLE:
                self._end()

    def stop(self) -> None:
        """End to record."""
        with self._lock:
            if self._recording:
                self._end()

    def collect(self) -> None:
        """Fetch the records of complete work, unless that was done ``COLLECT`` seconds ago."""
        with self._lock:
            begun = time.monotonic()
            if begun - self._collected < COLLECT:
                return
            ahead = self._ahead(begun)
            count = ROOM
            while count == ROOM:
                count = self._engine.activity_collect(self._buffer, ROOM)
                for work in self._buffer[:count]:
                    start, end = work.start - ahead, work.end - ahead
                    first, last = self._records.get(work.correlation, (start, end))
                    self._records[work.correlation] = min(first, start), max(last, end)
            self._collected = begun
            if (over := len(self._records) - KEPT) > 0:
                for old in list(islice(self._records, over)):
                    del self._records[old]

    def take(self, correlation: int, complete: float) -> tuple[int, int] | None:
        """Return and forget (start, end) of a call's work, ns on the monotonic clock; None while it is not known.

        ``complete``: when the work was seen to be complete, s: what was collected before may be only a part of it.
        """
        with self._lock:
            return self._records.pop(correlation, None) if self._collected > complete else None

    def _load(self) -> bool:
        why = ctypes.create_string_buffer(512)
        tried = [path for path in libraries() if path.is_file()]
        for path in tried:
            if self._engine.activity_open(str(path).encode(), why, len(why)):
                log.info("cupti.loaded", path=str(path))
                return True
            log.warning("cupti.not_loaded", path=str(path), error=why.value.decode(errors="replace"))
        log.info("cupti.absent", note="kernels are timed by events around them: longer by the wait for the event")
        return False

    def _end(self) -> None:
        self._engine.activity_record(0)
        self._recording = False
        self._records.clear()

    def _ahead(self, now: float) -> int:
        """Nanoseconds that CUPTI's clock is ahead of the monotonic one."""
        measured, ahead = self._offset
        if not measured or now - measured > CLOCK_SECONDS:
            narrowest = None
            for _ in range(CLOCK_TRIES):
                before = time.monotonic_ns()
                there = self._engine.activity_now()
                after = time.monotonic_ns()
                if narrowest is None or after - before < narrowest:
                    narrowest, ahead = after - before, there - (before + after) // 2
            self._offset = now, ahead
        return ahead
