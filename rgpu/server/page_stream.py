"""The state of a session, worker to worker: pages while it runs, the rest in the pause.

Messages on a sealed link of purpose "pages" (types 32 to 40, bodies msgpack
unless said):

=========  ==========================================================  ===============
type       body                                                        direction
=========  ==========================================================  ===============
32 BEGIN   {session, move, hash_key, facts}                            source → dest
33 LAYOUT  {regions: [[address, size, kind, owner], …]}                source → dest
34 PAGES   records: u64 address, u32 size, u32 stored, u8 codec, data  source → dest
35 ROUND   {round}: answered by ACK when all before it was taken       source → dest
36 STATE   piece of the msgpack of SessionState (u8 last, bytes)       source → dest
40 ACK     {round}                                                     dest → source
41 DONE    {pages}: every page was verified                            dest → source
42 FAILED  an error's dict                                             dest → source
=========  ==========================================================  ===============

Codec 0 raw, 1 lz4 block, 2 zero page (nothing stored). A page is hashed from
the very bytes that are sent, so one that a kernel changed meanwhile is found
dirty by the next round (DESIGN decision 6).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lz4.block
import msgspec
import numpy as np
import structlog

from rgpu.checkpoint import pagehash
from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.link.frames import SealedConnection
from rgpu.session.errors import Corrupt, LinkError, MoveFailed, from_dict

log = structlog.get_logger(__name__)

BEGIN, LAYOUT, PAGES, ROUND, STATE = 32, 33, 34, 35, 36
ACK, DONE, FAILED = 40, 41, 42
RAW, LZ4, ZERO = 0, 1, 2
_PAGE = struct.Struct("<QIIB")
BATCH = 32  #: pages in one frame: 2 MiB at most
PIECE = 1 << 20
CHUNK = 16 * PAGE  #: bytes read from the device at once

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


@dataclass
class Statistics:
    """What ``rgpu migrate`` reports about the pages."""

    rounds: int = 0
    pages_total: int = 0
    pages_sent: int = 0
    bytes_sent: int = 0
    last_round_pages: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class PageSender:
    """The source's side. ``fault`` is called with the name of each step: tests break things there."""

    def __init__(self, connection: SealedConnection, device: Device, key: bytes,
                 fault: Callable[[str], None] = lambda point: None) -> None:
        self.connection = connection
        self.device = device
        self.key = key
        self.fault = fault
        self.sent: dict[tuple[int, int, str], np.ndarray] = {}  #: region → hash of what was last sent for each page
        self.statistics = Statistics()

    def begin(self, session: str, move: str) -> None:
        self.connection.send(BEGIN, _encode({"session": session, "move": move, "hash_key": self.key}))

    def round(self) -> int:
        """Send every page that differs from what was last sent; returns how many did."""
        regions = self.device.regions()
        self.connection.send(LAYOUT, _encode({"regions": [[r.address, r.size, r.kind, r.owner] for r in regions]}))
        alive = {_name(region) for region in regions}
        self.sent = {name: hashes for name, hashes in self.sent.items() if name in alive}
        before = self.statistics.pages_sent
        batch: list[bytes] = []
        self.statistics.pages_total = sum(-(-region.size // PAGE) for region in regions)
        for region in regions:
            for record in self._dirty(region):
                batch.append(record)
                if len(batch) >= BATCH:
                    self._flush(batch)
            self.fault("page")
        self._flush(batch)
        self.statistics.rounds += 1
        self.statistics.last_round_pages = self.statistics.pages_sent - before
        self.connection.send(ROUND, _encode({"round": self.statistics.rounds}))
        self._expect(ACK)
        return self.statistics.last_round_pages

    def finish(self, state: dict[str, Any]) -> None:
        """Send the rest of the session; returns once the other side verified every page.

        Raises :class:`MoveFailed` (or what the destination reports) otherwise.
        """
        self.fault("state")
        data = memoryview(_encode(state))
        for at in range(0, max(1, len(data)), PIECE):
            last = at + PIECE >= len(data)
            self.connection.send(STATE, bytes([last]), data[at:at + PIECE])
        self.fault("verify")
        self._expect(DONE)

    def hashes(self) -> list[tuple[Region, np.ndarray]]:
        """What every page must hash to at the destination."""
        return [(region, self.sent[_name(region)]) for region in self.device.regions()]

    def _dirty(self, region: Region) -> Iterator[bytes]:
        """Wire records of the region's pages that changed since they were last sent."""
        known = self.sent.setdefault(_name(region), np.zeros((-(-region.size // PAGE), 2), np.uint64))
        first_time = not known.any()
        for at in range(0, region.size, CHUNK):
            length = min(CHUNK, region.size - at)
            data = self.device.read(region.address + at, length)
            hashes = pagehash.hash_bytes(data, self.key)
            start = at // PAGE
            changed = np.ones(len(hashes), bool) if first_time else (known[start:start + len(hashes)] != hashes).any(axis=1)
            for index in np.flatnonzero(changed):
                page = data[index * PAGE:min((index + 1) * PAGE, length)]
                yield self._record(region.address + at + int(index) * PAGE, page)
            known[start:start + len(hashes)] = hashes

    def _record(self, address: int, page: bytes) -> bytes:
        self.statistics.pages_sent += 1
        if not any(page[:64]) and not np.frombuffer(page, np.uint8).any():
            return _PAGE.pack(address, len(page), 0, ZERO)
        packed = lz4.block.compress(page, store_size=False)
        if len(packed) < len(page) * 3 // 4:
            return _PAGE.pack(address, len(page), len(packed), LZ4) + packed
        return _PAGE.pack(address, len(page), len(page), RAW) + page

    def _flush(self, batch: list[bytes]) -> None:
        if batch:
            data = b"".join(batch)
            self.statistics.bytes_sent += len(data)
            self.connection.send(PAGES, data)
            batch.clear()

    def _expect(self, wanted: int) -> None:
        kind, body = self.connection.recv()
        if kind == FAILED:
            raise from_dict(_decode(body))
        if kind != wanted:
            raise MoveFailed(f"the destination answered with message type {kind} instead of {wanted}")


def _name(region: Region) -> tuple[int, int, str]:
    return region.address, region.size, region.kind


@dataclass
class Received:
    """What a destination holds before it rebuilds: pages by address, and the state."""

    session: str = ""
    move: str = ""
    hash_key: bytes = b""
    pages: dict[int, bytes] = field(default_factory=dict)  #: of regions that could not be written at once
    mapped: set[tuple[int, int]] = field(default_factory=set)
    state: dict[str, Any] = field(default_factory=dict)


class PageReceiver:
    """The destination's side: maps memory as the layout says and writes pages as they come."""

    def __init__(self, connection: SealedConnection, device: Device) -> None:
        self.connection = connection
        self.device = device
        self.received = Received()
        self._layout: list[Region] = []
        self.started = time.monotonic()

    def receive(self) -> Received:
        """Take everything up to the state. Raises :class:`LinkError`, :class:`Corrupt`, :class:`DeviceError`."""
        pieces: list[bytes] = []
        while True:
            kind, body = self.connection.recv()
            if kind == BEGIN:
                value = _decode(body)
                self.received.session, self.received.move = value["session"], value["move"]
                self.received.hash_key = value["hash_key"]
            elif kind == LAYOUT:
                self._apply_layout([Region(*row) for row in _decode(body)["regions"]])
            elif kind == PAGES:
                self._take(body)
            elif kind == ROUND:
                self.connection.send(ACK, bytes(body))
            elif kind == STATE:
                pieces.append(bytes(body[1:]))
                if body[0]:
                    self.received.state = _decode(b"".join(pieces))
                    return self.received
            else:
                raise LinkError(f"unknown message type {kind} on a page link")

    def done(self, pages: int) -> None:
        self.connection.send(DONE, _encode({"pages": pages}))

    def failed(self, error: dict[str, Any]) -> None:
        self.connection.send(FAILED, _encode(error))

    def _apply_layout(self, regions: list[Region]) -> None:
        wanted = {(r.address, r.size) for r in regions if r.kind == "mapped"}
        for address, size in self.received.mapped - wanted:
            self.device.unmap(address, size)
        for address, size in wanted - self.received.mapped:
            self.device.map(address, size)
        self.received.mapped = wanted
        self._layout = regions
        alive = {r.address: r.size for r in regions}
        self.received.pages = {a: p for a, p in self.received.pages.items()
                               if any(b <= a < b + s for b, s in alive.items())}

    def _take(self, body: Any) -> None:
        at, view = 0, memoryview(body)
        while at < len(view):
            if at + _PAGE.size > len(view):
                raise Corrupt(f"page record at offset {at} is cut short", offset=at, reason="truncated")
            address, size, stored, codec = _PAGE.unpack_from(view, at)
            at += _PAGE.size
            if size > PAGE or stored > PAGE or at + stored > len(view):
                raise Corrupt(f"page record at offset {at} has impossible sizes {size}, {stored}", offset=at,
                              reason="size")
            data = unpack(view[at:at + stored], size, codec)
            at += stored
            if any(start <= address and address + size <= start + length for start, length in self.received.mapped):
                self.device.write(address, data)
            else:
                self.received.pages[address] = data


def unpack(stored: Any, size: int, codec: int) -> bytes:
    """One page from its stored form. Raises :class:`Corrupt`."""
    if codec == ZERO:
        return bytes(size)
    if codec == RAW and len(stored) == size:
        return bytes(stored)
    if codec == LZ4:
        try:
            data = lz4.block.decompress(bytes(stored), uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise Corrupt(f"a page does not decompress: {error}", reason="lz4") from error
        if len(data) == size:
            return data
    raise Corrupt(f"a page of {size} bytes has codec {codec} and {len(stored)} stored bytes", reason="codec")
