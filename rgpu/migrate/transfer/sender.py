"""The sending end of a page stream: one thread fills frames, one thread for each lane seals and sends them.

:mod:`.receiver` names the messages. The steps overlap: while lanes compress,
seal and send (all without the interpreter's lock), the filling thread copies
and hashes the next pages. The pages under way are bounded by the ring and by the
lanes' credits.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import structlog

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.frozen import FrozenPages, MomentView
from rgpu.checkpoint.pages.pages import PageTable, hash_present, page_size, read_page
from rgpu.checkpoint.pages.ring import FRAME_PAGES
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.pages import (
    ACK,
    BEGIN,
    DONE,
    FAILED,
    LANE,
    LAYOUT,
    MADE,
    OBJECTS,
    READY,
    ROUND,
    STATE,
    ZERO,
    Answer,
)
from rgpu.migrate.transfer import frames as page_frames
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer.frame_lanes import STALL, SendLane
from rgpu.migrate.transfer.peer_source import NoPeer, PeerSource, ask
from rgpu.migrate.transfer.pieces import in_pieces
from rgpu.session.errors import DeviceError, LinkError, MoveFailed, RgpuError, from_dict

log = structlog.get_logger(__name__)

LANES = 4  #: most connections
LANE_SECONDS = 5.0  #: that a further connection may take to be admitted
ZEROS_TOGETHER = 2048  #: pages of zeros in one message

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def lanes_here() -> int:
    """Return the number of connections to open: sealing keeps a processor busy for each, on both sides.

    ``$RGPU_PAGE_LANES`` sets another number (1 to 4), for tests on few processors.
    """
    given = os.environ.get("RGPU_PAGE_LANES", "")
    return max(1, min(LANES, int(given) if given.isdigit() else (os.cpu_count() or 1) // 2))


@dataclass
class Statistics:
    """Page statistics that ``rgpu migrate`` reports."""

    rounds: int = 0
    pages_total: int = 0
    pages_sent: int = 0
    bytes_sent: int = 0
    last_round_pages: int = 0
    bytes_pulled: int = 0  #: part of ``bytes_sent`` that the destination pulled out of the source's memory

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class _Job:
    """Pages for a lane: in a frame of the ring, or (``slot`` None) zeros and pages that were read singly."""

    entries: np.ndarray[Any, Any]
    slot: int | None = None
    stored: Sequence[bytes] = ()


class PageSender:
    """The source's side. ``fault`` is called with the name of each step: tests inject faults there.

    ``more`` opens a further connection to the same destination; without it there is one lane.
    """

    def __init__(self, connection: SealedConnection, device: Device, key: bytes,
                 fault: Callable[[str], object] = lambda point: None,
                 more: Callable[[], SealedConnection] | None = None, lanes: int | None = None,
                 peer: bool = True) -> None:
        """Make a sender. ``peer``: a destination on the same host may pull pages out of the device's memory."""
        self.connection = connection
        self._own = device
        self.device = device  #: or a view of one, as in :mod:`rgpu.checkpoint.pages.frozen`
        self.fault = fault
        #: throttle: called with the seconds that each piece took; may sleep
        self.pace: Callable[[float], None] = lambda busy: None
        self.peer: PeerSource | None = None
        self.by_stream = "" if peer else "stream was asked for"  #: why pages are not pulled
        self.rounds_pulled: list[dict[str, float]] = []  #: rounds before pulls were given up
        self.map_seconds: list[float] = []  #: seconds that the other side took for each layout
        self.destination: dict[str, float] = {}  #: times of the destination's phases from DONE, ms
        self.takes_objects = False  #: the other side makes objects ahead (:meth:`send_objects`)
        self.table = PageTable(key)
        self.statistics = Statistics()
        self._ring = device.page_ring()
        self._more = more
        self._wanted = (lanes_here() if lanes is None else lanes) if more is not None else 1
        self._lanes = [SendLane(connection)]
        self._no_more = False  #: no further lanes are opened
        self._move = ""
        self._lock = threading.Lock()

    # -- the messages -------------------------------------------------------------------
    def begin(self, session: str, move: str) -> None:
        """Send BEGIN. Whether pages are pulled is decided in the first :meth:`round`. Raises :class:`LinkError`."""
        asked = None if self.by_stream else ask(self.connection, self.device)
        values = {"session": session, "move": move, "hash_key": self.table.key, "lanes": self._wanted - 1}
        self.connection.send(BEGIN, _encode(values if asked is None else {**values, "peer": asked}))
        self._move = move
        if asked is None:
            self._use_stream(self.by_stream or "this device's memory cannot be given to another worker")
            if self._wanted > 1:  # the connection whose message arrives first is the first one to the destination
                self.connection.send(ROUND, _encode({"round": 0}))
                self._expect(ACK)
            self._open_lanes()

    def _use_stream(self, why: str) -> None:
        """Send pages over the connection from here on, because of ``why``."""
        self.by_stream = why
        if self.peer is not None:
            self.peer.close()
            self.peer = None
        log.info("pages go over the connection", reason=why)

    def _open_lanes(self) -> None:
        """Open the further connections when they are first needed; the destination has answered on the first one.

        A refused connection is no error: the stream uses those that are open.
        """
        for number in range(len(self._lanes), 0 if self._no_more else self._wanted):
            try:
                self._lanes.append(self._open_lane(self._move, number))
            except RgpuError as error:
                log.warning("a page stream does with fewer connections", lanes=number, reason=error.message)
                self._no_more = True
                break

    def _open_lane(self, move: str, number: int) -> SendLane:
        assert self._more is not None
        connection = self._more()
        try:
            connection.send(LANE, _encode({"move": move, "number": number}))
            kind, _ = connection.recv(LANE_SECONDS)
            if kind != READY:
                raise LinkError(f"message type {kind} answers a lane", reason="protocol")
        except BaseException:
            connection.close()
            raise
        return SendLane(connection)

    def round(self) -> int:
        """Send every page that differs from the last one sent for it; return how many did.

        On return all are verified and written at the destination. Raises
        :class:`LinkError`, the error that the destination reports, :class:`DeviceError`.
        """
        regions = self.device.regions()
        began = time.monotonic()
        self.connection.send(LAYOUT, _encode({"regions": [[r.address, r.size, r.kind, r.owner] for r in regions]}))
        self._agree(self._expect(READY))
        self.map_seconds.append(time.monotonic() - began)
        self.statistics.pages_total = sum(pagehash.page_count(region.size) for region in regions)
        before = self.statistics.pages_sent
        self.table.follow(regions)
        rest = self._pulled(regions)
        if rest:
            if any(region.kind == "mapped" for region in rest):
                self._open_lanes()
            _Round(self, rest).run()
        self.statistics.rounds += 1
        self.statistics.last_round_pages = self.statistics.pages_sent - before
        known = {} if self.peer is None else self.peer.known
        self.connection.send(ROUND, _encode({"round": self.statistics.rounds,
                                             **({"known": plan.known(known)} if known else {})}))
        self._expect(ACK)
        return self.statistics.last_round_pages

    def _agree(self, body: Any) -> None:
        """Read from the first READY whether the other side makes objects ahead and pulls pages."""
        said = _decode(body)
        self.takes_objects = isinstance(said, dict) and bool(said.get("objects"))
        if self.peer is None and not self.by_stream:
            try:
                answer = msgspec.convert(said.get("peer") or {}, Answer)
                self.peer = PeerSource(self.connection, self._own, answer, fault=self.fault)
            except (NoPeer, msgspec.ValidationError, AttributeError) as error:
                self._use_stream(str(error))
            else:
                self.peer.count = lambda pages, size: self.count(pages, size, pulled=True)
                self.peer.pace = lambda busy: self.pace(busy)

    def _pulled(self, regions: list[Region]) -> list[Region]:
        """Have the regions pulled that can be; return those that are left for the connection."""
        view = self.device
        if self.peer is None:
            return regions
        if isinstance(view, FrozenPages):  # copies made aside are not memory of the session
            self.peer.forget_told()
            return regions
        try:
            self.peer.round(view, regions, self.table, still=isinstance(view, MomentView))
        except NoPeer as error:
            self.rounds_pulled = self.peer.rounds
            self._use_stream(str(error))
            return regions
        return [region for region in regions if region.kind != "mapped" or region.size % PAGE]

    def send_objects(self, data: bytes) -> float:
        """Have objects made ahead (:mod:`rgpu.session.objects.ahead`); return the ms that the other side took.

        To be called between two rounds. Raises the error that the destination reports.
        """
        self._in_pieces(OBJECTS, data)
        said = _decode(self._expect(MADE))
        return float(said.get("ms", 0.0)) if isinstance(said, dict) else 0.0

    def _in_pieces(self, kind: int, whole: bytes) -> None:
        for last, piece in in_pieces(whole):
            self.connection.send(kind, last, piece)

    def finish(self, state: SessionState) -> None:
        """Send the rest of the session; return once the other side has verified every page.

        Raises :class:`MoveFailed`, or the error that the destination reports.
        """
        self.fault("state")
        self._in_pieces(STATE, state.encode())
        self.fault("verify")
        said = _decode(self._expect(DONE))
        phases = said.get("phases_ms") if isinstance(said, dict) else None
        self.destination = {str(name): float(ms) for name, ms in (phases or {}).items()}

    @property
    def known(self) -> Collection[tuple[int, int]]:
        """Mapped regions whose hashes of the last round the other side holds, so that a state need not repeat them."""
        return self.peer.known if self.peer is not None else ()

    @property
    def page_rounds(self) -> list[dict[str, float]]:
        """Times and sizes of each round of pulls."""
        return self.rounds_pulled if self.peer is None else self.peer.rounds

    def close(self) -> None:
        """Close the further connections; the caller closes the first one."""
        if self.peer is not None:
            self.peer.close()
        for lane in self._lanes[1:]:
            lane.connection.close()

    def _expect(self, wanted: int) -> Any:
        kind, body = self.connection.recv()
        if kind == FAILED:
            raise from_dict(_decode(body))
        if kind != wanted:
            raise MoveFailed(f"the destination answered with message type {kind} instead of {wanted}")
        return body

    # -- for the round under way ----------------------------------------------------------
    @property
    def lanes(self) -> list[SendLane]:
        return self._lanes

    @property
    def ring(self) -> Any:
        return self._ring

    def count(self, pages: int, size: int, pulled: bool = False) -> None:
        """Count pages and bytes sent; ``pulled``: by the other side from memory."""
        with self._lock:
            self.statistics.pages_sent += pages
            self.statistics.bytes_sent += size
            self.statistics.bytes_pulled += size if pulled else 0


