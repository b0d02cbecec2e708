"""A session arrives: the destination's side of a move, in the steps of :data:`rgpu.migrate.roles.DESTINATION`.

What comes first is a state with all its pages: of the last pause (then that is
all), or of a cut. After a cut the source sends the calls that were applied
since, which are applied here as in any replay (SEMANTICS 1): they wait where
the program had waited, and their answers stay here. At last the source sends
the hashes of every page; those that differ are asked for, written and verified.

A replay that fails is of no use any more, nor is its context: the worker ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import structlog

from rgpu.checkpoint import pagehash, restore
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.frozen import MomentView, look
from rgpu.checkpoint.pages import differing
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.state import SessionState
from rgpu.link.faults import fault
from rgpu.link.frames import SealedConnection
from rgpu.server import probing
from rgpu.server import replay_stream as wire
from rgpu.server.page_messages import Pieces
from rgpu.server.page_stream import PageReceiver
from rgpu.session.ahead import Ahead
from rgpu.session.errors import Corrupt, Fenced, LinkError, RecoveryFailed, RgpuError

if TYPE_CHECKING:
    from rgpu.server.worker import Worker

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 10.0


class Arrival:
    """One incoming move. :meth:`run` takes the connection to its end, in a thread of its own."""

    def __init__(self, worker: Worker, connection: SealedConnection) -> None:
        self.worker = worker
        self.runtime = worker.runtime
        self.connection = connection
        self.receiver = PageReceiver(connection, self.runtime.device, worker.folder, fault)
        self.receiver.make = self._make
        self._ahead: Ahead | None = None

    def run(self) -> None:
        """Everything that goes wrong is told to the source, and ends this worker."""
        try:
            self._take()
        except RgpuError as error:
            log.warning("receiving failed", session=self.runtime.session, error=error.code, reason=error.message)
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - the source must hear that nothing comes of it
            log.exception("receiving failed", session=self.runtime.session)
            self._failed(RgpuError(f"the destination failed: {error}"))
        finally:
            self.receiver.peer.close()

    def _failed(self, error: RgpuError) -> None:
        try:
            self.receiver.failed(error.as_dict())
        except RgpuError:
            pass
        self.worker.do_forget("discarded")

    def _make(self, data: bytes) -> None:
        """Objects of the session, while it runs on at its source."""
        if self._ahead is not None:
            raise Corrupt("objects come ahead a second time", reason="objects ahead")
        fault("ahead.make")
        ahead = Ahead.decode(data)
        self.runtime.make(ahead)
        self._ahead = ahead
        fault("ahead.made")

    def _take(self) -> None:
        fault("receive")
        received = self.worker.tasks.received = self.receiver.receive()
        state = received.state
        assert state is not None
        if received.session != self.runtime.session:
            raise Fenced(f"pages of {received.session} came for {self.runtime.session}")
        fault("rebuild")
        phases = Phases()
        pages = self.worker.tasks.rebuild(state, received, self.receiver.peer.mend, phases, self._ahead)
        self._ahead = None
        fault("verified")
        self.receiver.done(pages, phases.ms())
        self.worker.report("received", **self.worker.describe())
        try:
            kind, body = self.connection.recv()
        except (LinkError, OSError):
            return  # the source has nothing to add: what came was all of it
        if kind != wire.REPLAY:
            raise LinkError(f"message type {kind} after a whole session")
        if wire.read_replay(body) != state.position:
            raise Corrupt(f"a replay from {wire.read_replay(body)} after a cut at {state.position}", reason="position")
        last = self._replay()
        self._settle(last)

    # -- the replay -------------------------------------------------------------------
    def _replay(self) -> SessionState:
        """Apply what comes, until the state of the last pause is here."""
        runtime = self.runtime
        runtime.replay()
        feed: Callable[[Any], int] | None = None
        last = Pieces("a state")
        while True:
            kind, body = self.connection.recv()
            if kind == wire.CALLS:
                if not len(body) or (feed is None and not body[0]):
                    raise Corrupt("the calls do not begin with a whole one", reason="stream")
                if body[0] or feed is None:
                    feed = runtime.open_stream()
                fault("replay.calls")
                feed(bytes(body[1:]))
            elif kind == wire.PING:
                self._check()
                self.connection.send(wire.PONG, wire.pong(wire.read_ping(body), runtime.applied))
            elif kind == wire.PROBE:
                self._compare_sample(body)
            elif kind == wire.LAST:
                if (data := last.take(body)) is not None:
                    return SessionState.decode(data)
            else:
                raise LinkError(f"unknown message type {kind} in a replay")

    def _compare_sample(self, body: Any) -> None:
        """The source stood here when it hashed these pages: say how many differ."""
        runtime = self.runtime
        number, position, entries = wire.read_probe(body)
        self._stand_at(position)
        fault("replay.probe")
        count = probing.differing(runtime.device, entries, runtime.hash_key)
        self.connection.send(wire.PROBED, wire.probed(number, len(entries), count))

    def _stand_at(self, position: int) -> None:
        """Every call up to there was applied and is complete. Raises :class:`RecoveryFailed`."""
        if self.runtime.applied != position:
            raise RecoveryFailed(f"the replay stands at {self.runtime.applied}, the session at {position}",
                                 reason="position")
        if not self.runtime.device.drain(DRAIN_SECONDS):
            raise RecoveryFailed(f"the replay's work did not end within {DRAIN_SECONDS:.0f} s", reason="drain")
        self._check()

    def _check(self) -> None:
        """Raises :class:`RecoveryFailed` when the replay went wrong."""
        if error := self.runtime.executor.error:
            detail = self.runtime.device.error_detail() or self.runtime.executor.broken_detail
            raise RecoveryFailed(f"the replay failed with {error}: {detail}", reason="device")

    def _settle(self, last: SessionState) -> None:
        """Compare everything with the last pause, have sent what differs, take over answers, events and clock."""
        runtime, device = self.runtime, self.runtime.device
        if last.hash_key != runtime.hash_key:
            raise Corrupt("the last pause was hashed under another key", reason="hash key")
        self._stand_at(last.position)
        fault("replay.compare")
        digest = last.live.get("digest") if isinstance(last.live, dict) else None
        if digest != wire.objects_digest(runtime.objects()):
            raise RecoveryFailed("the replay made other objects, or module variables at other addresses",
                                 reason="objects")
        restore.compare_regions(device.regions(), last)
        wanted = compare_pages(look(device, runtime.hash_key), last)
        self.connection.send(wire.WANT, msgspec.msgpack.encode(sorted(wanted.items())))
        self._repair(last, wanted)
        began = time.monotonic()
        runtime.settle(last)
        fault("replay.settled")
        self.receiver.done(sum(map(len, wanted.values())))
        log.info("replay settled", session=runtime.session, position=last.position,
                 mismatched=sum(map(len, wanted.values())), seconds=round(time.monotonic() - began, 4))
        self.worker.report("received", **self.worker.describe())

    def _repair(self, last: SessionState, wanted: dict[int, list[int]]) -> None:
        device, receiver = self.runtime.device, self.receiver
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


def compare_pages(present: MomentView, last: SessionState) -> dict[int, list[int]]:
    """{region address: pages that differ}. Raises :class:`Corrupt` for another number of hashes."""
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
    """Pages that were kept by absolute address, as (region address, page index, bytes)."""
    for region in state.regions:
        if region.kind != "mapped":
            for index in range(pagehash.page_count(region.size)):
                data = pages.get(region.address + index * PAGE)
                if data is not None:
                    yield region.address, index, data
