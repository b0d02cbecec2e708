"""Keeps memory of the session mapped while rgpu's kernels read it.

Unmapping memory that a kernel reads ends the session with error 700, and does not
wait for kernels as ``cuMemFree`` does. Pages are hashed while the
session runs (to see what changes, and what a checkpoint will have to copy), so
hashing and unmapping exclude each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rgpu.checkpoint.device import Region
from rgpu.session.errors import DeviceError

PATIENCE = 2.0  #: seconds that unmapping waits for hashing at most: all of a GPU's memory takes 0.04
_INVALID_VALUE = 1


class InPlace:
    """A lock between readers and unmapping. Thread-safe. ``gone``: returns the first of some regions not mapped."""

    def __init__(self, gone: Callable[[Sequence[Region]], Region | None]) -> None:
        self._gone = gone
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, regions: Sequence[Region]) -> Iterator[None]:
        """Keep the regions mapped within the block. Raises :class:`DeviceError` if one of them is not mapped."""
        with self._lock:
            gone = self._gone(regions)
            if gone is not None:
                raise DeviceError(f"the {gone.kind} range {gone.address:#x}+{gone.size:#x} was freed", _INVALID_VALUE)
            yield

    @contextmanager
    def going(self) -> Iterator[None]:
        """Allow unmapping within the block.

        Waits no longer than PATIENCE: hashing may itself wait for a kernel that waits for a later call.
        """
        held = self._lock.acquire(timeout=PATIENCE)
        try:
            yield
        finally:
            if held:
                self._lock.release()
