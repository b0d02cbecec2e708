"""What the leader notices by itself: nodes that come and go, sick devices, sessions that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from rgpu.migrate.leader.mover import Mover
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import MAX_TEXT, NODES, Failure, NodeRecord, decode
from rgpu.migrate.registry.base import Change, Compacted, Entry
from rgpu.session.errors import Conflict, Fenced, MoveFailed, PoolUnavailable, RgpuError, UnknownOutcome

if TYPE_CHECKING:
    from rgpu.migrate.leader.coordinator import Coordinator

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0
PRUNE_TICKS = 60
#: A restarted daemon's record is deleted and made anew: so long a gap is no loss, s.
LOSS_GRACE = 0.3
RETRIES = 5
LONGEST_RETRY = 30.0


class Loss(NamedTuple):
    """``failure``: what counts towards the third one in one place (OWNERSHIP 9).

    That a node is gone does not: nodes are drained, restarted and cut off by others, and a session that was being
    replayed each time would be given up, though it could be brought back.
    """

    reason: str
    failure: Failure | None = None


class Watching:
    """The leader's loop. All work on a session is done under its lock."""

    def __init__(self, coordinator: Coordinator, node_ttl: float, registered_for: Callable[[], float]) -> None:
        self.coordinator = coordinator
        self.desk = coordinator.desk
        self._node_ttl, self._registered_for = node_ttl, registered_for
        self._tasks: set[asyncio.Task[Any]] = set()
        self._retry: dict[str, tuple[float, float]] = {}  #: session: (not before, then wait so long)
        self._seen: dict[str, tuple[object, ...]] = {}
        self._fenced: asyncio.Future[None] | None = None

    # -- the loop ---------------------------------------------------------------
    async def run(self) -> None:
        """Until cancelled. Raises :class:`Fenced`."""
        self._fenced = asyncio.get_running_loop().create_future()
        loops = [asyncio.ensure_future(self._watch_nodes()), asyncio.ensure_future(self._ticks()),
                 asyncio.ensure_future(self._admit()), self._fenced]
        self.spawn(self.desk.note("elect", f"{self.desk.leader.host} was elected coordinator "
                                           f"(revision {self.desk.leader.revision})"), "note of the election")
        self.spawn(self.resume_unfinished(), "resume")
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*loops, *self._tasks]:
                task.cancel()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        """Background work; its errors are logged, and being fenced ends the term."""
        task = asyncio.ensure_future(self._guarded(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Wait until no background work is left (tests)."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _guarded(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        try:
            await work
        except Fenced as error:
            if not await self.coordinator.leads() and self._fenced is not None and not self._fenced.done():
                self._fenced.set_exception(error)
            log.info("fenced", what=what, reason=error.message)
        except RgpuError as error:
            log.warning("not done; the next tick looks again", what=what, reason=error.message)

    async def _watch_nodes(self) -> None:
        """Every change of a node's record, from the listing on; after a gap, the listing again."""
        while True:
            try:
                listing = await self.desk.registry.list(NODES)
                async for change in self.desk.registry.watch(NODES, listing.revision + 1):
                    self._nodes_changed(change)
            except Compacted:
                self.spawn(self.resume_unfinished(), "look at everything again")
            except (PoolUnavailable, UnknownOutcome) as error:
                log.warning("the registry does not answer: nothing is decided meanwhile", reason=error.message)
                await asyncio.sleep(TICK_SECONDS)

    def _nodes_changed(self, change: Change) -> None:
        for event in change.events:
            host = event.key[len(NODES):]
            if event.entry is None:
                self._seen.pop(host, None)
                log.warning("node lost", host=host)
                self.coordinator.cancel_moves(host, f"the lease of {host} has ended")
                self.spawn(self._look_at(host, LOSS_GRACE), f"loss of {host}")
            elif self._news(host, event.entry):
                self.look_again()
                self.spawn(self._look_at(host, 0.0), f"change of {host}")

    def _news(self, host: str, entry: Entry) -> bool:
        """Whether more than free memory changed."""
        try:
            record = decode(entry.value, NodeRecord, entry.key)
        except RgpuError as error:
            log.error("a node's record cannot be read", host=host, reason=error.message)
            return False
        health = (entry.create_revision, record.state, *((d.device, d.healthy) for d in record.devices))
        known, self._seen[host] = self._seen.get(host), health
        return known != health

    async def _ticks(self) -> None:
        """Sessions that wait are tried again; what two nodes' events did not tell is found here."""
        count = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            count += 1
            try:
                sessions = await self.desk.sessions()
                for held in sessions:
                    name, record = held.record.name, held.record
                    if record.parked is not None:  # nobody says when the node that it was on is heard again
                        if self._due(name):
                            self.spawn(self.coordinator.parking.forget(held), f"end of {name}'s worker")
                        continue
                    waiting = record.state == "recovering" or (record.live and record.move is not None)
                    if not waiting:
                        self._retry.pop(name, None)
                    elif not self.coordinator.busy(name) and self._due(name):
                        self.spawn(self._resume(name), f"tick for {name}")
                await self.coordinator.draining.tick(sessions)
                if count % PRUNE_TICKS == 0:
                    await self.coordinator.prune()
            except (PoolUnavailable, UnknownOutcome) as error:
                log.info("no tick", reason=error.message)

    async def _admit(self) -> None:
        """Whoever waits gets a place when there is one; where there is none, room is made if that is worth it."""
        admission = self.coordinator.admission
        while True:
            await admission.woken(TICK_SECONDS)
            try:
                await self.coordinator.rebalancing.tick(await admission.tick())
            except Fenced:
                raise
            except RgpuError as error:
                log.info("nobody was let in", reason=error.message)
                await asyncio.sleep(TICK_SECONDS)

    def _due(self, name: str) -> bool:
        """Whether a waiting session is tried again now: ever more rarely, until a node's news."""
        now = self.desk.clock.monotonic()
        not_before, wait = self._retry.get(name, (0.0, TICK_SECONDS))
        if now < not_before:
            return False
        self._retry[name] = (now + wait, min(2 * wait, LONGEST_RETRY))
        return True

    def look_again(self) -> None:
        """Sessions that wait are tried with the next tick, however often that was in vain."""
        self._retry.clear()
        self.coordinator.admission.wake()

    # -- a node -------------------------------------------------------------------
    async def _look_at(self, host: str, grace: float) -> None:
        """Compare what the records promise of ``host`` with what it is now."""
        await asyncio.sleep(grace)
        if grace > 0:
            await self.coordinator.hosts.note_loss(host)
        for held in await self.desk.sessions():
            if held.record.owner == host and held.record.live:
                self.spawn(self._check_owner(held.record.name, grace > 0), f"check of {held.record.name}")

    async def _check_owner(self, name: str, lost: bool = True) -> None:
        """Recover the session if its owner is gone, restarted without it, or sick."""
        async with self.coordinator.session_lock(name):
            held = await self.desk.held(name)
            loss = await self._loss(held)
            if loss is not None:
                await self.coordinator.recovery.run(name, loss.reason, loss.failure)
            elif held.record.state == "recovering":
                await self._resume_recovering(held)

    async def _loss(self, held: Held) -> Loss | None:
        """Why the session's owner cannot have it any more; None while it can."""
        record = held.record
        if not record.live:
            return None
        host = str(record.owner)
        node = await self.desk.node(host)
        now = self.desk.clock.wall()
        if node is None:
            return Loss(f"the lease of {host} has ended")
        if node.record.incarnation != record.incarnation:
            # A restarting daemon adopts its workers' sessions before it registers itself.
            fresh = await self.desk.held(record.name)
            if fresh.record.incarnation != node.record.incarnation and fresh.record.owner == host:
                return Loss(f"{host} was restarted without it")
            return None
        devices = node.record.all_of(record.device)
        sick = next((device for device in devices if not device.healthy), None)
        if node.record.state == "unhealthy" or not devices or sick is not None:
            why = node.record.reason or (sick.reason if sick else "") or "marked so"
            which = sick.device if sick else record.device
            why = f"{which} of {host} is unhealthy: {why}"[:MAX_TEXT]
            return Loss(why, Failure(host=host, device=which, when=now, epoch=record.epoch, reason=why))
        return None

    async def worker_died(self, name: str, failure: Failure) -> None:
        """See :meth:`Coordinator.worker_died`; which device it was says the record."""
        host, epoch = failure.host, failure.epoch
        async with self.coordinator.session_lock(name):
            held = await self.desk.held(name)
            record = held.record
            if record.owner != host or record.epoch != epoch or not record.live:
                log.info("a worker ended that owned nothing", session=name, host=host, epoch=epoch)
                return
            await self.coordinator.recovery.run(name, f"{failure.reason} on {host}",
                                                failure.replace(device=record.device))

    # -- after an election -----------------------------------------------------------
    async def resume_unfinished(self) -> None:
        """Finish or undo what is on record; nodes that are missing get time to come back."""
        work = []
        for held in await self.desk.sessions():
            if held.record.parked is not None:  # its worker may not have been told to go
                work.append(self._guarded(self.coordinator.parking.forget(held), f"end of {held.record.name}'s worker"))
            if held.record.live:
                name = held.record.name
                work.append(self._guarded(self._resume(name, new_leader=True), f"resume {name}"))
        await asyncio.gather(*work)

    async def _resume(self, name: str, new_leader: bool = False) -> None:
        for _ in range(RETRIES):
            try:
                return await self._resume_once(name, new_leader)
            except Conflict as error:
                log.info("looked at again", session=name, reason=error.message)

    async def _resume_once(self, name: str, new_leader: bool) -> None:
        async with self.coordinator.session_lock(name):
            held = await self.desk.held(name)
            if held.record.move is not None and held.record.state in ("moving", "running"):
                await self._finish_move(held)
                held = await self.desk.held(name)
            if not held.record.live:
                return
            if await self._loss(held) is None:
                if held.record.state in ("starting", "recovering"):
                    await self._resume_recovering(held)
                return
        if new_leader:
            await asyncio.sleep(self._patience())
        await self._check_owner(name)

    def _patience(self) -> float:
        """Seconds that nodes which are missing at an election get to come back.

        Their leases ended because they died, or because the registry was away: then ours ended as well, and the time
        since it was made anew is what they have had by now.
        """
        return min(self._node_ttl, max(LOSS_GRACE, 2 * self._node_ttl - self._registered_for()))

    async def _finish_move(self, held: Held) -> None:
        """Drive an unfinished or unsettled move to its end from the record alone."""
        assert held.record.move is not None
        mover = Mover(self.desk, held.record.name, move=held.record.move.id)
        try:
            await self.coordinator.drive(mover)
        except MoveFailed as error:
            log.info("an unfinished move was undone", session=held.record.name, reason=error.message)

    async def _resume_recovering(self, held: Held) -> None:
        """A start or recovery that nobody finished: the owner may have done it after all."""
        name, record = held.record.name, held.record
        if await self.coordinator.recovery.returned(name) is None:
            # Why it was lost, not why it waits: that is said anew by each attempt.
            why = record.failures[-1].reason if record.failures else "its start was interrupted"
            await self.coordinator.recovery.run(name, why, asked=record.state == "starting")
