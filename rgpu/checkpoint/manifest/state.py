"""A session's state apart from its pages, as a checkpoint's manifest and a move carry it.

Encoded as msgpack with these field names; decoding is strict (types, lengths)
and raises :class:`Corrupt`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rgpu.checkpoint.device import Region
from rgpu.checkpoint.pages import pagehash
from rgpu.session.errors import Corrupt

VERSION = 1
MAX_REGIONS = 1 << 20
_KINDS = ("mapped", "global", "pinned")


class RegionState(msgspec.Struct, frozen=True):
    """One region; ``hashes``: 16 bytes a page (:func:`rgpu.checkpoint.pages.pagehash.pack`), empty while unknown."""

    address: int
    size: int
    kind: str
    owner: int = 0
    name: str = ""
    hashes: bytes = b""

    def region(self) -> Region:
        """Return the device's region of which this is the state."""
        return Region(self.address, self.size, self.kind, self.owner, self.name)

    def page_hashes(self) -> np.ndarray[Any, Any]:
        """Return the hashes of its pages: (pages, 2) uint64."""
        return pagehash.unpack(self.hashes)


class SessionState(msgspec.Struct, kw_only=True):
    """See the module docstring.

    ``live``: the dict of :mod:`rgpu.session.objects.live_format`, opaque here. ``events``:
    event → session-clock ns of its last completed record, or None. ``clock``:
    session clock, ns. ``answers``: answers that the program has not confirmed, as
    the worker keeps them. ``printed``: [number of bytes that kernels printed so far, the bytes
    at the end that might not have been delivered] (:mod:`rgpu.session.printed`). ``contributions``: contributions of
    ranks to collectives with other sessions, as :mod:`rgpu.server.collectives.contributions` keeps them;
    ``given``: how many of those it gave (:mod:`rgpu.server.collectives.given`).
    ``position``: the last applied journal position.
    ``hash_key``: 32 bytes, key of the page hashes.
    """

    version: int = VERSION
    session: str
    epoch: int
    position: int
    hash_key: bytes
    regions: list[RegionState]
    live: Any = None
    events: dict[int, int | None] = {}
    clock: int = 0
    answers: Any = None
    printed: Any = None
    contributions: Any = msgspec.UNSET  #: left out where there are none
    given: Any = msgspec.UNSET  #: left out where there are none
    device: dict[str, Any] = {}  #: name, compute capability and driver version of the device where it was taken

    def encode(self) -> bytes:
        """Encode the state as msgpack, the form that manifests and moves carry."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> SessionState:
        """Decode a state. Raises :class:`Corrupt` for anything but a well-formed state of this version."""
        try:
            state = msgspec.msgpack.decode(data, type=SessionState)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Corrupt(f"session state does not decode: {error}", offset=0, reason="msgpack") from error
        state.check()
        return state

    def check(self) -> None:
        """Check the invariants that every reader may rely on. Raises :class:`Corrupt`."""

        def bad(reason: str) -> Corrupt:
            return Corrupt(f"session state: {reason}", offset=0, reason=reason)

        if self.version != VERSION:
            raise bad(f"version {self.version}, {VERSION} wanted")
        if len(self.hash_key) != pagehash.KEY_BYTES:
            raise bad(f"hash key of {len(self.hash_key)} bytes")
        if self.position < 0 or self.epoch < 0 or len(self.regions) > MAX_REGIONS:
            raise bad("position, epoch or number of regions out of range")
        end = -1
        for region in self.regions:
            if region.kind not in _KINDS or region.size <= 0 or region.address < end:
                raise bad(f"region {region.address:#x}+{region.size:#x} {region.kind!r} (order, size or kind)")
            end = region.address + region.size
            if end >= 1 << 63:
                raise bad(f"region {region.address:#x}+{region.size:#x} ends outside the address space")
            if region.hashes and len(region.hashes) != 16 * pagehash.page_count(region.size):
                raise bad(f"region {region.address:#x}: {len(region.hashes)} bytes of page hashes")
