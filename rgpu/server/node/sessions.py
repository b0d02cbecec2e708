"""What a node does with sessions: the verbs that a coordinator commands (docs/developers/registry.md, "Registry").

The node owns worker processes; the registry owns the truth. No verb here
decides who owns a session: `settle` reads the record and obeys it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from rgpu.checkpoint.device import DeviceFacts
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.store.images import BAD_IMAGE
from rgpu.link.data import tickets
from rgpu.link.data.tickets import Ticket
from rgpu.link.faults import fault
from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS, MOVE_SECONDS
from rgpu.migrate.scheduling.placement import mebibytes
from rgpu.server.node.devices.health import Health
from rgpu.server.node.store.checkpoints import Checkpoints
from rgpu.server.node.store.images import NodeImages
from rgpu.server.node.workers import handles as workers
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.server.node.workers.warm_workers import WarmWorkers
from rgpu.server.stalling import STUCK_SECONDS
from rgpu.session.devices import parts
from rgpu.session.errors import (
    Fenced,
    LinkError,
    NotFound,
    PoolUnavailable,
    Refused,
    RgpuError,
    StoreFull,
    TimedOut,
)

log = structlog.get_logger(__name__)

#: Ended sessions whose last figures a node keeps.
REMEMBERED = 256
END_SECONDS = 3.0  #: that a worker may take to go before it is ended


@dataclass
class DeviceSlot:
    """A device of this node and what is promised of it."""

    spec: str  #: cpu:0, cuda:1
    facts: DeviceFacts
    memory: int  #: bytes that sessions may use in all
    health: Health = Health()

    @property
    def healthy(self) -> bool:
        return self.health.healthy


@dataclass
class Incoming:
    """A session that is being received by a move."""

    move: str
    handle: WorkerHandle
    epoch: int


@dataclass(eq=False)
class Claim:
    """One worker that is being made for a session. Two leaders may command it at once: one has just been replaced."""

    epoch: int


@dataclass
class Node:
    """Workers and devices of one host."""

    host: str
    directory: Path
    images: NodeImages
    pool_secret: bytes
    slots: dict[str, DeviceSlot]
    on_event: Callable[[str, str, dict[str, Any]], Awaitable[None]]
    log_level: str = "info"
    module_cache_size: int = 0  #: bytes
    deadline: Callable[[], int] = lambda: -1  #: descriptor of the deadline page (OWNERSHIP 4)
    in_time: Callable[[], bool] = lambda: True
    suspect: Callable[[str, str], object] = lambda device, why: None  #: have the device examined, because of
    warm: WarmWorkers | None = None
    data_address: tuple[str, int] = ("127.0.0.1", 0)
    running: dict[str, WorkerHandle] = field(default_factory=dict)
    incoming: dict[str, Incoming] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    #: the newest start of a session here: an earlier one that is still at it finds that it is over
    claims: dict[str, Claim] = field(default_factory=dict)
    receiving: dict[str, str] = field(default_factory=dict)  #: likewise, the newest move
    bases: dict[str, str] = field(default_factory=dict)  #: the image that a worker here wrote or was made from
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)  #: last views of sessions that ended here
    #: sent by a move whose outcome is not known yet: the move, empty if an earlier daemon knew it
    paused: dict[str, str] = field(default_factory=dict)
    #: told how far a session's move is, by session
    listeners: dict[str, Callable[[dict[str, Any]], None]] = field(default_factory=dict)
    #: have the record looked at until it decides about a session that a move left here
    watch_move: Callable[[str, str], None] = lambda session, move: None
    ending: set[WorkerHandle] = field(default_factory=set)  #: they own nothing any more and are on their way out
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    checkpoint_bandwidth: float = 0.0  #: bytes/s for all checkpoints of this node together, 0: no limit

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.checkpoint_bandwidth, self.free)

    # -- devices --------------------------------------------------------------
    def free(self, spec: str) -> int:
        """Bytes of the device that no session here was promised."""
        used = sum(h.quota for h in self._handles() if spec in parts(h.device))
        return self.slots[spec].memory - used - (self.warm.memory(spec) if self.warm is not None else 0)

    def _handles(self) -> list[WorkerHandle]:
        """Of workers that take a part of a device, as long as their processes live."""
        return list(self.running.values()) + [i.handle for i in self.incoming.values()] + list(self.ending)

    async def _wait_for_room(self, device: str | None, quota: int) -> None:
        """Workers that are on their way out may have the room that is asked for."""
        wanted = set(parts(device)) if device else None
        for handle in [one for one in self.ending if wanted is None or not wanted.isdisjoint(parts(one.device))]:
            if any(self.free(spec) < quota for spec in parts(handle.device)):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(handle.closed.wait(), 2 * END_SECONDS)
                self.ending.discard(handle)

    def choose(self, device: str | None, quota: int) -> str:
        """A healthy device with room, or all that ``device`` names. Raises :class:`Refused` with the reason."""
        for spec in parts(device) if device else ():
            if spec not in self.slots:
                raise Refused(f"{self.host} has no device {spec}; it has {', '.join(self.slots)}")
        reasons = []
        for name in [device] if device else list(self.slots):
            against = [why for spec in parts(name) if (why := self._refuses(spec, quota))]
            if not against:
                return name
            reasons += against
        raise Refused(f"{self.host} is full: {'; '.join(reasons)}", host=self.host)

    def _refuses(self, spec: str, quota: int) -> str:
        if not self.slots[spec].healthy:
            return f"{spec} is unhealthy: {self.slots[spec].health.reason}"
        if self.free(spec) < quota:
            return f"{spec} has {mebibytes(self.free(spec))} free of the {mebibytes(quota)} asked for"
        return ""

    def check_deadline(self, what: str) -> None:
        """Nothing begins past the deadline; what runs goes on. Raises :class:`PoolUnavailable` (OWNERSHIP 3)."""
        if not self.in_time():
            raise PoolUnavailable(f"{self.host} is past its deadline: {what} waits until the registry answers")

    # -- the data port asks -----------------------------------------------------
    def find(self, ticket: Ticket) -> tuple[WorkerHandle, int]:
        """The worker that a ticket's holder may talk to, and its epoch. Raises :class:`NotFound`."""
        self.check_deadline("an attachment")
        if ticket.purpose == "pages":
            incoming = self.incoming.get(ticket.session)
            if incoming is None or ticket.agent != incoming.move:
                raise NotFound(f"{self.host} does not receive {ticket.session} in that move")
            return incoming.handle, incoming.epoch
        handle = self.running.get(ticket.session)
        if handle is None or handle.closed.is_set():
            raise NotFound(f"session {ticket.session} is not on {self.host}", session=ticket.session)
        return handle, self.epochs[ticket.session]

    # -- verbs --------------------------------------------------------------------
    async def worker_start(self, *, session: str, epoch: int, quota: int, device: str | None = None,
                           image: str | None = None, **_: Any) -> dict[str, Any]:
        """A worker for ``session`` at ``epoch``, empty or from an image; the epoch is fenced."""
        known = self._known(session)
        if epoch < known or (epoch == known and (session in self.running or session in self.claims)):
            raise Fenced(f"{self.host} has {session} at epoch {known}; {epoch} is over")
        claim = self.claims[session] = Claim(epoch)
        try:
            return await self._start(session, claim, quota, device, image)
        finally:
            if self.claims.get(session) is claim:
                del self.claims[session]

    def _known(self, session: str) -> int:
        """The newest epoch of the session that this node was told of."""
        claim = self.claims.get(session)
        return max(self.epochs.get(session, 0), claim.epoch if claim else 0)

    def _check_claim(self, session: str, claim: Claim) -> None:
        if self.claims.get(session) is not claim:
            raise Fenced(f"{self.host} was told something newer of {session} while its worker started at epoch "
                         f"{claim.epoch}")

    async def _start(self, session: str, claim: Claim, quota: int, device: str | None,
                     image: str | None) -> dict[str, Any]:
        self.bases.pop(session, None)
        await self._drop(session)
        epoch = claim.epoch
        await self._wait_for_room(device, quota)
        spec = self.choose(device, quota)
        await self.checkpoints.recall(spec, quota)
        tried = await self.images.candidates(session, image) if image else [""]
        warnings: list[str] = []
        for candidate in tried:
            try:
                self._check_claim(session, claim)
                position = await self._begin(session, claim, spec, quota, candidate)
                break
            except BAD_IMAGE as error:
                log.warning("an image is bad", session=session, image=candidate, error=error.code,
                            reason=error.message)
                warnings.append(f"image {candidate} is bad: {error.message}")
                if candidate == tried[-1]:
                    raise
        handle = self.running[session]
        # While it started another leader may have given the session to somebody else: it is not told to forget
        # what it does not have yet.
        self.watch_move(session, "")
        log.info("session starts here", session=session, epoch=epoch, device=spec, image=candidate, position=position)
        return {"position": position, "device": spec, "worker_pid": handle.pid, "image": candidate,
                "warnings": warnings}

    async def _begin(self, session: str, claim: Claim, spec: str, quota: int, image: str) -> int:
        """A worker that runs the session, empty or from ``image``; returns its position."""
        epoch = claim.epoch
        try:
            handle = await workers.start(self.directory, session, epoch=epoch, device=spec, quota=quota, state="empty",
                                         on_event=self.on_event, log_level=self.log_level,
                                         module_cache_size=self.module_cache_size, warm=self.warm)
        except TimedOut:
            for device in parts(spec):
                self.suspect(device, f"a worker of {session} that did not start")
            raise
        try:
            self._check_claim(session, claim)
        except Fenced:
            await self._end_handle(handle, "replaced")
            raise
        self.running[session], self.epochs[session] = handle, epoch
        try:
            await handle.give_deadline(self.deadline())
            position = 0
            if image:
                with await self.images.grant(session) as grant:
                    restored = await handle.request("restore", fds=grant.descriptors, image=image, store=grant.values,
                                                    timeout=600)
                position = int(restored["position"])
                self.bases[session] = image
            self._check_claim(session, claim)
            await handle.request("activate", epoch=epoch)
        except RgpuError:
            if self.running.get(session) is handle:
                del self.running[session]
            await self._end_handle(handle, "replaced")
            raise
        return position

    async def move_receive(self, *, session: str, move: str, epoch: int, quota: int, device: str | None = None,
                           **_: Any) -> dict[str, Any]:
        """Be the destination: a worker that waits for pages, and the ticket to reach it with."""
        if epoch <= self._known(session) and (session in self.running or session in self.claims):
            raise Refused(f"{session} runs on {self.host} already")
        fault("daemon.receive")
        self.receiving[session] = move
        phases = Phases()
        with phases.phase("room"):
            await self._discard(session)
            await self._wait_for_room(device, quota)
            spec = self.choose(device, quota)
            await self.checkpoints.recall(spec, quota)
        with phases.phase("worker"):
            handle = await workers.start(self.directory, session, epoch=epoch, device=spec, quota=quota,
                                         state="incoming", on_event=self.on_event, log_level=self.log_level,
                                         module_cache_size=self.module_cache_size, warm=self.warm)
        if self.receiving.get(session) != move:  # another move has begun, or the session ended
            await self._end_handle(handle, "discarded")
            raise Fenced(f"{self.host} was told something newer of {session} while its worker started for move {move}")
        del self.receiving[session]
        self.incoming[session] = Incoming(move, handle, epoch)
        self.watch_move(session, move)  # who began the move may be gone before it ends
        with phases.phase("deadline"):
            await handle.give_deadline(self.deadline())
        granted = tickets.issue(self.pool_secret, session, move, "pages", lifetime=600)
        return {"address": list(self.data_address), "ticket": granted.ticket, "secret": granted.secret, "device": spec,
                "worker_pid": handle.pid, "spare": handle.warm, "phases_ms": phases.ms()}

    async def move_send(self, *, session: str, move: str, address: list[Any], ticket: bytes, secret: bytes,
                        wishes: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Be the source: send everything; on return the session is paused and the copy verified."""
        self.check_deadline("a move")
        fault("daemon.send")
        handle = self._owned(session)
        asked = asyncio.get_running_loop().time()
        result = await handle.request("send", move=move, address=list(address), ticket=ticket, secret=secret,
                                      timeout=MOVE_SECONDS, **(wishes or {}))
        self.paused[session] = move
        self.watch_move(session, move)
        return {**result, "send_ms": (asyncio.get_running_loop().time() - asked) * 1000}

    async def _stuck(self, handle: WorkerHandle) -> str:
        try:
            return str((await handle.request("stuck", timeout=STUCK_SECONDS + 5)).get("why") or "")
        except Refused:  # a worker of an earlier version: the pause finds it out
            return ""

    async def worker_describe(self, *, session: str, forecast: bool = False, moving: bool = False,
                              **_: Any) -> dict[str, Any]:
        """What the worker says of itself; ``pins``: what keeps the session from moving; ``forecast``: its cost.

        ``moving``: work that does not end counts among the pins; it is looked for some seconds where that is so.
        """
        handle = self._owned(session)
        found = {"pins": [], **await handle.refresh()}
        if moving and (why := await self._stuck(handle)):
            return {**found, "pins": [*found["pins"], why]}
        if forecast:
            found["forecast"] = await handle.request("forecast", timeout=60)
        return found

    def holds(self, session: str, move: str) -> tuple[str, int, str] | None:
        """What this node has of the session: ("incoming" | "paused" | "running", epoch, move); None for nothing.

        ``move``: the one that is asked about; the answer names the one that it is held for, which may be another.
        """
        incoming = self.incoming.get(session)
        if incoming is not None and (not move or incoming.move == move):
            return "incoming", incoming.epoch, incoming.move
        handle = self.running.get(session)
        if handle is None or handle.closed.is_set():
            return None
        if session in self.paused:
            return "paused", self.epochs[session], self.paused[session]
        return "running", self.epochs[session], ""

    async def obey(self, session: str, move: str, action: str, epoch: int, still_open: str = "") -> None:
        """Do what the registry's record means for what is held here (:mod:`rgpu.migrate.records.reconcile`).

        ``still_open``: the move that the record has open; whatever else the worker sends for is off.
        """
        log.info("settle", session=session, move=move, action=action, epoch=epoch)
        fault(f"daemon.{action}")
        if action == "activate":
            incoming = self.incoming[session]
            await incoming.handle.request("activate", epoch=epoch)
            del self.incoming[session]
            self.bases.pop(session, None)  # the record knows a newer one
            old = self.running.get(session)
            self.running[session], self.epochs[session] = incoming.handle, epoch
            if old is not None:
                await self._end_handle(old, "moved")
        elif action == "resume":
            self.paused.pop(session, None)
            await self._owned(session).request("resume", still_open=still_open)
        elif action == "forget":
            self.paused.pop(session, None)
            handle = self.running.pop(session, None)
            if handle is not None:
                await self._dismiss(handle, "moved")
        elif action == "discard":
            await self._discard(session, move)

    async def adopt(self, session: str, epoch: int) -> None:
        """Serve the session at a higher epoch (`rgpu pool adopt`); its agent attaches anew. Again is no error."""
        if self.epochs.get(session, 0) >= epoch and session in self.running:
            return
        await self._owned(session).request("adopt", epoch=epoch)
        self.epochs[session] = epoch
        self.paused.pop(session, None)

    async def session_checkpoint(self, *, session: str, image: str, **_: Any) -> dict[str, Any]:
        """Write an image; it counts only when the registry names it. A full store is cleared up and asked again."""
        try:
            return await self._write_image(session, image)
        except StoreFull as error:
            freed = await self.images.make_room(session)
            log.warning("the image store is full", session=session, image=image, freed=freed, reason=error.message)
            if not freed:
                raise
        return await self._write_image(session, image)

    async def _write_image(self, session: str, image: str) -> dict[str, Any]:
        self.check_deadline("an image")
        handle = self._owned(session)
        base, others, facts = await self.images.bases(session, self.bases.get(session))
        async with self.checkpoints.under_way(session, handle) as part:
            with await self.images.grant(session) as grant:
                try:
                    done = await handle.request("checkpoint", fds=grant.descriptors, image=image, store=grant.values,
                                                base=base, others=others, facts=facts, room=part.room, rate=part.rate,
                                                timeout=CHECKPOINT_SECONDS)
                except TimedOut:
                    await handle.request("give_way", reason=f"it took longer than {CHECKPOINT_SECONDS:.0f} s")
                    raise
        self.bases[session] = image
        self.images.written(session, image)
        return done

    async def logs(self, *, session: str, lines: int = 100, **_: Any) -> dict[str, Any]:
        """The newest lines of the worker's log on this host; it outlives the worker."""
        path = workers.worker_folder(self.directory, session) / "worker.log"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 1000 * lines))
                text = file.read().decode(errors="replace")
        except OSError as error:
            raise NotFound(f"no log of {session} is on {self.host}", session=session) from error
        return {"host": self.host, "lines": text.splitlines()[-lines:]}

    async def worker_forget(self, *, session: str, epoch: int = 0, reason: str = "", **_: Any) -> dict[str, Any]:
        """End a worker that owns nothing; one of a newer epoch is left alone. Its session lives on: the agent is told
        to look for it, not that it ended."""
        if self._known(session) > epoch:
            return {"ended": False}
        log.info("a worker is forgotten", session=session, epoch=epoch, reason=reason)
        self.claims.pop(session, None)
        self.receiving.pop(session, None)
        self.paused.pop(session, None)
        await self._discard(session)
        handle = self.running.pop(session, None)
        if handle is not None:
            await self._end_handle(handle, "moved")
        return {"ended": handle is not None}

    async def session_notice(self, *, session: str, kind: str, values: dict[str, Any], **_: Any) -> dict[str, Any]:
        await self._owned(session).request("notice", kind=kind, values=values)
        return {}

    async def session_end(self, *, session: str, reason: str = "ended", **_: Any) -> dict[str, Any]:
        """End the session's worker; an unknown session is no error (it ended before)."""
        self.claims.pop(session, None)
        self.receiving.pop(session, None)
        await self._discard(session)
        handle = self.running.get(session)
        if handle is not None:
            self._remember(session, await handle.refresh())
            self.running.pop(session, None)
            await self._end_handle(handle, reason)
        return {"ended": handle is not None}

    def _remember(self, session: str, view: dict[str, Any]) -> None:
        """Keep what an ended session's worker said last, for `rgpu ps --all`."""
        self.ended.pop(session, None)
        self.ended[session] = {**view, "worker_pid": None, "memory_bytes": 0}
        while len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]

    # -- helpers --------------------------------------------------------------------
    def _owned(self, session: str) -> WorkerHandle:
        handle = self.running.get(session)
        if handle is None or handle.closed.is_set():
            raise NotFound(f"session {session} is not on {self.host}", session=session)
        return handle

    async def _drop(self, session: str) -> None:
        handle = self.running.pop(session, None)
        if handle is not None:
            await self._end_handle(handle, "replaced")

    async def _discard(self, session: str, move: str | None = None) -> None:
        incoming = self.incoming.get(session)
        if incoming is not None and (move is None or incoming.move == move):
            del self.incoming[session]
            await self._end_handle(incoming.handle, "discarded")

    async def _end_handle(self, handle: WorkerHandle, reason: str) -> None:
        """Ask the worker to go; end it if it does not."""
        try:
            await handle.request("forget", reason=reason, timeout=END_SECONDS)
            await asyncio.wait_for(handle.closed.wait(), END_SECONDS)
        except (TimeoutError, LinkError, RgpuError):
            handle.kill()

    async def _dismiss(self, handle: WorkerHandle, reason: str) -> None:
        """Ask the worker to go, and wait no longer than until its agent was told.

        A process that has a context on a GPU does not end at once, and a move that is over need not last so long.
        """
        self.ending.add(handle)
        try:
            await handle.request("forget", reason=reason, timeout=END_SECONDS)
        except RgpuError:
            handle.kill()
        task = asyncio.get_running_loop().create_task(self._see_off(handle))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_off(self, handle: WorkerHandle) -> None:
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(handle.closed.wait(), END_SECONDS)
        except TimeoutError:
            handle.kill()
            await handle.closed.wait()
        finally:
            self.ending.discard(handle)
        log.info("a dismissed worker has gone", session=handle.session, pid=handle.pid,
                 ms=round((asyncio.get_running_loop().time() - began) * 1000))

    def handle(self, session: str) -> WorkerHandle | None:
        """The session's worker here, also one that a move makes."""
        incoming = self.incoming.get(session)
        return self.running.get(session) or (incoming.handle if incoming else None)

    def died(self, session: str, pid: int) -> str | None:
        """A worker process has gone: "running" or "incoming" when it mattered, and it is forgotten."""
        handle = self.running.get(session)
        if handle is not None and handle.pid == pid:
            self.paused.pop(session, None)
            del self.running[session]
            return "running"
        incoming = self.incoming.get(session)
        if incoming is not None and incoming.handle.pid == pid:
            del self.incoming[session]
            return "incoming"
        return None
