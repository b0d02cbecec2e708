"""Handles of texture and surface objects of one context: how a rebuild gets those that the program knows.

What driver 580.159.04 was seen to do (H100; ``pytest -m gpu tests/server/device/cuda/memory/test_arrays.py``): a
context has one pool of handles for both kinds, 65536 large at first, in blocks of 32. New ones come in their order. A
destroyed one is free when the work given before is complete; the block that it was missing from is used again behind
all others. Copies between arrays and memory take handles for the driver's own use, 13 at a time for 126 kinds of
arrays, and give them back at moments that no rebuild repeats; while one of them has a wanted handle, nobody gets it.

So a rebuild holds what it was given on the way to a wanted handle, and asks for these in their order. And before a
recovery makes its first array, all handles but :data:`ROOM` are taken, by objects that nobody uses (3 µs each):
a wanted one is let go then and asked for, and is among the few that are free. A replay waits until no work
is under way first (``session/journal/apply_order.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import DeviceError

CUDA_ERROR_NOT_SUPPORTED = 801
POOL = 65536  #: handles by which a context's pool grows
MOST = 3 * POOL  #: handles asked for in one attempt
ROOM = 128  #: handles that are left for the driver's own use
LAG_SECONDS = 5.0  #: that a handle may be free later than the work that may use it is known to be complete
_UNUSED = 512  #: bytes
PAUSE = 0.001  #: seconds between two attempts


End = Callable[[int], None]  #: destroys an object


class Handles:
    """See the module docstring. Every method wants the context to be current."""

    def __init__(self) -> None:
        self._held: dict[int, End] = {}  #: by objects that nobody uses
        self._unused = driver.CUDA_RESOURCE_DESC()  #: what :meth:`reserve` makes them of

    def open(self) -> None:
        """Allocate what :meth:`reserve` wants. Raises :class:`DeviceError`."""
        self._unused.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear = self._unused.res.linear
        linear.devPtr, linear.sizeInBytes = check(driver.cuMemAlloc(_UNUSED), "cuMemAlloc"), _UNUSED
        linear.format, linear.numChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1

    def reserve(self) -> None:
        """Take all handles but :data:`ROOM`; nothing when some are taken. Raises :class:`DeviceError`."""
        if self._held:
            return
        sampling, handle = driver.CUDA_TEXTURE_DESC(), 0
        while len(self._held) < MOST and not (handle > POOL and handle % POOL == POOL - 1):  # the pool grew once
            handle = int(check(driver.cuTexObjectCreate(self._unused, sampling, None), "cuTexObjectCreate"))
            self._held[handle] = end_texture
        for handle in list(self._held)[-ROOM:]:
            self._held.pop(handle)(handle)

    def release(self) -> None:
        """Give all back; nothing when none is taken. Raises :class:`DeviceError`."""
        while self._held:
            handle, end = self._held.popitem()
            end(handle)

    def make_as(self, handle: int, make: Callable[[], int], end: End) -> None:
        """Make an object with this handle. Raises :class:`DeviceError` where the driver does not give it."""
        if held := self._held.pop(handle, None):
            held(handle)
        until = time.monotonic() + LAG_SECONDS
        while True:
            others = _ask(handle, make)
            found = bool(others) and others[-1] == handle
            if found:
                others.pop()
            if found and held is None:  # those on the way to it are not to come again
                self._held.update(dict.fromkeys(others, end))
            else:
                for other in others:
                    end(other)
            if found:
                return
            if time.monotonic() > until:
                break
            time.sleep(PAUSE)
        raise DeviceError(f"the driver does not give the texture or surface object that the program knows as "
                          f"{handle:#x} that handle again: it gave {len(others)} others", CUDA_ERROR_NOT_SUPPORTED,
                          wanted=handle, others=len(others))


def _ask(handle: int, make: Callable[[], int]) -> list[int]:
    """Ask until the handle comes, or none; returns all that came, it behind the others."""
    given: list[int] = []
    with contextlib.suppress(DeviceError):  # none is left
        while len(given) < MOST and (not given or given[-1] != handle):
            given.append(make())
    return given


def end_texture(handle: int) -> None:
    """Destroy a texture object. Raises :class:`DeviceError`."""
    check(driver.cuTexObjectDestroy(handle), "cuTexObjectDestroy")


def end_surface(handle: int) -> None:
    """Destroy a surface object. Raises :class:`DeviceError`."""
    check(driver.cuSurfObjectDestroy(handle), "cuSurfObjectDestroy")
