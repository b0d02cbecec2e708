"""``cuTensorMapEncode*`` on the server: takes the arguments as the client packed them, returns the driver's 128 bytes.

The layout of the packed arguments is in docs/developers/devices.md ("Tensor maps").
The client sent them: their length is checked against the rank before
anything is read.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from rgpu.session.errors import DeviceError

TILED, IM2COL, IM2COL_WIDE, REPLACE_ADDRESS = range(4)
DESCRIPTOR = 128  #: bytes
ALIGNMENT = 64  #: of a descriptor in memory
CUDA_ERROR_INVALID_VALUE = 1
MOST_DIMENSIONS = 5


class Reader:
    """Takes packed values off the front. Raises :class:`DeviceError` where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        """Read values of a struct ``layout`` (little-endian). Raises :class:`DeviceError` when cut short."""
        size = struct.calcsize("<" + layout)
        if size > len(self.data) - self.at:
            raise DeviceError("tensor map arguments are cut short", CUDA_ERROR_INVALID_VALUE)
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += size
        return values

    def end(self) -> None:
        """Check that nothing is left. Raises :class:`DeviceError`."""
        if self.at != len(self.data):
            raise DeviceError("tensor map arguments are too long", CUDA_ERROR_INVALID_VALUE)


def arguments_of(form: int, data: bytes) -> list[Any]:
    """Return the C arguments behind ``tensorMap``, in order. Pure. Raises :class:`DeviceError`."""
    read = Reader(data)
    if form not in (TILED, IM2COL, IM2COL_WIDE):
        raise DeviceError(f"there is no tensor map of form {form}", CUDA_ERROR_INVALID_VALUE)
    kind, rank, address = read.take("iIQ")
    if not 1 <= rank <= MOST_DIMENSIONS or (form == IM2COL and rank < 3):
        raise DeviceError(f"a tensor map of rank {rank}", CUDA_ERROR_INVALID_VALUE)
    dimensions = (ctypes.c_uint64 * rank)(*read.take(f"{rank}Q"))
    strides = (ctypes.c_uint64 * (rank - 1))(*read.take(f"{rank - 1}Q"))
    found: list[Any] = [kind, ctypes.c_uint32(rank), ctypes.c_void_p(address), dimensions, strides]
    if form == TILED:
        found.append((ctypes.c_uint32 * rank)(*read.take(f"{rank}I")))
    elif form == IM2COL:
        found += [(ctypes.c_int * (rank - 2))(*read.take(f"{rank - 2}i")) for _ in range(2)]
        found += [ctypes.c_uint32(value) for value in read.take("II")]
    else:
        found += [*read.take("ii"), *(ctypes.c_uint32(value) for value in read.take("II"))]
    found.append((ctypes.c_uint32 * rank)(*read.take(f"{rank}I")))
    found += read.take("iiiii" if form == IM2COL_WIDE else "iiii")
    read.end()
    return found


def encode(form: int, data: bytes) -> bytes:
    """Return the descriptor. Raises :class:`DeviceError` with the driver's result. The context is current."""
    room = ctypes.create_string_buffer(DESCRIPTOR + ALIGNMENT)
    at = ctypes.addressof(room) + -ctypes.addressof(room) % ALIGNMENT
    libcuda = ctypes.CDLL("libcuda.so.1")
    if form == REPLACE_ADDRESS:
        if len(data) != DESCRIPTOR + 8:
            raise DeviceError("a tensor map and an address are wanted", CUDA_ERROR_INVALID_VALUE)
        ctypes.memmove(at, data, DESCRIPTOR)
        (address,) = struct.unpack_from("<Q", data, DESCRIPTOR)
        result = libcuda.cuTensorMapReplaceAddress(ctypes.c_void_p(at), ctypes.c_void_p(address))
    else:
        names = ("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeIm2colWide")
        arguments = arguments_of(form, data)
        function: Callable[..., int] = getattr(libcuda, names[form])
        result = function(ctypes.c_void_p(at), *arguments)
    if result:
        raise DeviceError(f"tensor map: {driver.CUresult(result).name}", result)
    return ctypes.string_at(at, DESCRIPTOR)
