"""Fingerprint of a session at one position, small enough to keep and compare: a digest of each page and live object.

A snapshot is taken of a device (behind a replay) or of a stored checkpoint, and is
independent of both: page digests are BLAKE3 of the bytes, without a key, so
that replays on different devices and days can be compared. Its file is JSON;
readers treat it as untrusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import blake3
import msgspec

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.session.errors import Corrupt
from rgpu.session.objects.live import LiveObjects

VERSION = 1
DIGEST = 16  #: bytes
READ = 256 * PAGE  #: bytes read from a device at once
MAX_FILE = 1 << 30


class RegionPages(msgspec.Struct, frozen=True):
    """A region and the digest of each of its pages, hexadecimal, one behind the other."""

    address: int
    size: int
    kind: str
    owner: int
    name: str
    pages: str

    def page(self, index: int) -> str:
        """Return the hexadecimal digest of page ``index``."""
        return self.pages[2 * DIGEST * index:2 * DIGEST * (index + 1)]

    @property
    def count(self) -> int:
        """Pages of the region."""
        return -(-self.size // PAGE)

    @property
    def identity(self) -> tuple[int, int, str]:
        return self.address, self.size, self.kind


class Snapshot(msgspec.Struct, kw_only=True):
    """See the module docstring. ``objects``: "kind number" → digest of the calls that the object consists of."""

    snapshot: int = VERSION
    session: str
    position: int
    source: str = ""  #: origin, for people
    regions: list[RegionPages] = []
    objects: dict[str, str] = {}

    def encode(self) -> bytes:
        """Encode the snapshot as JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> Snapshot:
        """Decode a snapshot. Raises :class:`Corrupt` for anything but a well-formed snapshot of this version."""
        try:
            found = msgspec.json.decode(data, type=Snapshot)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Corrupt(f"this is no snapshot: {error}", offset=0, reason="json") from None
        end = -1
        for region in found.regions:
            if region.size <= 0 or region.address < end or len(region.pages) != 2 * DIGEST * region.count:
                raise Corrupt(f"snapshot: region {region.address:#x}+{region.size:#x} (order, size or pages)", offset=0,
                              reason="region")
            end = region.address + region.size
        if found.snapshot != VERSION or found.position < 0 or end >= 1 << 63:
            raise Corrupt("snapshot: version, position or addresses out of range", offset=0, reason="range")
        return found

    @property
    def page_count(self) -> int:
        return sum(region.count for region in self.regions)

    def digest(self) -> str:
        """Return one digest of everything but ``source``: equal when the sessions are."""
        plain = msgspec.json.encode([self.session, self.position, self.regions, sorted(self.objects.items())])
        return blake3.blake3(plain).hexdigest(length=DIGEST)


class ReadableCheckpoint(Protocol):
    """The part of a stored checkpoint's interface that :func:`of_checkpoint` uses."""

    @property
    def state(self) -> SessionState:
        """State of the session at the checkpoint."""

    def read_page(self, region: int, index: int) -> bytes | None:
        """Return a page's bytes; None stands for zeros. Raises :class:`Corrupt`, :class:`StoreError`."""


def take(device: Device, session: str, position: int, live: LiveObjects, source: str = "") -> Snapshot:
    """Take a snapshot of a drained device. Raises :class:`DeviceError`."""
    return Snapshot(session=session, position=position, source=source, objects=_objects(live),
                    regions=[_region(region, _read(device, region)) for region in _sorted(device.regions())])


def of_checkpoint(checkpoint: ReadableCheckpoint, source: str = "") -> Snapshot:
    """Make a snapshot of a stored checkpoint, every page of which is read. Raises :class:`Corrupt`,
    :class:`StoreError`.
    """
    state = checkpoint.state
    regions = [_region(item.region(), _stored(checkpoint, number, item.size)) for number,
               item in enumerate(state.regions)]
    return Snapshot(session=state.session, position=state.position, source=source,
                    objects=_objects(LiveObjects.from_dict(state.live)), regions=regions)


def _objects(live: LiveObjects) -> dict[str, str]:
    return {f"{kind} {number:#x}" if number >= 1 << 32 else f"{kind} {number}": digest.hex()
            for kind, number, digest in live.inventory()}


def _sorted(regions: list[Region]) -> list[Region]:
    return sorted(regions, key=lambda region: region.address)


def _region(region: Region, pages: Iterator[bytes]) -> RegionPages:
    digests = "".join(blake3.blake3(page).hexdigest(length=DIGEST) for page in pages)
    return RegionPages(region.address, region.size, region.kind, region.owner, region.name, digests)


def _read(device: Device, region: Region) -> Iterator[bytes]:
    for start in range(0, region.size, READ):
        data = device.read(region.address + start, min(READ, region.size - start))
        for at in range(0, len(data), PAGE):
            yield data[at:at + PAGE]


def _stored(checkpoint: ReadableCheckpoint, number: int, size: int) -> Iterator[bytes]:
    for index, start in enumerate(range(0, size, PAGE)):
        data = checkpoint.read_page(number, index)
        yield bytes(min(PAGE, size - start)) if data is None else data


class Comparison(msgspec.Struct, kw_only=True):
    """Differences between two snapshots, A and B."""

    equal: bool
    position_a: int
    position_b: int
    pages: int  #: number of pages compared, in regions that both have
    pages_differing: int
    first_page: dict[str, Any] | None  #: address, page of its region, the region's address, kind and name
    regions: list[str]  #: one sentence for each region that only one side has
    objects: list[str]  #: one sentence for each object that differs or that only one side has


def compare(a: Snapshot, b: Snapshot) -> Comparison:
    """Compare page by page, object by object. Snapshots of different positions can be compared, but are not equal."""
    there = {region.identity: region for region in b.regions}
    pages = differing = 0
    first: dict[str, Any] | None = None
    for region in a.regions:
        other = there.pop(region.identity, None)
        if other is None:
            continue
        pages += region.count
        if region.pages == other.pages:
            continue
        for index in range(region.count):
            if region.page(index) != other.page(index):
                differing += 1
                if first is None or region.address + index * PAGE < first["address"]:
                    first = {"address": region.address + index * PAGE, "page": index, "region": region.address,
                             "kind": region.kind, "name": region.name}
    regions = _one_sided({r.identity: r for r in a.regions}, {r.identity: r for r in b.regions})
    objects = [f"{name} {_where(a.objects.get(name), b.objects.get(name))}"
               for name in sorted(a.objects.keys() | b.objects.keys()) if a.objects.get(name) != b.objects.get(name)]
    equal = not differing and not regions and not objects and a.position == b.position
    return Comparison(equal=equal, position_a=a.position, position_b=b.position, pages=pages, first_page=first,
                      pages_differing=differing, regions=regions, objects=objects)


def _one_sided(here: dict[tuple[int, int, str], RegionPages], there: dict[tuple[int, int, str], RegionPages]
               ) -> list[str]:
    return [f"{(here.get(key) or there[key]).kind} range {key[0]:#x}+{key[1]:#x} is only in "
            f"{'A' if key in here else 'B'}" for key in sorted(here.keys() ^ there.keys())]


def _where(a: str | None, b: str | None) -> str:
    return "is only in B" if a is None else "is only in A" if b is None else "differs"
