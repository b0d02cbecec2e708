"""Peer transfer: the protocol by which another worker of the same host pulls pages out of a device's memory.

The physical memory behind a mapping is handed over as a file descriptor. The
other worker maps it read-only at an address of its own, and copies from there
to its own mapping. Neither side's work is ordered with the other's: a copy made
while the source runs may mix old and new bytes, as with any read of live
memory, and the side that pulls hashes the bytes that it copied.

A mapping's *serial* names the physical memory behind it: an address that is
unmapped and mapped again has another one. An import of the first is useless
then, but harmless: the memory lives until it is dismissed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Imported:
    """Memory of another worker's mapping [address, address + size). ``place``: opaque, used by the device only."""

    address: int
    size: int
    serial: int
    place: Any


class PeerMemory(Protocol):
    """Thread-safe. Every method raises :class:`DeviceError` for what cannot be done."""

    kind: str  #: both sides must have the same

    def serial(self, address: int, size: int) -> int | None:
        """Return the serial number of the mapping of exactly this address and size; None if there is none."""

    def export(self, address: int, size: int) -> tuple[int, int]:
        """Return (serial, file descriptor) of a mapping; the caller closes the descriptor."""

    def admit(self, granted: Sequence[tuple[int, int, int, int]]) -> list[Imported]:
        """Import each (address, size, serial, descriptor): all or none. The caller keeps and closes the descriptors."""

    def pull(self, copies: Sequence[tuple[Imported, int, int]]) -> None:
        """Copy each (from, address, bytes) to the same address of this device's own mappings; returns when done."""

    def dismiss(self, imports: Sequence[Imported]) -> None:
        """Release imports; none of them is being pulled from."""
