"""Places modules at their former addresses: memory that is free before the wanted place is taken while they load.

The place of a module's variables follows from the state of the driver's own allocator at that moment. It hands out
pieces of :data:`PIECE` bytes, the first free one of its arenas in the order in which it mapped them, to variables, to
the code of kernels that were launched, to streams, to cuMemAlloc (docs/developers/modules.md). A rebuild makes a
session's objects, but does not repeat its whole history, so that other pieces are free then. :class:`Fillers` are
allocations that take the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog
from cuda.bindings import driver

from rgpu.session.objects.module_table import GlobalVariable

log = structlog.get_logger(__name__)

PIECE = 2 << 20
MOST = 1024  #: fillers of one rebuild: 2 GiB of device memory
WIDE = 64  #: pieces of one module's variables; beyond that steering is not tried
TRIES = 4  #: loads of one module


def missed(present: Sequence[GlobalVariable], wanted: Sequence[GlobalVariable]) -> frozenset[int]:
    """Return addresses of the pieces that hold the wanted but misplaced variables; none where that cannot be corrected.

    It cannot where the load gave other variables than before, or where they take more than :data:`WIDE` pieces.
    """
    here = {(variable.name, variable.address) for variable in present}
    if len(present) != len(wanted):
        return frozenset()
    pieces = {address for variable in wanted if (variable.name, variable.address) not in here
              for address in range(variable.address // PIECE * PIECE, variable.address + variable.size, PIECE)}
    return frozenset(pieces) if len(pieces) <= WIDE else frozenset()


class Fillers:
    """Allocations of the driver's allocator, held until :meth:`release`. The caller's context is current."""

    def __init__(self, allocate: Callable[[], int | None], free: Callable[[int], Any]) -> None:
        """Hold nothing yet. ``allocate``: returns the address of a new piece of :data:`PIECE` bytes, or None."""
        self._allocate, self._free = allocate, free
        self._held: list[int] = []

    def leave_free(self, pieces: Collection[int]) -> bool:
        """Allocate until these pieces are taken, then free them: they are the first to be handed out next.

        False: one of them is not available, because it is in use; no more is held then than before.
        """
        before = len(self._held)
        left = set(pieces).difference(self._held)
        while left and len(self._held) < MOST:
            address = self._allocate()
            if address is None:
                break
            self._held.append(address)
            left.discard(address)
        if left:
            self._free_all(self._held[before:])
        else:
            self._free_all([address for address in self._held if address in pieces])
        return not left

    def release(self) -> None:
        """Free all held pieces."""
        self._free_all(list(self._held))

    def _free_all(self, pieces: Collection[int]) -> None:
        for address in pieces:
            self._free(address)
        self._held = [address for address in self._held if address not in pieces]

    def __len__(self) -> int:
        return len(self._held)


def driver_fillers() -> Fillers:
    """Return fillers of the current context."""
    def allocate() -> int | None:
        error, address = driver.cuMemAlloc(PIECE)
        return None if int(error) else int(address)

    return Fillers(allocate, driver.cuMemFree)


def steer(load: Callable[[], Any], unload: Callable[[Any], None], variables: Callable[[Any], Sequence[GlobalVariable]],
          wanted: Sequence[GlobalVariable], fillers: Fillers, idle: Callable[[], bool]) -> Any:
    """Return the result of ``load``, repeated behind fillers until its variables are at their wanted places, if
    possible.

    ``idle``: called before each repetition; whether the driver has no work that waits for later calls. Unloading a
    module and freeing memory wait for the device.
    """
    loaded = load()
    for _ in range(TRIES - 1 if wanted else 0):
        pieces = missed(variables(loaded), wanted)
        if not pieces or not idle():
            break
        unload(loaded)
        reached = fillers.leave_free(pieces)
        log.info("a module is loaded again behind fillers", pieces=[hex(piece) for piece in sorted(pieces)],
                 fillers=len(fillers), reached=reached)
        loaded = load()
        if not reached:
            break
    return loaded
