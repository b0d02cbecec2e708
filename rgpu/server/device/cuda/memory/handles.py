"""Handles of texture and surface objects of one context: how a rebuild obtains the handles that the program holds.

Observed behaviour of driver 580.159.04 (H100, H200; ``pytest -m gpu tests/server/device/cuda/memory/test_arrays.py``):
a context has one pool of handles for both kinds, in blocks of 64. A new handle is the lowest free one of the block that
the last one was in, or, if that is full, of the next block above, and after the highest block the lowest. The pool
grows by 65536 numbers, which are used next, when all but 8192 are in use. A destroyed handle is free when the work
submitted before is complete. Copies between arrays and memory take handles for the driver's own use, 13 at a time for
126 kinds of arrays, and free them at moments that no rebuild repeats; a handle that one of them holds cannot be
obtained.

Therefore a rebuild makes objects until one has the wanted handle, and destroys the others when their block is full, so
that the search has passed them. Before a recovery makes its first array, :meth:`Handles.reserve` takes nearly all
handles, by unused objects (3 µs each): a wanted handle is then freed and requested, and nothing else can take it. An
object that the program destroys meanwhile is kept, for the same reason; one that it creates is made when its handle is
known. A replay first waits until no work is under way (``session/journal/apply_order.py``).
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
MOST = 3 * POOL  #: objects made in one attempt
UNUSED = 8192  #: handles of a pool that are free when it grows
ROOM = 256  #: handles that are left free: a block to search, and for the driver's own use
BLOCK = 64  #: from 1 on
STEP = 1024  #: distance between the handles that one owner leaves free and those that the next one leaves
LAG_SECONDS = 5.0  #: a handle may become free this much later than the work that may use it is known to be complete
RECOVERY_LAG = 30.0  #: the same in a recovery, where giving up would lose the session, on a host that may be overloaded
_UNUSED_SIZE = 512  #: bytes
PAUSE = 0.001  #: seconds between two attempts


End = Callable[[int], None]  #: destroys an object


class Handles:
    """See the module docstring. Every method needs the context current."""

    def __init__(self) -> None:
        self.owner = 0  #: number of the session's owner: rises with each
        self._held: dict[int, End] = {}  #: handles of unused objects
        self._promised: set[int] = set()  #: of these
        self._unused = driver.CUDA_RESOURCE_DESC()  #: resource of the objects of :meth:`reserve`

    def open(self) -> None:
        """Allocate the memory that :meth:`reserve` needs. Raises :class:`DeviceError`."""
        self._unused.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        linear = self._unused.res.linear
        linear.devPtr, linear.sizeInBytes = check(driver.cuMemAlloc(_UNUSED_SIZE), "cuMemAlloc"), _UNUSED_SIZE
        linear.format, linear.numChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1

    def reserve(self) -> None:
        """Take all handles but :data:`UNUSED` and :data:`ROOM`; nothing when some are taken.

        :attr:`owner` decides which are left: the program is given handles from these later, and the driver takes some
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
        below = False  # handles not yet given when the pool grew follow first
        while len(others) < ROOM and not (below and handle in left):
            handle = take()
            if handle in left:
                others.append(handle)
            else:
                self._held[handle], below = end_texture, True
        _end(others, end_texture)

    def promise(self) -> int | None:
        """Promise a handle to an object to be made, until :meth:`withdraw`; None while none is reserved."""
        found = next((handle for handle in reversed(self._held) if handle not in self._promised), None)
        if found is not None:
            self._promised.add(found)
        return found

    def withdraw(self, handle: int) -> None:
        """End a promise: the object was made, or will not be."""
        self._promised.discard(handle)

    def release(self) -> None:
        """Free all reserved handles; nothing when none is taken. Raises :class:`DeviceError`."""
        self._promised.clear()
        while self._held:
            handle, end = self._held.popitem()
            end(handle)

    def destroy(self, handle: int, end: End) -> None:
        """Destroy an object of the program; while handles are reserved, it is kept as an unused one.

        The memory that it reads may be freed then: no kernel is given its handle. Raises :class:`DeviceError`.
        """
        if self._held:
            self._held[handle] = end
        else:
            end(handle)

    def make_as(self, handle: int, make: Callable[[], int], end: End) -> None:
        """Make an object with this handle. Raises :class:`DeviceError` where the driver does not give it."""
        if handle > POOL:  # it does not exist before the pool has grown
            self.reserve()
        if held := self._held.pop(handle, None):
            held(handle)
        began = time.monotonic()
        for attempts in itertools.count(1):
            if _ask(handle, make, end):
                break
            if (took := time.monotonic() - began) > (RECOVERY_LAG if self._held else LAG_SECONDS):
                raise DeviceError(f"the driver does not give the program's texture or surface object {handle:#x} its "
                                  f"handle again: asked {attempts} times in {took:.1f} s, "
                                  f"{len(self._held)} handles reserved, that one {'too' if held else 'not'}",
                                  CUDA_ERROR_NOT_SUPPORTED, wanted=handle, reserved=held is not None)
            time.sleep(PAUSE)


def _ask(handle: int, make: Callable[[], int], end: End) -> bool:
    """Make objects until one has the handle, or until all free handles have occurred; destroys the others."""
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
