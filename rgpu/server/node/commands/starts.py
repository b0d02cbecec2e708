"""``worker.start``: a worker for a session, empty or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from rgpu.checkpoint.store.checkpoint_store import BAD_CHECKPOINT
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.device_room import DeviceRoom
from rgpu.server.node.sessions.held import Claim, HeldSessions
from rgpu.server.node.sessions.worker_exits import end_worker
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.server.node.workers.starter import WorkerStarter
from rgpu.session.devices import parts
from rgpu.session.errors import Fenced, RgpuError, TimedOut

log = structlog.get_logger(__name__)


class SessionStarts:
    """``watch``: has a session's record read until it decides. ``suspect(device, why)``: has a device examined."""

    def __init__(self, held: HeldSessions, room: DeviceRoom, starter: WorkerStarter, checkpoints: NodeCheckpoints,
                 deadline: Deadline, watch: Callable[[str, str], object],
                 suspect: Callable[[str, str], object] = lambda device, why: None) -> None:
        self._held, self._room, self._starter, self._checkpoints = held, room, starter, checkpoints
        self._deadline, self._watch, self._suspect = deadline, watch, suspect

    async def start(self, *, session: str, epoch: int, quota: int, device: str | None = None,
                    image: str | None = None, **_: Any) -> dict[str, Any]:
        """Start a worker for ``session`` at ``epoch``, empty or from a checkpoint; returns when agents can attach.

        ``quota``: bytes of each device. Raises :class:`Fenced` for a superseded epoch, :class:`Refused`.
        """
        held = self._held
        known = held.newest_epoch(session)
        if epoch < known or (epoch == known and (session in held.running or session in held.claims)):
            raise Fenced(f"{held.host} has {session} at epoch {known}; {epoch} is over")
        claim = held.claims[session] = Claim(epoch)
        try:
            return await self._start(session, claim, quota, device, image)
        finally:
            if held.claims.get(session) is claim:
                del held.claims[session]

    async def _start(self, session: str, claim: Claim, quota: int, device: str | None,
                     checkpoint: str | None) -> dict[str, Any]:
        self._held.bases.pop(session, None)
        await self._held.replace(session)
        spec = await self._room.find(device, quota, session)
        tried = await self._checkpoints.candidates(session, checkpoint) if checkpoint else [""]
        warnings: list[str] = []
        for candidate in tried:
            try:
                self._held.check_claim(session, claim)
                position = await self._begin(session, claim, spec, quota, candidate)
                break
            except BAD_CHECKPOINT as error:
                log.warning("a checkpoint is bad", session=session, image=candidate, error=error.code,
                            reason=error.message)
                warnings.append(f"checkpoint {candidate} is bad: {error.message}")
                if candidate == tried[-1]:
                    raise
        handle = self._held.running[session]
        # While it started another leader may have given the session to another node: no command to forget it was
        # sent here then, because the session was not here yet.
        self._watch(session, "")
        log.info("session starts here", session=session, epoch=claim.epoch, device=spec, image=candidate,
                 position=position)
        return {"position": position, "device": spec, "worker_pid": handle.pid, "image": candidate,
                "warnings": warnings}

    async def _begin(self, session: str, claim: Claim, spec: str, quota: int, checkpoint: str) -> int:
        """Start a worker that runs the session, empty or from ``checkpoint``; return its position."""
        held, epoch = self._held, claim.epoch
        try:
            handle = await self._starter.start(session, epoch=epoch, device=spec, quota=quota, state="empty")
        except TimedOut:
            for device in parts(spec):
                self._suspect(device, f"a worker of {session} that did not start")
            raise
        try:
            held.check_claim(session, claim)
        except Fenced:
            await end_worker(handle, "replaced")
            raise
        held.running[session], held.epochs[session] = handle, epoch
        try:
            await handle.give_deadline(self._deadline.descriptor())
            position = 0
            if checkpoint:
                with await self._checkpoints.grant(session) as grant:
                    restored = await handle.request("restore", fds=grant.descriptors, image=checkpoint,
                                                    store=grant.values, timeout=600)
                position = int(restored["position"])
                held.bases[session] = checkpoint
            held.check_claim(session, claim)
            await handle.request("activate", epoch=epoch)
        except RgpuError:
            if held.running.get(session) is handle:
                del held.running[session]
            await end_worker(handle, "replaced")
            raise
        return position
