"""NVIDIA's CUPTI in the worker: when the GPU began and ended the work of a driver call.

The library is the node's own, of a CUDA toolkit or of the wheels that frameworks install (``RGPU_CUPTI``: a path, or
``off``). It is loaded when the first call is timed, records while calls are timed, and rests ``IDLE`` seconds after the
last one. ``native/times/activity.cpp`` collects its records: start and end of each kernel, copy and memset, with the
correlation id of the driver call that launched it (NVIDIA, "CUPTI", Activity API).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from rgpu.server.device.cuda.engine import Engine

IDLE = 5.0  #: seconds without a timed call after which it ends to record

log = structlog.get_logger(__name__)


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
        """Fetch the records of complete work, unless that was done 5 ms ago."""
        self._engine.activity_collect()

    def take(self, correlation: int, complete: float) -> tuple[int, int] | None:
        """Return and forget (start, end) of a call's work, ns on the monotonic clock; None while it is not known.

        ``complete``: when the work was seen to be complete, s: what was collected before may be only a part of it.
        """
        start, end = ctypes.c_uint64(), ctypes.c_uint64()
        known = self._engine.activity_take(correlation, int(complete * 1e9), ctypes.byref(start), ctypes.byref(end))
        return (start.value, end.value) if known else None

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
