"""Limits of a session on its GPUs.

The client's library enforces them, too; here they hold whatever the client does.
"""

from __future__ import annotations

from rgpu.server.device.cuda.gpus import Gpus
from rgpu.session.addresses import GRANULE
from rgpu.session.errors import DeviceError

CUDA_ERROR_OUT_OF_MEMORY = 2
SIDE_MEMORY = 64 << 20  #: bytes allowed for module variables, and for each heap, if the quota is lower
#: CUlimits of memory that the driver allocates beside the session's: CU_LIMIT_PRINTF_FIFO_SIZE,
#: CU_LIMIT_MALLOC_HEAP_SIZE.
HEAPS = (1, 2)


class Limits:
    """The quota of device memory, and the limits that it implies for memory beside the mappings."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._quota = 0  #: bytes of each GPU; 0: no limit

    def resize(self, memory: int) -> None:
        """Set the session's quota, in bytes of each GPU."""
        self._quota = memory
        for gpu in self._gpus:
            gpu.memory.total = -(-memory // GRANULE) * GRANULE

    def check(self, size: int, what: str) -> None:
        """Raise DeviceError(2) for more device memory beside the mappings than the session is allowed."""
        most = max(SIDE_MEMORY, self._quota)
        if self._quota and size > most:
            raise DeviceError(f"{what} of {size} bytes: the session may have {most}", CUDA_ERROR_OUT_OF_MEMORY)

    def check_limit(self, limit: int, value: int) -> None:
        """Raise DeviceError(2) for a CUlimit, set by the program, that exceeds the limit."""
        if limit in HEAPS:
            self.check(value, "a heap or buffer of kernels")
