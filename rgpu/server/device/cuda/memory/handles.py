"""Handles of texture and surface objects of one context: how a rebuild gets those that the program knows.

What driver 580.159.04 was seen to do (H100, H200; ``pytest -m gpu tests/server/device/cuda/memory/test_arrays.py``):
a context has one pool of handles for both kinds, in blocks of 64. A new one is the lowest free of the block that it
gave the last one of, or, if that is full, of the next one above, and above the highest comes the lowest again. The
pool grows by 65536 numbers, which come next, when all but 8192 are in use. A destroyed one is free when the work
given before is complete. Copies between arrays and memory take handles for the driver's own use, 13 at a time for 126
kinds of arrays, and give them back at moments that no rebuild repeats; while one of them has a wanted handle, nobody
gets it.

So a rebuild asks until the wanted one comes, and destroys the others when their block is full: these lie behind then.
And before a recovery makes its first array, :meth:`Handles.reserve` takes nearly all handles, by objects
that nobody uses (3 µs each): a wanted one is let go then and asked for, and nobody else gets it. An object that the
program destroys meanwhile stays, for the same reason; one that it creates is made when its handle is known. A replay
waits until no work is under way first (``session/journal/apply_order.py``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import DeviceError

CUDA_ERROR_NOT_SUPPORTED = 801
POOL = 65536  #: handles by which a context's pool grows
MOST = 3 * POOL  #: handles asked for in one attempt
UNUSED = 8192  #: handles of a pool that are free when it grows
ROOM = 256  #: handles that are left: a block that is asked for, and for the driver's own use
BLOCK = 64  #: from 1 on
STEP = 1024  #: from the handles that one owner leaves to those that the next one leaves
LAG_SECONDS = 5.0  #: that a handle may be free later than the work that may use it is known to be complete
RECOVERY_LAG = 30.0  #: the same in a recovery, where the session would be lost, on a host that may be overloaded
_UNUSED_SIZE = 512  #: bytes
PAUSE = 0.001  #: seconds between two attempts


End = Callable[[int], None]  #: destroys an object


class Handles:
    """See the module docstring. Every method wants the context to be current."""

    def __init__(self) -> None:
        self.owner = 0  #: counts who had the session
        self._held: dict[int, End] = {}  #: by objects that nobody uses
        self._promised: set[int] = set()  #: of these
        self._unused = driver.CUDA_RESOURCE_DESC()  #: what :meth:`reserve` makes them of

    def open(self) -> None:
        """Allocate what :meth:`reserve` wants. Raises :class:`DeviceError`."""
        self._unused.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear = self._unused.res.linear
        linear.devPtr, linear.sizeInBytes = check(driver.cuMemAlloc(_UNUSED_SIZE), "cuMemAlloc"), _UNUSED_SIZE
        linear.format, linear.numChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1

    def reserve(self) -> None:
        """Take all handles but :data:`UNUSED` and :data:`ROOM`; nothing when some are taken.

        Which are left goes by :attr:`owner`: from these the program is given handles later, and the driver takes some
        for its copies, so the next owner leaves others. Raises :class:`DeviceError`.
        """
        if self._held:
            return
        first = POOL + 1 + self.owner % ((POOL - UNUSED - ROOM) // STEP) * STEP
        left = range(first, first + UNUSED + ROOM)
        sampling, handle = driver.CUDA_TEXTURE_DESC(), 0

        def take() -> int:
            return int(check(driver.cuTexObjectCreate(self._unused, sampling, None), "cuTexObjectCreate"))

        while len(self._held) < MOST and not (handle > POOL and handle % POOL == POOL - 1):  # the pool grew once
            handle = take()
            self._held[handle] = end_texture
        for handle in left:
            if end := self._held.pop(handle, None):
                end(handle)
        others: list[int] = []
        below = False  # those that were not given when the pool grew come next
        while len(others) < ROOM and not (below and handle in left):
            handle = take()
            if handle in left:
                others.append(handle)
            else:
                self._held[handle], below = end_texture, True
        _end(others, end_texture)

    def promise(self) -> int | None:
        """Return a handle that an object to come can have, until :meth:`withdraw`; None while none is reserved."""
        found = next((handle for handle in reversed(self._held) if handle not in self._promised), None)
        if found is not None:
            self._promised.add(found)
        return found

    def withdraw(self, handle: int) -> None:
        """The object has come, or does not come."""
        self._promised.discard(handle)

    def release(self) -> None:
        """Give all back; nothing when none is taken. Raises :class:`DeviceError`."""
        self._promised.clear()
        while self._held:
            handle, end = self._held.popitem()
            end(handle)

    def destroy(self, handle: int, end: End) -> None:
        """Destroy an object of the program; while handles are reserved, it is kept like one that nobody uses.

        What it reads may be gone then: no kernel is given its handle. Raises :class:`DeviceError`.
        """
        if self._held:
            self._held[handle] = end
        else:
            end(handle)

    def make_as(self, handle: int, make: Callable[[], int], end: End) -> None:
        """Make an object with this handle. Raises :class:`DeviceError` where the driver does not give it."""
        if handle > POOL:  # not there before the pool has grown
            self.reserve()
        if held := self._held.pop(handle, None):
            held(handle)
        began = time.monotonic()
        for attempts in itertools.count(1):
            if _ask(handle, make, end):
                break
            if (took := time.monotonic() - began) > (RECOVERY_LAG if self._held else LAG_SECONDS):
                raise DeviceError(f"the driver does not give the texture or surface object that the program knows as "
                                  f"{handle:#x} that handle again: asked {attempts} times in {took:.1f} s, "
                                  f"{len(self._held)} handles reserved, that one {'too' if held else 'not'}",
                                  CUDA_ERROR_NOT_SUPPORTED, wanted=handle, reserved=held is not None)
            time.sleep(PAUSE)


def _ask(handle: int, make: Callable[[], int], end: End) -> bool:
    """Ask until the handle comes, or until all that are free have come; destroy the others."""
    others: list[int] = []  #: of one block
    before, rounds, found = 0, 0, False
    try:
        for _ in range(MOST):
            given = make()
            if others and (others[0] - 1) // BLOCK != (given - 1) // BLOCK:
                _end(others, end)
            if found := given == handle:
                break
            others.append(given)
            rounds, before = rounds + (given < before), given
            if rounds == 2:  # from somewhere to the highest, then all of them, and again the lowest
                break
    except DeviceError:  # none is left, unless the object cannot be made at all
        if not before:
            raise
    _end(others, end)
    return found


def _end(handles: list[int], end: End) -> None:
    while handles:
        end(handles.pop())


def end_texture(handle: int) -> None:
    """Destroy a texture object. Raises :class:`DeviceError`."""
    check(driver.cuTexObjectDestroy(handle), "cuTexObjectDestroy")


def end_surface(handle: int) -> None:
    """Destroy a surface object. Raises :class:`DeviceError`."""
    check(driver.cuSurfObjectDestroy(handle), "cuSurfObjectDestroy")
