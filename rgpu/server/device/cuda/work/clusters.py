"""The number of clusters that fit on the GPU: the driver's own answer, for arguments that a client sent."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from rgpu.session.errors import DeviceError

ACTIVE, POTENTIAL = range(2)  #: forms of the query
CUDA_ERROR_INVALID_VALUE = 1
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: 72 bytes, of which a cluster's three sizes are used."""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("cluster", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint32)]


def occupancy(function: int, form: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int,
              cluster: tuple[int, int, int]) -> int:
    """Return the driver's answer for a CUfunction; ``cluster`` (0, 0, 0): the function's own. The context is current.

    Raises :class:`DeviceError` with the driver's result.
    """
    if form not in (ACTIVE, POTENTIAL):
        raise DeviceError(f"cluster question {form}", CUDA_ERROR_INVALID_VALUE)
    attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint32 * 16)(*cluster))
    config = _Config((ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), shared, None,
                     ctypes.pointer(attribute), 1 if any(cluster) else 0)
    libcuda = ctypes.CDLL("libcuda.so.1")
    ask = libcuda.cuOccupancyMaxActiveClusters if form == ACTIVE else libcuda.cuOccupancyMaxPotentialClusterSize
    value = ctypes.c_int(0)
    result = ask(ctypes.byref(value), ctypes.c_void_p(function), ctypes.byref(config))
    if result:
        raise DeviceError(f"cluster occupancy: {driver.CUresult(result).name}", result)
    return value.value
