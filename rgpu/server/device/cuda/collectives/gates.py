"""Gates in streams: a stream signals to the host that it has reached a gate, and waits until the host opens it.

Both use words of pinned memory (``cuStreamWriteValue32``, which implies a barrier before it, and
``cuStreamWaitValue32``), so that no driver call is needed meanwhile: another thread may be inside the driver, waiting
for the very stream that waits at the gate.

Source: CUDA driver API, "Stream Memory Operations". A gate is used again only when the stream is known to have passed
it; each use has a higher value, compared cyclically by the device (CU_STREAM_WAIT_VALUE_GEQ).
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import DeviceError

GATES = 2048  #: gates in use at one time, whether reached or not
WORD = 4  #: bytes
CUDA_ERROR_UNKNOWN = 999


class Gates:
    """The gates of one device; methods that call the driver need the stream's context current. Not locked."""

    def __init__(self) -> None:
        self._memory = 0
        self._words: Any = None  #: of gate g: [2 g] by the stream, [2 g + 1] by the host
        self._values = [0] * GATES
        self._free = deque(range(GATES))

    def prepare(self) -> None:
        """Allocate the memory of the words, once. Raises :class:`DeviceError`."""
        if self._words is None:
            size = 2 * WORD * GATES
            self._memory = int(check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"))
            ctypes.memset(self._memory, 0, size)
            self._words = (ctypes.c_uint32 * (2 * GATES)).from_address(self._memory)

    @property
    def full(self) -> bool:
        """Whether all gates are in use."""
        return not self._free

    def take(self) -> int:
        """Return a gate for one use. Raises :class:`DeviceError` where none is free."""
        if self.full:
            raise DeviceError(f"all {GATES} gates of this device are taken by groups of collectives that are not "
                              "complete: synchronize their streams before more are given", CUDA_ERROR_UNKNOWN)
        gate = self._free.popleft()
        self._values[gate] = self._values[gate] + 1 & 0x7FFFFFFF
        return gate

    def give(self, gate: int) -> None:
        """Let a gate be used again: its stream has passed it, or will never reach it."""
        self._free.append(gate)

    def enqueue(self, gate: int, stream: Any) -> None:
        """Make a stream signal that it has reached the gate, and wait. Raises :class:`DeviceError`."""
        value = self._values[gate]
        check(driver.cuStreamWriteValue32(stream, self._memory + 2 * WORD * gate, value,
                                          driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT),
              "cuStreamWriteValue32")
        check(driver.cuStreamWaitValue32(stream, self._memory + 2 * WORD * gate + WORD, value,
                                         driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ),
              "cuStreamWaitValue32")

    def reached(self, gate: int) -> bool:
        """Whether the stream has reached the gate."""
        return bool(self._words[2 * gate] == self._values[gate])

    def open(self, gate: int) -> None:
        """Open the gate, also for a stream that has not reached it yet."""
        self._words[2 * gate + 1] = self._values[gate]

    def close(self) -> None:
        """Free the memory; no stream waits any more. The context is current."""
        if self._words is not None:
            self._words = None
            driver.cuMemFreeHost(self._memory)