class _Round:
    """One round: the calling thread fills, a thread for each lane sends."""

    def __init__(self, sender: PageSender, regions: list[Region]) -> None:
        self.sender = sender
        self.regions = regions
        self._jobs: queue.Queue[_Job | None] = queue.Queue(sender.ring.slots)
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        sender = self.sender
        lanes = sender.lanes
        limit = sender.connection.sock.gettimeout()
        for slot in range(sender.ring.slots):
            self._free.put(slot)
        threads = [threading.Thread(target=self._serve, args=(lane,), name="page-lane", daemon=True) for lane in lanes]
        for lane in lanes:
            lane.stall = STALL if limit is None else limit
            lane.connection.sock.settimeout(lane.stall)  # a peer that reads nothing must not block this side for ever
        for thread in threads:
            thread.start()
        try:
            self._fill()
        except BaseException as error:
            self._failed(error)
        finally:
            for _ in threads:
                self._jobs.put(None)
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._cause()
        with suppress(OSError):
            sender.connection.sock.settimeout(limit)

    def _serve(self, lane: SendLane) -> None:
        """Run a lane's thread to the end of the round, with all credits back; after an error jobs are discarded."""
        while (job := self._jobs.get()) is not None:
            if not self._errors:
                self._guarded(lambda job=job: self._send(lane, job))  # type: ignore[misc]
        if not self._errors:
            self._guarded(lane.settle)

    def _guarded(self, do: Callable[[], None]) -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001 - raised by run()
            self._failed(error)

    def _send(self, lane: SendLane, job: _Job) -> None:
        if job.slot is None:
            size = lane.send_pages(job.entries, list(job.stored))
        else:
            size = lane.send_frame(self.sender.ring.frame(job.slot), job.entries)
            self._free.put(job.slot)
        self.sender.count(len(job.entries), size)

    def _failed(self, error: BaseException) -> None:
        """Record an error; the first one wakes the threads that wait for a slot, a credit or space in a socket."""
        with self._lock:
            first = not self._errors
            self._errors.append(error)
        self._free.put(None)
        if first:
            for lane in self.sender.lanes:
                with suppress(OSError):  # not the reading half: the other side's reason may still arrive
                    lane.connection.sock.shutdown(socket.SHUT_WR)

    def _cause(self) -> BaseException:
        """Return the error to raise: the other side's own error rather than the broken link that follows from it."""
        reasons = [error for error in self._errors if not isinstance(error, LinkError)]
        if reasons:
            return reasons[0]
        for lane in self.sender.lanes:  # the reason may have been sent on another lane
            with suppress(RgpuError):
                while True:
                    kind, body = lane.connection.recv(0.5)
                    if kind == FAILED:
                        return from_dict(_decode(body))
        return self._errors[0]

    # -- filling ----------------------------------------------------------------------------
    def _fill(self) -> None:
        sender, table = self.sender, self.sender.table
        kept = getattr(sender.device, "kept", {})  # a frozen view has some pages in host memory
        for region, found in hash_present(sender.device, self.regions, table.key):
            dirty = table.dirty(region, found.hashes)
            zeros = found.zero[dirty]
            self._zeros(region, dirty[zeros], found.hashes)
            rest = dirty[~zeros].tolist()
            staged = [i for i in rest if region.kind == "mapped" and region.address + i * PAGE not in kept]
            for at in range(0, len(staged), FRAME_PAGES):
                self._still_there(self._frame, region, staged[at:at + FRAME_PAGES])
            if len(staged) < len(rest):
                self._still_there(self._one_by_one, region, sorted(set(rest) - set(staged)))

    def _still_there(self, send: Callable[[Region, Sequence[int]], None], region: Region,
                     indices: Sequence[int]) -> None:
        try:
            send(region, indices)
        except DeviceError:
            if region in self.sender.device.regions():
                raise

    def _zeros(self, region: Region, indices: np.ndarray[Any, Any], hashes: np.ndarray[Any, Any]) -> None:
        """Queue pages that were all zeros when they were hashed; the other side will hold zeros with that hash."""
        last = pagehash.page_count(region.size) - 1
        for at in range(0, len(indices), ZEROS_TOGETHER):
            some = indices[at:at + ZEROS_TOGETHER]
            sizes = np.where(some == last, page_size(region, last), PAGE)
            addresses = np.uint64(region.address) + some.astype(np.uint64) * np.uint64(PAGE)
            self._put(region, some.tolist(), _Job(page_frames.table(
                addresses, hashes[some], size=sizes, stored=0, codec=ZERO)))

    def _frame(self, region: Region, indices: Sequence[int]) -> None:
        """Queue whole pages, copied to staging and hashed there."""
        sender = self.sender
        slot = self._free.get()
        if slot is None:
            self._free.put(None)
            raise LinkError("the page stream has failed", reason="lane")
        addresses = [region.address + index * PAGE for index in indices]
        began = time.monotonic()
        try:
            found = sender.device.copy_and_hash([(address, PAGE) for address in addresses], sender.ring.staging(slot),
                                                sender.table.key)
            sender.ring.fetch(slot, len(indices))
        except BaseException:
            self._free.put(slot)
            raise
        busy = time.monotonic() - began
        self._put(region, indices, _Job(page_frames.table(np.array(addresses, np.uint64), found.hashes), slot))
        sender.pace(busy)

    def _one_by_one(self, region: Region, indices: Sequence[int]) -> None:
        """Queue pages read singly: module variables, pinned mirrors, pages in host memory.

        They are few, short, or cannot be copied by a kernel.
        """
        for at in range(0, len(indices), FRAME_PAGES):
            pages = [read_page(self.sender.device, region, index, self.sender.table.key)
                     for index in indices[at:at + FRAME_PAGES]]
            data = [bytes(page.size) if page.data is None else page.data for page in pages]
            self._put(region, [page.index for page in pages], _Job(page_frames.table(
                np.array([page.address for page in pages], np.uint64), np.array([page.hash for page in pages]),
                size=[page.size for page in pages], stored=[page.size for page in pages]), None, data))

    def _put(self, region: Region, indices: Sequence[int], job: _Job) -> None:
        if self._errors:
            raise LinkError("the page stream has failed", reason="lane")
        for index, value in zip(indices, job.entries["hash"].tolist(), strict=True):
            self.sender.table.mark_sent(region, index, (value[0], value[1]))
        self._jobs.put(job)
        if not self.sender.statistics.rounds:
            self.sender.fault("page")
