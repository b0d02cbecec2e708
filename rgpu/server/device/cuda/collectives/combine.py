"""The kernel that combines contributions, and its parameter block (``kernels/combine.cu``)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from rgpu.server.collectives.reductions import scalar_bytes
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.memory.pagehash import launch, load_kernels
from rgpu.session.objects.collectives import DataType, Kind, Operation, Reduction

NOTHING, REDUCE, GATHER = range(3)
THREADS, BLOCKS = 512, 132
#: What the kernel reduces; other types and reductions take the way through the host.
TYPES = frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64})
REDUCTIONS = frozenset({Reduction.SUM, Reduction.AVG})
MOST_RANKS = 8
_WORK = struct.Struct("<IIIIQQ8Q8Q")
BYTES = _WORK.size


class Combine:
    """The loaded kernel of one GPU."""

    def __init__(self, ordinal: int) -> None:
        """Load it; the context is current. Raises :class:`rgpu.session.errors.DeviceError`."""
        attribute = driver.CUdevice_attribute
        device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        major, minor = (int(check(driver.cuDeviceGetAttribute(which, device), "cuDeviceGetAttribute")) for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR))
        self._module, _ = load_kernels("combine", (major, minor))
        self._kernel = check(driver.cuModuleGetFunction(self._module, b"rgpu_combine"), "cuModuleGetFunction")

    def launch(self, stream: Any, work: int, begin: int, end: int) -> None:
        """Combine the bytes [begin, end) of each source, as the block at device address ``work`` then says.

        Raises :class:`rgpu.session.errors.DeviceError`.
        """
        launch(self._kernel, BLOCKS, struct.pack("<QQQ", work, begin, end), stream, THREADS)

    def close(self) -> None:
        """Unload it."""
        driver.cuModuleUnload(self._module)


def supports(op: Operation) -> bool:
    """Whether the kernel does what the operation needs."""
    if op.kind is Kind.ALL_GATHER:
        return True
    return op.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) and op.data_type in TYPES and op.reduction in REDUCTIONS


def work_of(op: Operation, rank: int, sources: Sequence[int]) -> bytes:
    """Return the parameter block for an operation, from where each rank's contribution is, in the order of ranks."""
    reduces = op.kind.reduces
    if op.kind is Kind.REDUCE_SCATTER:
        sources = [source + rank * op.size for source in sources]
    factors = [0] * MOST_RANKS
    scaled = reduces and op.reduction is Reduction.AVG
    if scaled:
        factor = int.from_bytes(scalar_bytes(1.0 / len(sources), op.data_type), "little")
        factors = [factor] * MOST_RANKS
    return _WORK.pack(REDUCE if reduces else GATHER, op.data_type if reduces else 0, len(sources), scaled, op.size,
                      op.receive, *sources, *[0] * (MOST_RANKS - len(sources)), *factors)


def copy_of(target: int, source: int, size: int) -> bytes:
    """Return the parameter block for a copy."""
    return _WORK.pack(GATHER, 0, 1, 0, size, target, source, *[0] * (MOST_RANKS - 1), *[0] * MOST_RANKS)


def nothing() -> bytes:
    """Return the parameter block for nothing."""
    return bytes(BYTES)
