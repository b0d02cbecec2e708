"""Ending of a session: its record, its workers, and its request where it still waits."""

from __future__ import annotations

from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.request_queue import RequestQueue
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import SessionRecord


class Endings:
    """The leader's ending of sessions; see the module docstring."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks,
                 queue: RequestQueue, moves: Moves) -> None:
        self.term, self.records, self.commands = term, records, commands
        self.locks, self.queue, self.moves = locks, queue, moves

    async def end(self, name: str, reason: str = "its program ended", created: float = 0.0,
                  exit_code: int | None = None, over: tuple[str, ...] = ("ended",)) -> SessionRecord | None:
        """End a session and free its memory, or remove its waiting request; an ended session is no error.

        ``created``: only the session made at that time, because the name may be reused. ``exit_code``: its program's,
        where that is known. ``over``: states that stay as they are. Raises :class:`NotFound`.
        """
        if created and (now := (await self.records.held(name)).record).created != created:
            return now
        self.moves.cancel(name, f"the session ends: {reason}")
        async with self.locks.session(name):
            left = await self.queue.leave(name, reason)
            held = await self.records.find(name)
            if left and held is None:
                return None
            held = await self.records.held(name)
            return held.record if held.record.state in over else (await self._end(name, reason, exit_code)).record

    async def program_ended(self, name: str, reason: str, created: float = 0.0,
                            exit_code: int | None = None) -> SessionRecord | None:
        """End a session whose program has ended, as :meth:`end`.

        A failed session stays so until it is killed, with its reason: its program ended because of that.
        """
        return await self.end(name, reason, created, exit_code, over=("ended", "failed"))

    async def end_epoch(self, name: str, epoch: int, reason: str) -> None:
        """End a session if it is still at that epoch; the caller holds its lock."""
        if (await self.records.held(name)).record.epoch == epoch:
            await self._end(name, reason)

    async def _end(self, name: str, reason: str, exit_code: int | None = None) -> Held:
        before = await self.records.held(name)
        held = await self.term.change(name, lambda h: ownership.end(
            h, leader=self.term.leader, now=self.term.clock.wall(), reason=reason, exit_code=exit_code))
        args = {"session": name, "reason": reason}
        hosts = {before.record.owner, before.record.open_move.destination if before.record.open_move else None}
        if before.record.parked is not None:  # its former node may not have ended its worker yet
            hosts.add(before.record.parked.host)
        for host in hosts - {None}:
            await self.commands.suggest(host, "session.drop", args, epoch=before.record.epoch)
        self.queue.wake()
        return held
