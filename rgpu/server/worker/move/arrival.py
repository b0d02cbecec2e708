"""A session arrives: the shell around :data:`rgpu.migrate.move.destination.DESTINATION`, in its new worker.

Every command of the table is one method here. Nothing is decided in this file:
a failed check raises an error, which becomes the event ``failed``. A replay that failed
cannot be used any more, nor can its context: the worker ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import structlog

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.frozen import MomentView, look
from rgpu.checkpoint.pages.pages import differing
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.session import restore
from rgpu.link.data.frames import SealedConnection
from rgpu.link.faults import fault
from rgpu.link.messages.pages import CALLS, LAST, PING, PONG, PROBE, PROBED, REPLAY, WANT
from rgpu.migrate.move.destination import DESTINATION, DestinationRole
from rgpu.migrate.move.machine import Command, Event
from rgpu.migrate.transfer import replay_link as wire
from rgpu.migrate.transfer.pieces import Pieces
from rgpu.migrate.transfer.receiver import PageReceiver, Received
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.move import probing
from rgpu.server.worker.move.role_shell import RoleShell
from rgpu.session.errors import Corrupt, LinkError, MoveFailed, RecoveryFailed, RgpuError
from rgpu.session.objects.ahead import Ahead

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 10.0
#: Each message of the source, once a whole session is here, as an event of the table.
MESSAGES = {REPLAY: "replay_begins", CALLS: "calls", PING: "ping", PROBE: "sample", LAST: "last_arrived"}


class DestinationWorker(Protocol):
    """The part of the destination's worker that an arrival uses."""

    @property
    def runtime(self) -> SessionRuntime:
        """Runtime that the session arrives in."""

    @property
    def folder(self) -> Path | None:
        """Folder in which a source of the same host may hand its memory over."""

    def report(self, event: str, **values: Any) -> None:
        """Send the daemon an event."""

    def describe(self) -> dict[str, Any]:
        """Return the worker's state."""

    def own(self, epoch: int) -> None:
        """Serve the session from now on."""

    def leave(self, reason: str) -> None:
        """End the worker: the move was given up."""


