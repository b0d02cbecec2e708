"""Unfinished operations on record: resumed after an election; those of waiting sessions with growing intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.recovering.owner_loss import OwnerLoss
from rgpu.migrate.leader.recovering.recovery import Recovery
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.records.ownership import Held
from rgpu.session.errors import Conflict

log = structlog.get_logger(__name__)

#: Seconds: a shorter gap in a node's record is no loss, because a restarted daemon deletes it and makes it anew.
LOSS_GRACE = 0.3
CONFLICT_TRIES = 5
FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0  #: seconds until a session that waits is tried again


def patience(node_ttl: float, registered_for: float) -> float:
    """Return the seconds that nodes which are missing at an election get to come back.

    Their leases (of ``node_ttl`` s) ended because they died, or because the registry was unreachable. In the latter
    case the leader's own lease ended as well, and they have had ``registered_for`` s since its renewal already.
    """
    return min(node_ttl, max(LOSS_GRACE, 2 * node_ttl - registered_for))


class Resuming:
    """The leader's resuming of unfinished operations.

    ``forget_parked``: has a node end the worker of a parked session. ``patience``: s that missing nodes get.
    """

    def __init__(self, term: Term, records: PoolRecords, locks: SessionLocks, tasks: TermTasks, moves: Moves,
                 owner_loss: OwnerLoss, recovery: Recovery, forget_parked: Callable[[Held], Coroutine[Any, Any, bool]],
                 patience: Callable[[], float]) -> None:
        self.term, self.records, self.locks, self.tasks = term, records, locks, tasks
        self.moves, self.owner_loss, self.recovery = moves, owner_loss, recovery
        self._forget_parked, self._patience = forget_parked, patience
        self._retry: dict[str, tuple[float, float]] = {}  #: session: (not before, next interval)

    # -- after an election ------------------------------------------------------------
    async def resume_unfinished(self) -> None:
        """Finish or undo every move, start and recovery on record; nodes that are missing get time to come back."""
        work = []
        for held in await self.records.sessions():
            name = held.record.name
            if held.record.parked is not None:  # its worker may not have been ended
                work.append(self.tasks.guarded(self._forget_parked(held), f"end of {name}'s worker"))
            if held.record.live:
                work.append(self.tasks.guarded(self.resume(name, new_leader=True), f"resume {name}"))
        await asyncio.gather(*work)

    async def resume(self, name: str, new_leader: bool = False) -> None:
        """Finish the operation on record of one session. ``new_leader``: its node may be missing for a moment."""
        for _ in range(CONFLICT_TRIES):
            try:
                return await self._resume_once(name, new_leader)
            except Conflict as error:
                log.info("looked at again", session=name, reason=error.message)

    async def _resume_once(self, name: str, new_leader: bool) -> None:
        async with self.locks.session(name):
            held = await self.records.held(name)
            if held.record.move is not None and held.record.state in ("moving", "running"):
                await self.moves.finish(held)
                held = await self.records.held(name)
            if not held.record.live:
                return
            if await self.owner_loss.loss_of(held) is None:
                if held.record.state in ("starting", "recovering"):
                    await self.recovery.go_on(held)
                return
        if new_leader:
            await asyncio.sleep(self._patience())
        await self.owner_loss.check(name)

    # -- waiting sessions -------------------------------------------------------------
    async def tick(self, sessions: list[Held]) -> bool:
        """Try waiting sessions again, also those whose loss no event reported; return whether any waits."""
        any_waits = False
        for held in sessions:
            name, record = held.record.name, held.record
            any_waits = any_waits or record.parked is not None or record.state == "recovering" or (
                record.live and record.move is not None)
            if record.parked is not None:  # no event reports that its former node can be reached again
                if self._due(name):
                    self.tasks.spawn(self._forget_parked(held), f"end of {name}'s worker")
                continue
            waiting = record.state == "recovering" or (record.live and record.move is not None)
            if not waiting:
                self._retry.pop(name, None)
            elif not self.locks.busy(name) and self._due(name):
                self.tasks.spawn(self.resume(name), f"tick for {name}")
        return any_waits

    def _due(self, name: str) -> bool:
        """Whether a waiting session is tried again now: at growing intervals, until a node changes."""
        now = self.term.clock.monotonic()
        not_before, wait = self._retry.get(name, (0.0, FIRST_RETRY))
        if now < not_before:
            return False
        self._retry[name] = (now + wait, min(2 * wait, LONGEST_RETRY))
        return True

    def retry_all(self) -> None:
        """Have waiting sessions tried with the next tick, regardless of earlier failures."""
        self._retry.clear()
