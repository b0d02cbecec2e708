"""``cuLaunchKernelEx``: launches with attributes (clusters, programmatic serialization) or cooperative ones.

Layouts are those of ``cuda.h`` 13.0: CUlaunchConfig (56 bytes) and
CUlaunchAttribute (72 bytes: id, padding, 64 bytes of value).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from cuda.bindings import driver

from rgpu.checkpoint.device import Launch
from rgpu.session.errors import DeviceError

ATTRIBUTE = 72  #: bytes
CUDA_ERROR_INVALID_VALUE = 1
_COOPERATIVE = struct.pack("<iIi60x", 2, 0, 1)  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*


class _Config(ctypes.Structure):
    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint))


def attributes_of(launch: Launch) -> bytes:
    """The launch's CUlaunchAttribute entries, cooperative included. Raises DeviceError for a torn entry."""
    if len(launch.attributes) % ATTRIBUTE:
        raise DeviceError(f"launch attributes of {len(launch.attributes)} bytes", CUDA_ERROR_INVALID_VALUE)
    return launch.attributes + (_COOPERATIVE if launch.cooperative else b"")


def launch_ex(function: Any, launch: Launch, stream: Any) -> tuple[Any, ...]:
    """Launch with attributes; returns the driver's result. Raises DeviceError for malformed attributes."""
    attributes = attributes_of(launch)
    entries = ctypes.create_string_buffer(attributes, max(1, len(attributes)))
    data = ctypes.create_string_buffer(launch.parameters, max(1, len(launch.parameters)))
    size = ctypes.c_size_t(len(launch.parameters))
    extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, ctypes.addressof(data), _BUFFER_SIZE, ctypes.addressof(size), None)
    config = _Config((ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block), launch.shared,
                     int(stream) or None, ctypes.addressof(entries), len(attributes) // ATTRIBUTE)
    result = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(int(function)), None, ctypes.byref(extra))
    return (driver.CUresult(result),)
