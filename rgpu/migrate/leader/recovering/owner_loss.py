"""Losses of owners: reported by a node or an agent, or found by comparing records with nodes; recovery follows."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.recovering.recovery import Recovery
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import MAX_TEXT, Failure, SessionRecord
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.placement import request_for
from rgpu.session.errors import Fenced, RgpuError

log = structlog.get_logger(__name__)

UNREACHABLE_SECONDS = 10.0  #: of an owner that its agent does not reach (OWNERSHIP 7)


class Loss(NamedTuple):
    """Loss of an owner. ``failure``: the loss as counted by place (OWNERSHIP 9); None: it does not count.

    The loss of a node does not count: nodes are stopped, restarted and cut off for other reasons, and a session that
    was being replayed each time would be given up, though it could be brought back.
    """

    reason: str
    failure: Failure | None = None


class OwnerLoss:
    """The leader's handling of lost owners."""

    def __init__(self, term: Term, records: PoolRecords, locks: SessionLocks, moves: Moves, recovery: Recovery) -> None:
        self.term, self.records, self.locks, self.moves, self.recovery = term, records, locks, moves, recovery

    # -- reported -------------------------------------------------------------------
    async def worker_died(self, name: str, host: str, *, epoch: int, position: int | None = None,
                          begun: int | None = None, complete: int | None = None,
                          reason: str = "its worker ended") -> None:
        """Recover a session whose node reports that its worker ended unexpectedly.

        ``position``, ``begun``, ``complete``: as in :class:`rgpu.migrate.records.schema.Failure`; the device is taken
        from the record.
        """
        self.moves.cancel(name, f"the worker on {host} has ended: {reason}", host)
        failure = Failure(host=host, device="", position=position, begun=begun, complete=complete,
                          when=self.term.clock.wall(), reason=reason[:MAX_TEXT], epoch=epoch)
        async with self.locks.session(name):
            record = (await self.records.held(name)).record
            if record.owner != host or record.epoch != epoch or not record.live:
                log.info("a worker ended that owned nothing", session=name, host=host, epoch=epoch)
                return
            await self.recovery.run(name, f"{failure.reason} on {host}", failure.replace(device=record.device))

    async def shares(self, name: str, host: str, *, epoch: int, peer: str) -> None:
        """Record that a session of that node is about to share memory with another. Its own journal then no longer
        determines its memory, so it is not brought back from here on.

        Raises :class:`Refused`, :class:`Fenced` for a session that the node does not have, or that is moving.
        """
        async with self.locks.session(name):
            if peer in (await self.records.held(name)).record.shares:
                return
            await self.term.change(name, lambda h: ownership.share(
                h, epoch=epoch, host=host, peer=peer, leader=self.term.leader, now=self.term.clock.wall()))

    async def unreachable(self, name: str, *, epoch: int, reached: str | None = None,
                          seconds: float = UNREACHABLE_SECONDS) -> SessionRecord:
        """Find an owner that an agent can reach, because it cannot reach its own (OWNERSHIP 7); return the new record.

        The session is moved there, or recovered there if its owner does not answer the leader either. This is
        automation, so it is not done while that is paused.
        """
        record = (await self.records.held(name)).record
        if record.epoch != epoch or record.state != "running" or seconds < UNREACHABLE_SECONDS:
            return record
        if await self.records.paused() is not None:
            return record
        why = f"its agent does not reach {record.owner} since {seconds:.0f} s"
        target = reached
        try:
            snapshot = await self.records.snapshot()
            choice = place(snapshot, request_for(record, host=reached, avoid_hosts={str(record.owner)}))
            target = choice.host
            await self.moves.migrate(name, choice.host)
        except Fenced:
            raise
        except RgpuError as error:
            log.warning("cannot move to where the agent is heard", session=name, reason=error.message)
            async with self.locks.session(name):
                held = await self.records.held(name)
                if held.record.epoch == epoch and held.record.recoverable and target is not None:
                    place(await self.records.snapshot(), request_for(record, host=target))
                    await self.recovery.run(name, f"{why}; {error.message}", host=target)
        return (await self.records.held(name)).record

    # -- found ----------------------------------------------------------------------
    async def check(self, name: str) -> None:
        """Recover the session if its owner is lost, restarted without it, or unhealthy."""
        async with self.locks.session(name):
            held = await self.records.held(name)
            loss = await self.loss_of(held)
            if loss is not None:
                await self.recovery.run(name, loss.reason, loss.failure)
            elif held.record.state == "recovering":
                await self.recovery.go_on(held)

    async def loss_of(self, held: Held) -> Loss | None:
        """Return why the session's owner has lost it; None while it has not."""
        record = held.record
        if not record.live:
            return None
        host = str(record.owner)
        node = await self.records.node(host)
        now = self.term.clock.wall()
        if node is None:
            return Loss(f"the lease of {host} has ended")
        if node.record.incarnation != record.incarnation:
            # A restarting daemon takes over its workers' sessions before it registers itself.
            fresh = await self.records.held(record.name)
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
