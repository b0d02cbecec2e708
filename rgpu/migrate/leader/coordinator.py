"""What the elected leader does: place, move, checkpoint, recover and end sessions.

One object for one term. All truth is in the registry: a new leader needs
nothing else to finish or undo what this one began (:meth:`Coordinator.run`).
Operations on one session follow each other; different sessions do not wait.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog

from rgpu.link import effects
from rgpu.migrate.leader.capacity.admission import Admission
from rgpu.migrate.leader.capacity.draining import Draining
from rgpu.migrate.leader.capacity.make_room import Rebalancing
from rgpu.migrate.leader.capacity.parking import Parking
from rgpu.migrate.leader.checks import MoveCheck
from rgpu.migrate.leader.desk import Clock, Desk, SystemClock
from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.mover import Mover
from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS, NodeCommands, Progress
from rgpu.migrate.leader.recovery import Recovery
from rgpu.migrate.leader.requests import Order, program_of
from rgpu.migrate.leader.silence import AGENT_GRACE, Quiet, Silence
from rgpu.migrate.leader.watching import Watching
from rgpu.migrate.membership.members import Members
from rgpu.migrate.move.options import Wishes
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held, Leader
from rgpu.migrate.records.schema import (
    HISTORY,
    LEADER,
    MAX_TEXT,
    Failure,
    HostRecord,
    ImageName,
    PoolRecord,
    SessionRecord,
    Wants,
    image_name,
    session_key,
)
from rgpu.migrate.registry.base import Delete, Registry, created
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.placement import request_for
from rgpu.session.errors import (
    Fenced,
    MoveFailed,
    NotFound,
    Refused,
    RgpuError,
)

log = structlog.get_logger(__name__)

UNREACHABLE_SECONDS = 10.0  #: of an owner that its agent does not reach (OWNERSHIP 7)
MOVES_PER_NODE = 4  #: at a time, from it and to it
MOST_LEARNED = 1000  #: sessions of which it is remembered how wrong a replay was
#: What a node says an image cost: times in ms, sizes in bytes.
IMAGE_COST = ("pause_ms", "drain_ms", "total_ms", "cut_bytes", "paused_bytes", "raw_bytes", "unchanged_pages")
KEEP_HISTORY = 2000
KEEP_ENDED = 500


class Coordinator:
    """See the module docstring.

    ``node_ttl``: how long a new leader waits for nodes that it does not find, s; less if ``registered_for``, for how
    many seconds this node's own lease has not lapsed, says that theirs did not end with the registry's absence.
    """

    def __init__(self, registry: Registry, commands: NodeCommands, leader: Leader, clock: Clock | None = None,
                 *, node_ttl: float = 5.0, registered_for: Callable[[], float] = lambda: 0.0,
                 agent_grace: float = AGENT_GRACE,
                 observe: Callable[[str, dict[str, Any]], None] = lambda what, values: None) -> None:
        self.desk = Desk(registry, commands, leader, clock or SystemClock(), observe)
        self.recovery = Recovery(self.desk)
        self.silence = Silence(self, agent_grace)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._imaging: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  #: taken before the session's lock
        self._lane: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOVES_PER_NODE))
        self._movers: dict[str, Mover] = {}
        self.hosts = Hosts(self.desk)
        self.members = Members(self.hosts)
        self.draining = Draining(self)
        self.admission = Admission(self)
        self.parking = Parking(self)
        self.rebalancing = Rebalancing(self)
        self._progress: dict[str, dict[str, Any]] = {}
        self._learned: dict[str, float] = {}  #: of sessions that a replay got wrong: the share of pages
        self._watching = Watching(self, node_ttl, registered_for)

    async def run(self) -> None:
        """Finish what is unfinished, then keep watch over nodes and sessions, until cancelled.

        Raises :class:`Fenced` when another leader was elected.
        """
        await self._watching.run()

    async def resume_unfinished(self) -> None:
        """Finish or undo every move, start and recovery that a former leader left (the first part of :meth:`run`)."""
        await self._watching.resume_unfinished()

    @asynccontextmanager
    async def session_lock(self, name: str) -> AsyncIterator[None]:
        """Operations on one session, one after the other."""
        lock = self._locks[name]
        async with lock:
            yield

    def imaging_lock(self, name: str) -> asyncio.Lock:
        """Held while an image of the session is taken; always taken before the session's."""
        return self._imaging[name]

    def busy(self, name: str) -> bool:
        return name in self._locks and self._locks[name].locked()

    # -- create -----------------------------------------------------------------
    async def create_session(self, name: str, *, quota: int | None, agent: str, program: dict[str, Any] | None = None,
                             recover: bool = True, host: str | None = None, device: str | None = None,
                             wants: Wants | None = None, share: int = 0) -> SessionRecord:
        """Place a new session and start its worker: see
        :meth:`rgpu.migrate.leader.capacity.admission.Admission.create`."""
        return await self.admission.create(Order(name, agent, quota, share, program_of(program), recover, host, device,
                                                 wants or Wants()))

    # -- move -------------------------------------------------------------------
    async def migrate(self, name: str, host: str, *, wishes: Wishes | None = None, device: str | None = None,
                      on_progress: Progress | None = None, why: str = "") -> dict[str, Any]:
        """Move a session while it runs, because of ``why``; the statistics of ``rgpu migrate -o json``.

        A replay that does not work out is followed by a move of its own that copies. Raises
        :class:`NotFound`, :class:`Refused` before anything was changed, :class:`MoveFailed`
        when the move was aborted (detail: the statistics), :class:`Fenced`.
        """
        if name in self._movers:
            raise Refused(f"{name} is being moved already ({self._movers[name].role.state})", session=name)
        wishes = wishes or Wishes()
        async with self.session_lock(name), self._lanes(str((await self.desk.held(name)).record.owner), host):
            try:
                return await self._move(name, host, device, wishes, on_progress, why)
            except Refused as error:
                await self.desk.note("refuse_move", f"not to {host}: {error.message}", session=name)
                raise

    async def _move(self, name: str, host: str, device: str | None, wishes: Wishes,
                    on_progress: Progress | None, why: str) -> dict[str, Any]:
        def mover_for(wishes: Wishes) -> Mover:
            return Mover(self.desk, name, check=MoveCheck(self.desk, name, host, device, why=why), wishes=wishes,
                         on_progress=lambda values: self._progressed(name, values, on_progress))

        wishes = replace(wishes, mismatched=self._learned.get(name, 0.0))
        mover = mover_for(wishes)
        try:
            return await self.drive(mover)
        except MoveFailed as failed:
            if not mover.replay_failed:
                raise
            log.warning("the replay did not work out: copying", session=name, move=mover.move, reason=failed.message)
            return {**await self.drive(mover_for(replace(wishes, mode="copy"))), "fell_back": failed.message}

    def _progressed(self, name: str, values: dict[str, Any], tell: Progress | None) -> None:
        self._progress[name] = values
        if tell is not None:
            tell(values)

    @asynccontextmanager
    async def _lanes(self, *hosts: str) -> AsyncIterator[None]:
        """At most :data:`MOVES_PER_NODE` moves from and to a node at a time; others wait. (In order: no deadlock.)"""
        async with AsyncExitStack() as held:
            for host in sorted(set(hosts)):
                await held.enter_async_context(self._lane[host])
            yield

    async def plan_move(self, name: str, host: str, *, wishes: Wishes | None = None,
                        device: str | None = None) -> dict[str, Any]:
        """``rgpu migrate --dry-run``: every check that needs no change, and what the move would cost.

        Raises as :meth:`migrate` would before anything was changed.
        """
        check = MoveCheck(self.desk, name, host, device, forecast=True)
        await check.run()
        record = check.held.record
        return {"session": name, "from": record.owner, "to": host, "device": check.device, "reason": check.reason,
                "epoch": record.epoch, "wishes": (wishes or Wishes()).as_dict(),
                "forecast": dict(check.found.get("forecast") or {})}

    async def drive(self, mover: Mover) -> dict[str, Any]:
        """Run a mover; the caller holds the session's lock."""
        self._movers[mover.name] = mover
        try:
            return await mover.run()
        finally:
            del self._movers[mover.name]
            self._learn(mover)
            self.desk.observe("move", mover.statistics())
            self._progress.pop(mover.name, None)
            self.admission.wake()

    def _learn(self, mover: Mover) -> None:
        """What a replay came to, for the next prediction; a new leader learns it anew."""
        if mover.learned is not None:
            self._learned.pop(mover.name, None)
            if mover.learned:
                self._learned[mover.name] = mover.learned
                if len(self._learned) > MOST_LEARNED:
                    del self._learned[next(iter(self._learned))]

    def moves(self) -> dict[str, dict[str, Any]]:
        """session: {state, from, to, phase, round, pages_sent, bytes_sent …} of the moves that this leader drives."""
        found = {}
        for name, mover in self._movers.items():
            sides = mover.statistics()
            found[name] = {"state": mover.role.state, "from": sides["from"], "to": sides["to"],
                           **self._progress.get(name, {})}
        return found

    def cancel_moves(self, host: str, reason: str) -> None:
        """Abort, if they are not ready, the moves from and to a host that went away."""
        for mover in self._movers.values():
            if mover.involves(host):
                mover.cancel(reason)

    async def move_abort(self, name: str, move: str | None = None,
                         reason: str = "aborted on request") -> dict[str, Any]:
        """Abort a move that is not ready yet; the move's state now. Raises :class:`NotFound`."""
        mover = self._movers.get(name)
        if mover is not None and (not move or move == mover.move):
            mover.cancel(reason)
        return await self.move_status(name)

    async def move_status(self, name: str) -> dict[str, Any]:
        """{session, move: its record or None, role: the state of the move that this leader drives}."""
        record = (await self.desk.held(name)).record
        mover = self._movers.get(name)
        move = record.move
        return {"session": name, "role": mover.role.state if mover else None,
                "progress": mover.progress if mover else {}, "move": None if move is None else {
            "id": move.id, "from": move.source, "to": move.destination, "state": move.state, "reason": move.reason}}

    async def unreachable(self, name: str, *, epoch: int, reached: str | None = None,
                          seconds: float = UNREACHABLE_SECONDS) -> SessionRecord:
        """An agent that cannot reach its owner asks for one that it can (OWNERSHIP 7); the record after it.

        The session is moved there; recovered there if its owner does not answer us either. Automation: not while
        that is paused.
        """
        record = (await self.desk.held(name)).record
        if record.epoch != epoch or record.state != "running" or seconds < UNREACHABLE_SECONDS:
            return record
        if await self.desk.paused() is not None:
            return record
        why = f"its agent does not reach {record.owner} since {seconds:.0f} s"
        target = reached
        try:
            snapshot = await self.desk.snapshot()
            choice = place(snapshot, request_for(record, host=reached, avoid_hosts={str(record.owner)}))
            target = choice.host
            await self.migrate(name, choice.host)
        except Fenced:
            raise
        except RgpuError as error:
            log.warning("cannot move to where the agent is heard", session=name, reason=error.message)
            async with self.session_lock(name):
                held = await self.desk.held(name)
                if held.record.epoch == epoch and held.record.recover and target is not None:
                    place(await self.desk.snapshot(), request_for(record, host=target))
                    await self.recovery.run(name, f"{why}; {error.message}", host=target)
        return (await self.desk.held(name)).record

    # -- images -----------------------------------------------------------------
    async def checkpoint(self, name: str) -> dict[str, Any]:
        """Write an image and name it: {image, position, epoch, pages, bytes} and what it cost (:data:`IMAGE_COST`).

        It begins behind a move or a recovery under way, and behind another checkpoint of the session. Writing may
        take long and holds up nobody: the session may be moved, ended, recovered meanwhile, and then the worker gives
        the image up, or the record's epoch refuses its name. Raises what the node raises, :class:`Refused`,
        :class:`Fenced`.
        """
        async with self._imaging[name]:
            async with self.session_lock(name):
                record = (await self.desk.held(name)).record
            return await self._checkpoint(record)

    async def checkpoint_now(self, name: str) -> dict[str, Any]:
        """:meth:`checkpoint` for a caller that holds the session's lock."""
        return await self._checkpoint((await self.desk.held(name)).record)

    async def _checkpoint(self, record: SessionRecord) -> dict[str, Any]:
        name = record.name
        if record.state != "running":
            raise Refused(f"{name} is {record.state}, not running: {record.reason}", session=name)
        epoch, owner, now = record.epoch, str(record.owner), self.desk.clock.wall()
        wanted = image_name(name, epoch, record.image.position if record.image else 0, now)
        result = await self.desk.tell(owner, "session.image", {"session": name, "image": wanted}, epoch=epoch,
                                      timeout=CHECKPOINT_SECONDS, tries=2)
        image = ImageName(name=str(result["image"]), position=int(result["position"]), epoch=epoch, created=now,
                          bytes=int(result.get("bytes", 0)))
        effects.publishing(self.desk.leader.host, name, epoch, image.position, image.name)
        published = await self.desk.change(name, lambda held: ownership.publish_image(
            held, owner=owner, epoch=epoch, image=image, leader=self.desk.leader, now=self.desk.clock.wall(),
            reason=f"image {image.name} at position {image.position}"))
        await self.desk.suggest(owner, "session.notice", {
            "session": name, "epoch": epoch, "kind": "cut",
            "values": {"epoch": epoch, "position": published.record.journal_from, "image": image.name}}, epoch=epoch)
        return {"session": name, "image": image.name, "position": image.position, "epoch": epoch,
                "pages": int(result.get("pages", 0)), "bytes": image.bytes,
                **{key: result[key] for key in IMAGE_COST if key in result}}

    async def restore(self, image: str, name: str, *, host: str | None = None,
                      position: int | None = None) -> dict[str, Any]:
        """Bring a session back from an image that its journal still reaches; {session, host, owner, epoch, position}.

        ``position``: of the image, where the record does not name it (the manifest says it). Raises
        :class:`NotFound`, :class:`Refused` when the journal before the image was cut.
        """
        async with self.session_lock(name):
            record = (await self.desk.held(name)).record
            if record.parked is not None:
                raise Refused(f"{name} is parked: it comes back by itself when there is room", session=name)
            if not record.live:
                raise Refused(f"{name} is {record.state}: its program has no journal to go on from", session=name)
            chosen = record.image
            if chosen is None or chosen.name != image:
                if position is None:
                    raise NotFound(f"the registry names no image {image} of {name}", image=image)
                chosen = ImageName(name=image, position=position, epoch=record.epoch)
            if chosen.position < record.journal_from:
                raise Refused(f"image {image} stands at position {chosen.position}, and the journal before "
                              f"{record.journal_from} was cut: a live program cannot be rolled back", image=image)
            if not record.recover:
                raise Refused(f"{name} runs with --recover off: no journal is kept that could follow an image")
            place(await self.desk.snapshot(), request_for(record, host=host))
            held = await self.recovery.run(name, f"restored from {image}", host=host, image=chosen, asked=True)
            if held is None:
                reason = (await self.desk.held(name)).record.reason
                raise Refused(f"{name} was not restored: {reason}", session=name)
            record = held.record
            return {"session": name, "host": record.owner, "owner": record.owner, "epoch": record.epoch,
                    "position": chosen.position, "image": image}

    # -- the end ------------------------------------------------------------------
    async def end(self, name: str, reason: str = "its program ended", created: float = 0.0) -> SessionRecord | None:
        """End a session and give its memory back; one that ended is no error, one that waits for a place waits no more.

        ``created``: only the one made then, if the name is not another's by now. Raises :class:`NotFound`.
        """
        if created and (now := (await self.desk.held(name)).record).created != created:
            return now
        mover = self._movers.get(name)
        if mover is not None:
            mover.cancel(f"the session ends: {reason}")
        async with self.session_lock(name):
            left = await self.admission.leave(name, reason)
            held = await self.desk.find(name)
            if left and held is None:
                return None
            held = await self.desk.held(name)
            return held.record if held.record.state == "ended" else (await self._end(name, reason)).record

    async def end_epoch(self, name: str, epoch: int, reason: str) -> None:
        """End a session if it is at that epoch still; the caller holds its lock."""
        if (await self.desk.held(name)).record.epoch == epoch:
            await self._end(name, reason)

    async def _end(self, name: str, reason: str) -> Held:
        before = await self.desk.held(name)
        held = await self.desk.change(name, lambda h: ownership.end(
            h, leader=self.desk.leader, now=self.desk.clock.wall(), reason=reason))
        args = {"session": name, "reason": reason}
        hosts = {before.record.owner, before.record.open_move.destination if before.record.open_move else None}
        if before.record.parked is not None:  # the node that it was on may not have heard that it had to go
            hosts.add(before.record.parked.host)
        for host in hosts - {None}:
            await self.desk.suggest(host, "session.drop", args, epoch=before.record.epoch)
        self.admission.wake()
        return held

    async def agent_silent(self, name: str, host: str, *, epoch: int, seconds: float, had_agent: bool = True) -> float:
        """A node says for how long nothing was heard of a session's client host; when to say so again, s."""
        return await self.silence.told(name, host, epoch, Quiet(seconds, had_agent))

    # -- losses: what the daemon's shell reports --------------------------------------
    async def worker_died(self, name: str, host: str, *, epoch: int, position: int | None = None,
                          begun: int | None = None, complete: int | None = None,
                          reason: str = "its worker ended") -> None:
        """A node says that its worker of a session has gone without being told to.

        ``position``, ``begun``, ``complete``: as in :class:`rgpu.migrate.records.schema.Failure`.
        """
        mover = self._movers.get(name)
        if mover is not None and mover.involves(host):
            mover.cancel(f"the worker on {host} has gone: {reason}")
        failure = Failure(host=host, device="", position=position, begun=begun, complete=complete,
                          when=self.desk.clock.wall(), reason=reason[:MAX_TEXT], epoch=epoch)
        await self._watching.worker_died(name, failure)

    async def cordon(self, host: str, state: str, reason: str = "") -> HostRecord:
        """``ready``, ``cordoned`` or ``draining``. Raises :class:`NotFound`, :class:`UsageError`."""
        return await self.hosts.set_state(host, state, reason)

    async def pause(self, paused: bool, reason: str = "") -> PoolRecord:
        """Stop automation, or let it go on: what waited is then looked at with the next tick."""
        record = await self.hosts.set_paused(paused, reason)
        if not paused:
            self._watching.look_again()
            self.draining.blocked.clear()
            self.admission.wake()
        return record

    async def leads(self) -> bool:
        """Whether the election still names this leader."""
        from rgpu.migrate.membership.election import current_leader

        found = await current_leader(self.desk.registry)
        return found is not None and found[1].revision == self.desk.leader.revision

    async def prune(self) -> None:
        """Forget the oldest history, the records of long ended sessions, and invitations that have expired."""
        await self.members.prune()
        registry, fence = self.desk.registry, created(LEADER, self.desk.leader.revision)
        stories = sorted((await registry.list(HISTORY)).entries, key=lambda entry: entry.mod_revision)
        ended = sorted((h for h in await self.desk.sessions() if h.record.state == "ended"), key=lambda h: h.revision)
        old = [entry.key for entry in stories[:-KEEP_HISTORY]]
        old += [session_key(held.record.name) for held in ended[:-KEEP_ENDED]]
        for at in range(0, len(old), 100):
            await registry.txn([fence], [Delete(key) for key in old[at:at + 100]])

    def spawn(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        """Background work of this term."""
        self._watching.spawn(work, what)
