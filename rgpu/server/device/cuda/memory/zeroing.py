"""Zeroes memory that was just mapped, before any work of the session can reach it.

``cuMemsetD8`` returns before the memory is set, and a stream made with
``CU_STREAM_NON_BLOCKING`` does not wait for the legacy stream that it runs on
(CUDA driver API, "API synchronization behavior"): data that the program writes
there at once could be overwritten by the zeros. So they are written on a
stream of their own and waited for. A GPU filled by the session's own kernels
may delay them, and such a kernel may itself wait for a call that was
not applied yet: then the session's streams wait, and the worker does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check

PATIENCE = 0.02  #: seconds that the applying thread waits for zeros
_NOT_READY = 600


class Zeroing:
    """The stream that writes zeros; used with the context current. Not thread-safe: for the applying thread only."""

    def __init__(self, streams: Callable[[], Iterable[Any]], patience: float = PATIENCE) -> None:
        """Make the stream. ``streams``: those that must wait for zeros which take longer than ``patience`` seconds."""
        self._streams = streams
        self._patience = patience
        self._stream = check(driver.cuStreamCreateWithPriority(1, 0), "cuStreamCreateWithPriority")
        self._event = check(driver.cuEventCreate(2), "cuEventCreate")
        self._pending = False

    def fill(self, address: int, size: int) -> None:
        """Zero [address, address+size) before all work that is submitted to a stream later. Raises DeviceError."""
        check(driver.cuMemsetD8Async(address, 0, size, self._stream), "cuMemsetD8Async")
        check(driver.cuEventRecord(self._event, self._stream), "cuEventRecord")
        self._pending = True
        until = time.monotonic() + self._patience
        while not self._finished():
            if time.monotonic() > until:
                for stream in self._streams():
                    self.fence(stream)
                return

    def _finished(self) -> bool:
        code = driver.cuEventQuery(self._event)
        if int(code[0]) != _NOT_READY:
            check(code, "cuEventQuery")
            self._pending = False
        return not self._pending

    def fence(self, stream: Any) -> None:
        """Order work submitted to ``stream`` from now on after all zeros so far. Raises DeviceError."""
        if self._pending and not self._finished():
            state = check(driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
            if int(state) == 0:  # a capture executes nothing, and may not wait for an event outside it
                check(driver.cuStreamWaitEvent(stream, self._event, 0), "cuStreamWaitEvent")

    def settle(self) -> None:
        """Wait for all zeros. Raises DeviceError."""
        if self._pending:
            check(driver.cuEventSynchronize(self._event), "cuEventSynchronize")
            self._pending = False

    def close(self) -> None:
        """Destroy the stream and its event."""
        driver.cuEventDestroy(self._event)
        driver.cuStreamDestroy(self._stream)
