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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lz4.block
import msgspec
import structlog

from rgpu.checkpoint import pagehash
from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.pages import Page, PageTable, collect_dirty
from rgpu.checkpoint.state import SessionState
from rgpu.link.frames import SealedConnection
from rgpu.session.errors import Corrupt, LinkError, MoveFailed, from_dict

log = structlog.get_logger(__name__)

BEGIN, LAYOUT, PAGES, ROUND, STATE = 32, 33, 34, 35, 36
ACK, DONE, FAILED = 40, 41, 42
RAW, LZ4, ZERO = 0, 1, 2
_PAGE = struct.Struct("<QIIB")
BATCH = 32  #: pages in one frame: 2 MiB at most
PIECE = 1 << 20

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
                 fault: Callable[[str], object] = lambda point: None) -> None:
        self.connection = connection
        self.device = device
        self.fault = fault
        self.table = PageTable(key)
        self.statistics = Statistics()

    def begin(self, session: str, move: str) -> None:
        self.connection.send(BEGIN, _encode({"session": session, "move": move, "hash_key": self.table.key}))

    def round(self) -> int:
        """Send every page that differs from what was last sent; returns how many did."""
        regions = self.device.regions()
        self.connection.send(LAYOUT, _encode({"regions": [[r.address, r.size, r.kind, r.owner] for r in regions]}))
        self.statistics.pages_total = sum(pagehash.page_count(region.size) for region in regions)
        before = self.statistics.pages_sent
        batch: list[bytes] = []
        for page in collect_dirty(self.device, self.table, regions):
            batch.append(self._record(page))
            if not self.statistics.rounds:
                self.fault("page")
            if len(batch) >= BATCH:
                self._flush(batch)
        self._flush(batch)
        self.statistics.rounds += 1
        self.statistics.last_round_pages = self.statistics.pages_sent - before
        self.connection.send(ROUND, _encode({"round": self.statistics.rounds}))
        self._expect(ACK)
        return self.statistics.last_round_pages

    def finish(self, state: SessionState) -> None:
        """Send the rest of the session; returns once the other side verified every page.

        Raises :class:`MoveFailed`, or what the destination reports.
        """
        self.fault("state")
        data = memoryview(state.encode())
        for at in range(0, max(1, len(data)), PIECE):
            last = at + PIECE >= len(data)
            self.connection.send(STATE, bytes([last]), data[at:at + PIECE])
        self.fault("verify")
        self._expect(DONE)

    def _record(self, page: Page) -> bytes:
        self.statistics.pages_sent += 1
        if page.data is None:
            return _PAGE.pack(page.address, page.size, 0, ZERO)
        packed = lz4.block.compress(page.data, store_size=False)
        if len(packed) < len(page.data) * 3 // 4:
            return _PAGE.pack(page.address, page.size, len(packed), LZ4) + packed
        return _PAGE.pack(page.address, page.size, page.size, RAW) + page.data

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


@dataclass
class Received:
    """What a destination holds before it rebuilds: pages by address, and the state."""

    session: str = ""
    move: str = ""
    hash_key: bytes = b""
    pages: dict[int, bytes] = field(default_factory=dict)  #: of regions that could not be written at once
    mapped: set[tuple[int, int]] = field(default_factory=set)
    state: SessionState | None = None


class PageReceiver:
    """The destination's side: maps memory as the layout says and writes pages as they come."""

    def __init__(self, connection: SealedConnection, device: Device) -> None:
        self.connection = connection
        self.device = device
        self.received = Received()
        self._layout: list[Region] = []

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
                    self.received.state = SessionState.decode(b"".join(pieces))
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
