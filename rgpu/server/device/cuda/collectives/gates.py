"""Gates in streams: a stream tells the host that it has come, and waits until the host lets it go on.

Both by words of pinned memory (``cuStreamWriteValue32``, which has a barrier in front of it, and
``cuStreamWaitValue32``), so that nobody calls the driver meanwhile: a thread may be inside it, waiting for the very
stream that stands here.

Source: CUDA driver API, "Stream Memory Operations". A gate is used again only when the stream is known to be past it;
each use has a higher value, compared cyclically by the device (CU_STREAM_WAIT_VALUE_GEQ).
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import DeviceError

GATES = 2048  #: that streams may be at, or come to, at one time
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
        """Take the words' memory, once. Raises :class:`DeviceError`."""
        if self._words is None:
            size = 2 * WORD * GATES
            self._memory = int(check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"))
            ctypes.memset(self._memory, 0, size)
            self._words = (ctypes.c_uint32 * (2 * GATES)).from_address(self._memory)

    @property
    def full(self) -> bool:
        """Whether all are in use."""
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
        """Have a gate used again: its stream is past it, or never came."""
        self._free.append(gate)

    def enqueue(self, gate: int, stream: Any) -> None:
        """Have a stream tell that it has come, and wait. Raises :class:`DeviceError`."""
        value = self._values[gate]
        check(driver.cuStreamWriteValue32(stream, self._memory + 2 * WORD * gate, value,
                                          driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT),
              "cuStreamWriteValue32")
        check(driver.cuStreamWaitValue32(stream, self._memory + 2 * WORD * gate + WORD, value,
                                         driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ),
              "cuStreamWaitValue32")

    def reached(self, gate: int) -> bool:
        """Tell whether the stream has come."""
        return bool(self._words[2 * gate] == self._values[gate])

    def open(self, gate: int) -> None:
        """Let the stream go on, also one that has not come yet."""
        self._words[2 * gate + 1] = self._values[gate]

    def close(self) -> None:
        """Give the memory back; no stream waits any more. The context is current."""
        if self._words is not None:
            self._words = None
            driver.cuMemFreeHost(self._memory)
