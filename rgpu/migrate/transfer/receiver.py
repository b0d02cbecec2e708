"""Receiving end of a session's state, worker to worker: pages while it runs, the rest in the pause.

The messages are in docs/protocols/pages.md.

BEGIN may ask for pages to be pulled (``peer``), and READY answers that; the messages that follow are
in :mod:`.peer_plan`. DONE contains the times of the destination's phases (``phases_ms``).

A page is hashed from the very bytes that are sent, so a page that a kernel changed
meanwhile is found dirty by the next round (DESIGN decision 6). Pages are sent over
the first connection and over ``lanes`` further ones, opened with the same ticket
(each has keys of its own): one thread fills frames of the device's ring, one
thread for each lane seals and sends them. Within a round no page is sent twice,
and a round ends when every credit is back, so each page's writes are in order.

The sending end is :mod:`.sender`.
"""

from __future__ import annotations

import bisect
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages.ring import FRAME, PageRing
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.pages import (
    ACK,
    BEGIN,
    CREDIT,
    DONE,
    FAILED,
    GRANT,
    GRANTED,
    LANE,
    LAYOUT,
    MADE,
    OBJECTS,
    PAGES,
    PULL,
    READY,
    ROUND,
    STATE,
    Answer,
    Begin,
    Lane,
    Layout,
)
from rgpu.migrate.transfer import frames as page_frames
from rgpu.migrate.transfer.frame_lanes import credit
from rgpu.migrate.transfer.peer_plan import encode
from rgpu.migrate.transfer.peer_target import PeerTarget
from rgpu.migrate.transfer.pieces import Pieces
from rgpu.session.errors import Corrupt, LinkError, RgpuError

log = structlog.get_logger(__name__)

MOST_REGIONS = 1 << 20
LANE_WAIT = 10.0  #: seconds that a further connection waits for BEGIN
LINGER = 2.0  #: seconds that a connection stays open for the other side to read the reason of its end

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class Received:
    """State of a destination before it rebuilds the session: pages by address, and the session's state."""

    session: str = ""
    move: str = ""
    hash_key: bytes = b""
    pages: dict[int, bytes] = field(default_factory=dict)  #: pages of regions that could not be written at once
    mapped: set[tuple[int, int]] = field(default_factory=set)
    state: SessionState | None = None


def _last_words(connection: SealedConnection, error: dict[str, Any]) -> None:
    """Send FAILED, and wait until the other side closes the connection.

    Closing a socket with unread bytes resets the connection, and the
    other side loses the bytes that it had not read yet: the reason (RFC 1122, 4.2.2.13).
    """
    connection.send(FAILED, _encode(error))
    with suppress(OSError):
        connection.sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER
        while (left := deadline - time.monotonic()) > 0:
            connection.sock.settimeout(left)
            if not connection.sock.recv(1 << 16):
                return


