"""Making room by parking less important sessions: checkpointed, stopped, brought back later from the queue.

Nothing is lost: the checkpoint is named in the record before the session loses its place, the calls
after the checkpoint are in its agent's journal, and the agent looks for the owner until there is one
again. For the program only time passes.
"""

from __future__ import annotations

import structlog

from rgpu.link.faults import fault
from rgpu.migrate.leader.checkpoints import Checkpoints
from rgpu.migrate.leader.request_queue import RequestQueue
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.session.errors import Refused

log = structlog.get_logger(__name__)

FORGET_SECONDS = 10.0  #: that a node may take to end the worker of a parked session


class Parking:
    """The leader's parking of sessions; see the module docstring."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks,
                 queue: RequestQueue, checkpoints: Checkpoints) -> None:
        self.term, self.records, self.commands = term, records, commands
        self.locks, self.queue, self.checkpoints = locks, queue, checkpoints

    async def park(self, name: str, favour: str, why: str) -> Held:
        """Take a checkpoint of a running session, then park it in favour of ``favour``.

        Raises :class:`Refused` (it does not run, it keeps no journal or checkpoint, it was moved meanwhile) and what
        taking a checkpoint raises; the session then runs on.
        """
        async with self.locks.session(name):
            held = await self.records.held(name)
            record = held.record
            if record.state != "running" or not record.recover:
                raise Refused(f"{name} cannot be parked: it is {record.state}"
                              + ("" if record.recover else " with --recover off"), session=name)
            fault("park.image")
            await self.checkpoints.write_locked(name)
            fault("park.write")
            epoch, owner = record.epoch, record.owner
            node = await self.records.node(owner)
            store = node.record.store if node is not None else ""
            held = await self.term.change(name, lambda h: ownership.park(
                h, epoch=epoch, favour=favour, leader=self.term.leader, now=self.term.clock.wall(), reason=why,
                store=store))
            self.queue.any_parked = True
            fault("park.forget")
            await self.forget(held, str(owner))
            return held

    async def forget(self, held: Held, host: str | None = None) -> bool:
        """Have the node end the worker of a parked session; return whether it did."""
        parked = held.record.parked
        if parked is None:
            return True
        return await self.commands.suggest(host or parked.host, "worker.forget", {
            "session": held.record.name, "epoch": parked.epoch, "reason": held.record.reason},
            epoch=parked.epoch, timeout=FORGET_SECONDS)
