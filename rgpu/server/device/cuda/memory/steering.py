"""Modules put where they stood: what is free before the wanted place is taken while they load.

Where a module's variables land follows from what the driver's own allocator holds at that moment. It gives out pieces
of :data:`PIECE` bytes, the first free one of its arenas in the order in which it mapped them, to variables, to the code
of kernels that were launched, to streams, to cuMemAlloc (docs/developers/modules.md). A rebuild makes a session's
objects, and not all that the session went through, so that other pieces are free then. :class:`Fillers` are allocations
that take the difference.
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
WIDE = 64  #: pieces of one module's variables, beyond which nothing is tried
TRIES = 4  #: loads of one module


def missed(present: Sequence[GlobalVariable], wanted: Sequence[GlobalVariable]) -> frozenset[int]:
    """Addresses of the pieces that hold wanted variables which do not stand there; none where it cannot be mended.

    That is where the load gave other variables than before, or where they take more than :data:`WIDE` pieces.
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
        """``allocate``: a piece of :data:`PIECE` bytes; its address, None where there is none to be had."""
        self._allocate, self._free = allocate, free
        self._held: list[int] = []

    def leave_free(self, pieces: Collection[int]) -> bool:
        """Take pieces until these are taken, and free these: they are the first to be given out then.

        False: one of them is not to be had, because something else has it; no more is taken then than before.
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
        """Free them all."""
        self._free_all(list(self._held))

    def _free_all(self, pieces: Collection[int]) -> None:
        for address in pieces:
            self._free(address)
        self._held = [address for address in self._held if address not in pieces]

    def __len__(self) -> int:
        return len(self._held)


def driver_fillers() -> Fillers:
    """Fillers of the current context."""
    def allocate() -> int | None:
        error, address = driver.cuMemAlloc(PIECE)
        return None if int(error) else int(address)

    return Fillers(allocate, driver.cuMemFree)


def steer(load: Callable[[], Any], unload: Callable[[Any], None], variables: Callable[[Any], Sequence[GlobalVariable]],
          wanted: Sequence[GlobalVariable], fillers: Fillers, idle: Callable[[], bool]) -> Any:
    """What ``load`` gives, loaded again behind fillers until its variables stand where wanted, where that can be.

    ``idle``: asked before; whether the driver has no work that waits for calls still to come. Unloading a module and
    freeing memory wait for the device.
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