class PageReceiver:
    """The destination's side: maps memory by the received layout and writes pages as they arrive."""

    def __init__(self, connection: SealedConnection, device: Device, folder: Path | None = None,
                 fault: Callable[[str], object] = lambda point: None) -> None:
        """Make a receiver. ``folder``: where a source on the same host may hand its memory over; None: refused."""
        self.connection = connection
        self.device = device
        self.peer = PeerTarget(connection, device, folder, fault)
        self._answer: Answer | None = None  #: due in the next READY
        self.received = Received()
        self.make: Callable[[bytes], None] | None = None  #: makes objects ahead; None: READY does not offer it
        self._layout: list[Region] = []
        self._starts: list[int] = []  #: addresses of the layout, which is sorted
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._lanes: dict[int, SealedConnection] = {}
        self._most_lanes = 0
        self._error: Exception | None = None

    # -- the first connection ---------------------------------------------------------
    def receive(self) -> Received:
        """Receive everything up to the state. Raises :class:`LinkError`, :class:`Corrupt`, :class:`DeviceError`.

        After an error the caller reports it with :meth:`failed`, which also ends the further connections.
        """
        try:
            return self._receive()
        except Exception as error:
            with self._lock:
                said, self._error = self._error, self._error or error
            if said is not None and isinstance(error, LinkError):  # a lane ended the stream: its error is the reason
                raise said from None
            raise

    def _receive(self) -> Received:
        state, objects = Pieces("a state"), Pieces("objects ahead")
        while True:
            kind, body = self.connection.recv(room=_Room(self.device.page_ring(), 0))
            if kind == PAGES:
                self._pages(self.connection, body)
            elif kind == BEGIN:
                self._begin(_decode(body, Begin))
            elif kind == LAYOUT:
                self._apply_layout([Region(*row) for row in _decode(body, Layout).regions])
                answer, self._answer = self._answer, None
                able = {"objects": 1} if self.make is not None else {}
                self.connection.send(READY, _encode(able if answer is None else {**able, "peer": answer}))
            elif kind == OBJECTS and self.make is not None:
                if (data := objects.take(body)) is not None:
                    began = time.monotonic()
                    self.make(bytes(data))
                    self.connection.send(MADE, _encode({"ms": round((time.monotonic() - began) * 1000, 1)}))
            elif kind == GRANT:
                self.connection.send(GRANTED, encode(self.peer.grant(body)))
            elif kind == PULL:
                self.peer.pull(body, self.received.mapped, self.received.hash_key)
            elif kind == ROUND:
                self.peer.round(body)
                self.connection.send(ACK, b"")
            elif kind == STATE:
                if (data := state.take(body)) is not None:
                    self.received.state = SessionState.decode(bytes(data))
                    self.peer.complete(self.received.state)
                    return self.received
            else:
                raise LinkError(f"unknown message type {kind} on a page link", reason="protocol")

    def _begin(self, value: Begin) -> None:
        if self._begun.is_set() or len(value.hash_key) != 32 or not 0 <= value.lanes < self.device.page_ring().slots:
            raise Corrupt("a page stream begins twice, or with an impossible key or number of lanes", reason="begin")
        self.received.session, self.received.move = value.session, value.move
        self.received.hash_key, self._most_lanes = value.hash_key, value.lanes
        if value.peer is not None:
            self._answer = self.peer.answer(value.peer)
        self._begun.set()

    def done(self, pages: int, phases_ms: dict[str, float] | None = None) -> None:
        """Send DONE: pages received, and the times of phases in ms."""
        self.connection.send(DONE, _encode({"pages": pages, "phases_ms": phases_ms or {}}))

    def failed(self, error: dict[str, Any]) -> None:
        """Report an error to the source. Return once it is read, or after :data:`LINGER`. Raises :class:`LinkError`."""
        try:
            _last_words(self.connection, error)
        finally:
            self.close_lanes()

    # -- further connections ------------------------------------------------------------
    def join(self, connection: SealedConnection) -> None:
        """Serve a further connection to its end, in the caller's thread. An error on it ends the whole stream."""
        try:
            number = self._admit(connection)
        except RgpuError as error:
            log.warning("a lane was refused", error=error.code, reason=error.message)
            connection.close()
            return
        room = _Room(self.device.page_ring(), number)
        try:
            while True:
                kind, body = connection.recv(room=room)
                if kind != PAGES:
                    raise LinkError(f"message type {kind} on a lane for pages", reason="protocol")
                self._pages(connection, body)
        except RgpuError as error:
            self._lane_ended(connection, error)
        except Exception as error:  # noqa: BLE001 - the failure is reported to the source
            log.exception("a lane failed")
            self._lane_ended(connection, RgpuError(f"the destination failed: {error}"))

    def _admit(self, connection: SealedConnection) -> int:
        kind, body = connection.recv(LANE_WAIT)
        if kind != LANE:
            raise LinkError(f"a lane begins with message type {kind}", reason="protocol")
        wanted = _decode(body, Lane)
        if not self._begun.wait(LANE_WAIT) or wanted.move != self.received.move:
            raise LinkError("a lane of another move", reason="move")
        with self._lock:
            if not 1 <= wanted.number <= self._most_lanes or wanted.number in self._lanes:
                raise LinkError(f"lane {wanted.number} of {self._most_lanes}", reason="lane")
            self._lanes[wanted.number] = connection
        connection.send(READY, _encode({}))
        return wanted.number

    def _lane_ended(self, connection: SealedConnection, error: RgpuError) -> None:
        """Close an ended lane; any error but the end of the connection ends the stream.

        A good stream also ends by the end of its connections. A lane that :meth:`close_lanes` removed was closed by
        this side, so the error of its reader is ignored.
        """
        ended = isinstance(error, LinkError) and error.detail.get("reason") == "end of file"
        with self._lock:
            ended = ended or connection not in self._lanes.values()
            first = not ended and self._error is None
            if first:
                self._error = error
        if first:
            with suppress(RgpuError):
                _last_words(connection, error.as_dict())
            if self.received.state is None:
                self.connection.close()  # wakes the thread in receive(), which raises the reason
        connection.close()

    def close_lanes(self) -> None:
        """Close all lanes."""
        with self._lock:
            lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.close()

    # -- pages ----------------------------------------------------------------------------
    def _apply_layout(self, regions: list[Region]) -> None:
        if len(regions) > MOST_REGIONS:
            raise Corrupt(f"a layout of {len(regions)} regions", reason="length")
        end = 0
        for region in sorted(regions, key=lambda region: region.address):
            if region.size <= 0 or region.address < end or region.address + region.size >= 1 << 63:
                raise Corrupt(f"a layout with the region {region.address:#x}+{region.size:#x}", reason="region")
            end = region.address + region.size
        wanted = {(r.address, r.size) for r in regions if r.kind == "mapped"}
        self.peer.follow(wanted)
        for address, size in self.received.mapped - wanted:
            self.device.unmap(address, size)
        for address, size in wanted - self.received.mapped:
            self.device.map(address, size)
        self.received.mapped = wanted
        self._layout = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._layout]
        self.received.pages = {a: p for a, p in self.received.pages.items() if self._region_at(a) is not None}

    def _pages(self, connection: SealedConnection, body: Any) -> None:
        self._take(body)
        connection.send(CREDIT, credit(1))

    def _take(self, body: Any) -> None:
        """Verify and write the pages of one message. Raises :class:`Corrupt`, :class:`DeviceError`."""
        entries, data = page_frames.parse(body)
        now: list[tuple[int, int, Any]] = []
        for run in page_frames.verified(entries, data, self.received.hash_key):
            for address, size, mapped in self._pieces(run.address, run.size):
                piece = None if run.data is None else run.data[address - run.address:address - run.address + size]
                if mapped:
                    now.append((address, size, piece))
                else:
                    self._keep(address, size, piece)
        if now:
            self.device.write_pages(now)

    def _pieces(self, address: int, size: int) -> Iterator[tuple[int, int, bool]]:
        """Split a run where regions end: (address, size, mapped). Raises :class:`Corrupt` outside the layout."""
        end = address + size
        while address < end:
            region = self._region_at(address)
            if region is None:
                raise Corrupt(f"a page for {address:#x}, where the session has no region", address=address,
                              reason="no region")
            stop = min(end, region.address + region.size)
            yield address, stop - address, region.kind == "mapped"
            address = stop

    def _region_at(self, address: int) -> Region | None:
        index = bisect.bisect_right(self._starts, address) - 1
        region = self._layout[index] if index >= 0 else None
        return region if region is not None and address < region.address + region.size else None

    def _keep(self, address: int, size: int, data: Any) -> None:
        with self._lock:
            for at in range(0, size, PAGE):
                length = min(PAGE, size - at)
                self.received.pages[address + at] = bytes(length if data is None else data[at:at + length])


class _Room:
    """Buffer in which messages of one lane are opened: its slot of the ring, for one message at a time."""

    def __init__(self, ring: PageRing, slot: int) -> None:
        self._frame = ring.frame(slot)

    def __call__(self, length: int) -> memoryview | None:
        return self._frame[:length] if length <= FRAME else None


def _decode(body: Any, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a message of a page stream cannot be read: {error}", reason="msgpack") from error
