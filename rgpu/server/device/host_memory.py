"""The bound on a session's pinned memory, which a worker enforces on every device."""

from __future__ import annotations

from rgpu.session.errors import DeviceError

OUT_OF_MEMORY = 2


def check_pinned(used: int, more: int, total: int) -> None:
    """Raise DeviceError(2), as cuMemHostAlloc does, if ``used`` + ``more`` exceeds ``total`` bytes (0: no bound)."""
    if total and used + more > total:
        raise DeviceError(f"{more} bytes of pinned memory beside {used}: the worker may have {total} of host memory "
                          "(rgpu server --worker-memory)", OUT_OF_MEMORY)
