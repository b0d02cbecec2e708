"""What a session may have of its GPUs.

The client's library keeps these limits, too; here they hold whatever it does.
"""

from __future__ import annotations

from rgpu.server.device.cuda.gpus import Gpus
from rgpu.session.addresses import GRANULE
from rgpu.session.errors import DeviceError

CUDA_ERROR_OUT_OF_MEMORY = 2
SIDE_MEMORY = 64 << 20  #: bytes of module variables, and of each heap, that every session may have: else its quota
#: CUlimit of memory that the driver takes beside the session's: CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE.
HEAPS = (1, 2)


class Limits:
    """The quota of device memory, and what follows from it for memory beside the mappings."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._quota = 0  #: bytes of each GPU; 0: no limit

    def resize(self, memory: int) -> None:
        """Bytes of each GPU that the session may have."""
        self._quota = memory
        for gpu in self._gpus:
            gpu.memory.total = -(-memory // GRANULE) * GRANULE

    def check(self, size: int, what: str) -> None:
        """Raise DeviceError(2) for device memory beside the mappings that is more than the session may have of it."""
        most = max(SIDE_MEMORY, self._quota)
        if self._quota and size > most:
            raise DeviceError(f"{what} of {size} bytes: the session may have {most}", CUDA_ERROR_OUT_OF_MEMORY)

    def check_limit(self, limit: int, value: int) -> None:
        """The same for a CUlimit that a program sets."""
        if limit in HEAPS:
            self.check(value, "a heap or buffer of kernels")
