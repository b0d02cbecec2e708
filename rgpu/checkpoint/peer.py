"""What a device offers so that another worker of the same host can pull pages out of its memory.

The physical memory behind a mapping is handed over as a file descriptor. The
other worker takes it in at a place of its own, from which it can only read, and
copies from there to its own mapping. Neither side's work is ordered with the
other's: what is copied while the source runs is some mixture, as with any read
of live memory, and the side that pulls hashes what it has got.

A mapping's *serial* names the physical memory behind it: an address that is
unmapped and mapped again has another one, and an import of the first is of no
use any more (nor of any harm: the memory lives until it is let go of).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Imported:
    """Memory of another worker's mapping [address, address + size). ``place``: the device's own business."""

    address: int
    size: int
    serial: int
    place: Any


class PeerMemory(Protocol):
    """Thread-safe. Every method raises :class:`DeviceError` for what cannot be done."""

    kind: str  #: both sides must have the same

    def serial(self, address: int, size: int) -> int | None:
        """Serial number of the mapping that is just so; None if there is none."""

    def export(self, address: int, size: int) -> tuple[int, int]:
        """(serial, a descriptor of the caller's) of a mapping."""

    def admit(self, granted: Sequence[tuple[int, int, int, int]]) -> list[Imported]:
        """Take in (address, size, serial, descriptor) …: all or none. The descriptors stay the caller's."""

    def pull(self, copies: Sequence[tuple[Imported, int, int]]) -> None:
        """Copy (from, address, bytes) … to the same addresses of this device's own mappings; returns when done."""

    def dismiss(self, imports: Sequence[Imported]) -> None:
        """Let go of them; nothing is being pulled from them."""