class Arrival(RoleShell[DestinationRole]):
    """One incoming move. :meth:`run` takes the connection to its end, in a thread of its own."""

    def __init__(self, worker: DestinationWorker, connection: SealedConnection) -> None:
        super().__init__(DESTINATION, DestinationRole(session=worker.runtime.session), worker.runtime.session,
                         "destination")
        self.worker = worker
        self.runtime = worker.runtime
        self.connection = connection
        self.receiver = PageReceiver(connection, self.runtime.device, worker.folder, fault)
        self.receiver.make = self._objects_came
        self._ahead: Ahead | None = None
        self._received = Received()
        self._pages = 0  #: pages verified
        self._phases = Phases()
        self._feed: Callable[[Any], int] | None = None  #: of the replay's stream of calls
        self._pieces = Pieces("a state")
        self._last: SessionState | None = None  #: state of the last pause, after a replay
        self._wanted: dict[int, list[int]] = {}  #: pages of it that differ here

    def run(self) -> None:
        """Receive the session, until it is active here or given up."""
        try:
            self.drive("receive")
        finally:
            self.receiver.peer.close()
            self.connection.close()  # messages sent before are read before the end is noticed

    # -- a whole session, or a consistent snapshot of one --------------------------------
    def do_take_pages(self, command: Command) -> Event:
        """Receive pages until the state arrives."""
        fault("receive")
        self._received = self.receiver.receive()
        return self.event("state_arrived", found=self._received.session)

    def _objects_came(self, data: bytes) -> None:
        """Handle objects that arrive between two rounds of pages. A raised error ends the receiving of pages, too."""
        failed = self._perform(self._take(self.event("objects_came", found=data)))
        if failed is not None and self.error is not None:
            raise self.error
        if self.over.is_set():
            raise LinkError(self.role.reason)

    def do_make_objects(self, command: Command) -> None:
        """Make live objects ahead of the state."""
        fault("ahead.make")
        ahead = Ahead.decode(command.found)
        self.runtime.make(ahead)
        self._ahead = ahead
        fault("ahead.made")

    def do_rebuild(self, command: Command) -> Event:
        """Replay the live objects, write the pages that waited for them, verify every page."""
        state = self._received.state
        assert state is not None
        fault("rebuild")
        self.runtime.executor.memory.premapped = sorted(self._received.mapped)
        self.runtime.restore(state, staged(state, self._received.pages), self.receiver.peer.mend, self._phases,
                             self._ahead)
        self._pages = sum(pagehash.page_count(region.size) for region in state.regions)
        self._ahead = None
        log.info("a session was rebuilt", session=self.runtime.session, position=state.position,
                 pages=len(self._received.pages), phases_ms=self._phases.ms())
        fault("verified")
        return self.event("rebuilt", found=state.position)

    def do_report_verified(self, command: Command) -> None:
        """Report to source and daemon that every page was verified."""
        self.receiver.done(self._pages, self._phases.ms())
        self.worker.report("received", **self.worker.describe())

    def do_listen(self, command: Command) -> Event:
        """Receive the next message; a state in several pieces counts as one."""
        while True:
            try:
                kind, body = self.connection.recv()
            except (LinkError, OSError):
                return self.event("link_ended")
            if kind not in MESSAGES:
                raise LinkError(f"message type {kind} after a whole session")
            found: Any = body
            if kind == REPLAY:
                found = wire.read_replay(body)
            elif kind == LAST and (found := self._pieces.take(body)) is None:
                continue
            return self.event(MESSAGES[kind], found=found)

    # -- the replay -------------------------------------------------------------------
    def do_begin_replay(self, command: Command) -> None:
        """Begin to apply the calls made since the snapshot point."""
        self.runtime.replay()

    def do_apply_calls(self, command: Command) -> None:
        """Apply received calls. Raises :class:`Corrupt`."""
        body = command.found
        if not len(body) or (self._feed is None and not body[0]):
            raise Corrupt("the calls do not begin with a whole one", reason="stream")
        if body[0] or self._feed is None:
            self._feed = self.runtime.open_stream()
        fault("replay.calls")
        self._feed(bytes(body[1:]))

    def do_answer_ping(self, command: Command) -> None:
        """Answer with the position applied."""
        self._check()
        self.connection.send(PONG, wire.pong(wire.read_ping(command.found), self.runtime.applied))

    def do_compare_sample(self, command: Command) -> None:
        """Compare pages that the source hashed at this position, and answer how many differ."""
        number, position, entries = wire.read_probe(command.found)
        self._stand_at(position)
        fault("replay.probe")
        count = probing.differing(self.runtime.device, entries, self.runtime.hash_key)
        self.connection.send(PROBED, wire.probed(number, len(entries), count))

    def _stand_at(self, position: int) -> None:
        """Check that every call up to ``position``, and none behind it, is applied and complete.

        Raises :class:`RecoveryFailed`.
        """
        if self.runtime.applied != position:
            raise RecoveryFailed(f"the replay stands at {self.runtime.applied}, the session at {position}",
                                 reason="position")
        if not self.runtime.device.drain(DRAIN_SECONDS):
            raise RecoveryFailed(f"the replay's work did not end within {DRAIN_SECONDS:.0f} s", reason="drain")
        self._check()

    def _check(self) -> None:
        """Raise :class:`RecoveryFailed` if the replay failed."""
        if error := self.runtime.executor.error:
            detail = self.runtime.device.error_detail() or self.runtime.executor.broken_detail
            raise RecoveryFailed(f"the replay failed with {error}: {detail}", reason="device")

    def do_compare(self, command: Command) -> Event:
        """Compare everything that is here with the source's state at the last pause."""
        runtime, device = self.runtime, self.runtime.device
        last = self._last = SessionState.decode(command.found)
        if last.hash_key != runtime.hash_key:
            raise Corrupt("the last pause was hashed under another key", reason="hash key")
        self._stand_at(last.position)
        fault("replay.compare")
        digest = last.live.get("digest") if isinstance(last.live, dict) else None
        if digest != wire.objects_digest(runtime.objects()):
            raise RecoveryFailed("the replay made other objects, or module variables at other addresses",
                                 reason="objects")
        restore.compare_regions(device.regions(), last)
        self._wanted = compare_pages(look(device, runtime.hash_key), last)
        return self.event("compared")

    def do_repair(self, command: Command) -> Event:
        """Request the pages that differ, write and verify them."""
        last, wanted = self._last, self._wanted
        assert last is not None
        device, receiver = self.runtime.device, self.receiver
        self.connection.send(WANT, msgspec.msgpack.encode(sorted(wanted.items())))
        receiver.received.mapped = {(region.address, region.size) for region in device.regions()
                                    if region.kind == "mapped"}
        receiver.received.pages.clear()
        receiver.received.state = None
        received = receiver.receive()
        restore.write_pages(device, last, staged(last, received.pages))
        for region in last.regions:
            if region.address in wanted and len(differing(device, region.region(), region.page_hashes(),
                                                          last.hash_key)):
                raise RecoveryFailed(f"pages of the {region.kind} range at {region.address:#x} differ after the repair",
                                     address=region.address, reason="page hash")
        device.spread_arrays()
        self._pages, self._phases = sum(map(len, wanted.values())), Phases()
        return self.event("repaired")

    def do_finish_replay(self, command: Command) -> Event:
        """Use the source's answers, events and clock."""
        assert self._last is not None
        began = time.monotonic()
        self.runtime.settle(self._last)
        log.info("replay finished", session=self.runtime.session, position=self._last.position,
                 mismatched=self._pages, seconds=round(time.monotonic() - began, 4))
        fault("replay.finished")
        return self.event("finished")

    # -- its end ------------------------------------------------------------------------
    def do_activate(self, command: Command) -> None:
        """Own the session from now on, at the committed epoch."""
        self.worker.own(int(command.found))

    def do_report_failed(self, command: Command) -> None:
        """Report the failure to the source."""
        log.warning("receiving failed", session=self.runtime.session, reason=command.reason)
        with suppress(RgpuError):
            self.receiver.failed((self.error or MoveFailed(command.reason)).as_dict())

    def do_discard(self, command: Command) -> None:
        """Discard what arrived: the move was aborted."""
        self.worker.leave("discarded")


def compare_pages(present: MomentView, last: SessionState) -> dict[int, list[int]]:
    """Return {region address: pages that differ}. Raises :class:`Corrupt` for another number of hashes."""
    wanted: dict[int, list[int]] = {}
    here = {region.address: region for region in present.regions()}
    for region in last.regions:
        hashes = region.page_hashes()
        now = present.hash_pages(here[region.address], last.hash_key)
        if now.shape != hashes.shape:
            raise Corrupt(f"{len(hashes)} page hashes for a region of {len(now)} pages", offset=region.address,
                          reason="hash count")
        if indices := np.flatnonzero(pagehash.differ(now, hashes)).tolist():
            wanted[region.address] = indices
    return wanted


def staged(state: SessionState, pages: dict[int, bytes]) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield the pages that were kept by absolute address, as (region address, page index, bytes)."""
    for region in state.regions:
        if region.kind != "mapped":
            for index in range(pagehash.page_count(region.size)):
                data = pages.get(region.address + index * PAGE)
                if data is not None:
                    yield region.address, index, data
