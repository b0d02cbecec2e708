"""Memory of the session stays where it is while our kernels read it.

Unmapping memory that a kernel reads ends the session with error 700, and it
does not wait for kernels as ``cuMemFree`` does. Pages are hashed while the
session runs (to see what changes, and what a checkpoint will have to copy), so
hashing and unmapping take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rgpu.checkpoint.device import Region
from rgpu.session.errors import DeviceError

PATIENCE = 2.0  #: seconds that memory stays for whoever hashes it: all of a GPU's takes 0.04
_INVALID_VALUE = 1


class InPlace:
    """Thread-safe. ``gone``: the first of some regions, or parts of regions, that is not there any more."""

    def __init__(self, gone: Callable[[Sequence[Region]], Region | None]) -> None:
        self._gone = gone
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, regions: Sequence[Region]) -> Iterator[None]:
        """The regions stay within. Raises :class:`DeviceError` if one of them is gone already."""
        with self._lock:
            gone = self._gone(regions)
            if gone is not None:
                raise DeviceError(f"the {gone.kind} range {gone.address:#x}+{gone.size:#x} is gone", _INVALID_VALUE)
            yield

    @contextmanager
    def going(self) -> Iterator[None]:
        """Memory goes within.

        Waits no longer than PATIENCE: hashing may itself wait for a kernel that waits for a later call.
        """
        held = self._lock.acquire(timeout=PATIENCE)
        try:
            yield
        finally:
            if held:
                self._lock.release()
