"""Checkpoints of sessions: written and named by the leader, and sessions brought back from one."""

from __future__ import annotations

from typing import Any

from rgpu.link import effects
from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS
from rgpu.migrate.leader.recovering.recovery import Recovery
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import ownership
from rgpu.migrate.records.schema import CheckpointName, SessionRecord
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.placement import request_for
from rgpu.session.errors import LimitReached, NotFound, Refused

#: What a node says a checkpoint cost: times in ms, sizes in bytes.
CHECKPOINT_COST = ("pause_ms", "drain_ms", "total_ms", "cut_bytes", "paused_bytes", "raw_bytes", "unchanged_pages")


class Checkpoints:
    """See the module docstring."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks) -> None:
        self.term, self.records, self.commands, self.locks = term, records, commands, locks
        self._refused: set[tuple[str, float]] = set()  #: sessions (name, created) whose last one their quota refused

    async def write(self, name: str, *, limited: bool = True) -> dict[str, Any]:
        """Write a checkpoint and name it: {image, position, epoch, pages, bytes} and :data:`CHECKPOINT_COST`.

        It begins behind a move or a recovery under way, and behind another checkpoint of the session. Writing may
        take long and holds up nobody: the session may be moved, ended, recovered meanwhile, and then the worker gives
        the checkpoint up, or the record's epoch refuses its name. ``limited``: its user's quota bounds it. Raises what
        the node raises, :class:`LimitReached`, :class:`Refused`, :class:`Fenced`.
        """
        async with self.locks.checkpoint(name):
            async with self.locks.session(name):
                record = (await self.records.held(name)).record
            try:
                done = await self._write(record, limited)
            except LimitReached as error:
                await self._tell_refused(record, error)
                raise
            self._refused.discard((record.name, record.created))
            return done

    async def _tell_refused(self, record: SessionRecord, error: LimitReached) -> None:
        """Write it down, once until one is written: an agent asks again each half minute."""
        known = record.name, record.created
        if known not in self._refused:
            self._refused.add(known)
            await self.term.note("refuse_checkpoint", f"no checkpoint was written, and the session runs on: "
                                 f"{error.message}", session=record.name, user=record.user)

    async def write_locked(self, name: str) -> dict[str, Any]:
        """:meth:`write` for a caller that holds the session's lock, and needs it for the pool: no quota bounds it."""
        return await self._write((await self.records.held(name)).record, False)

    async def _write(self, record: SessionRecord, limited: bool) -> dict[str, Any]:
        name = record.name
        if record.state != "running":
            raise Refused(f"{name} is {record.state}, not running: {record.reason}", session=name)
        epoch, owner, now = record.epoch, str(record.owner), self.term.clock.wall()
        wanted = checkpoint_name(name, epoch, record.checkpoint.position if record.checkpoint else 0, now)
        result = await self.commands.tell(owner, "session.image", {
            "session": name, "image": wanted, "limited": limited}, epoch=epoch, timeout=CHECKPOINT_SECONDS, tries=2)
        checkpoint = CheckpointName(name=str(result["image"]), position=int(result["position"]), epoch=epoch,
                                    created=now,
                          bytes=int(result.get("bytes", 0)))
        effects.publishing(self.term.leader.host, name, epoch, checkpoint.position, checkpoint.name)
        published = await self.term.change(name, lambda held: ownership.publish_checkpoint(
            held, owner=owner, epoch=epoch, checkpoint=checkpoint, leader=self.term.leader, now=self.term.clock.wall(),
            reason=f"checkpoint {checkpoint.name} at position {checkpoint.position}"))
        await self.commands.suggest(owner, "session.notice", {
            "session": name, "epoch": epoch, "kind": "cut",
            "values": {"epoch": epoch, "position": published.record.journal_from, "image": checkpoint.name}},
                                    epoch=epoch)
        return {"session": name, "image": checkpoint.name, "position": checkpoint.position, "epoch": epoch,
                "pages": int(result.get("pages", 0)), "bytes": checkpoint.bytes,
                **{key: result[key] for key in CHECKPOINT_COST if key in result}}


class Restoring:
    """Sessions brought back from a checkpoint on request."""

    def __init__(self, records: PoolRecords, locks: SessionLocks, recovery: Recovery) -> None:
        self.records, self.locks, self.recovery = records, locks, recovery

    async def restore(self, checkpoint: str, name: str, *, host: str | None = None,
                      position: int | None = None) -> dict[str, Any]:
        """Bring a session back from a checkpoint that its journal reaches.

        The answer: {session, host, owner, epoch, position, checkpoint}.

        ``position``: of the checkpoint, where the record does not name it (the manifest says it). Raises
        :class:`NotFound`, :class:`Refused` when the journal before the checkpoint was cut.
        """
        async with self.locks.session(name):
            record = (await self.records.held(name)).record
            chosen = _chosen(record, checkpoint, position)
            place(await self.records.snapshot(), request_for(record, host=host))
            held = await self.recovery.run(name, f"restored from {checkpoint}", host=host, checkpoint=chosen,
                                           asked=True)
            if held is None:
                reason = (await self.records.held(name)).record.reason
                raise Refused(f"{name} was not restored: {reason}", session=name)
            record = held.record
            return {"session": name, "host": record.owner, "owner": record.owner, "epoch": record.epoch,
                    "position": chosen.position, "image": checkpoint}


def _chosen(record: SessionRecord, checkpoint: str, position: int | None) -> CheckpointName:
    """The checkpoint to go on from. Raises as :meth:`Restoring.restore`."""
    name = record.name
    if record.parked is not None:
        raise Refused(f"{name} is parked: it comes back by itself when there is room", session=name)
    if not record.live:
        raise Refused(f"{name} is {record.state}: its program has no journal to go on from", session=name)
    chosen = record.checkpoint
    if chosen is None or chosen.name != checkpoint:
        if position is None:
            raise NotFound(f"the registry names no checkpoint {checkpoint} of {name}", image=checkpoint)
        chosen = CheckpointName(name=checkpoint, position=position, epoch=record.epoch)
    if chosen.position < record.journal_from:
        raise Refused(f"checkpoint {checkpoint} stands at position {chosen.position}, and the journal before "
                      f"{record.journal_from} was cut: a live program cannot be rolled back", image=checkpoint)
    if not record.recover:
        raise Refused(f"{name} runs with --recover off: no journal is kept that could follow a checkpoint")
    if record.shares:
        raise Refused(f"{name} shares device memory with {', '.join(record.shares[-4:])}: it cannot go back alone")
    return chosen


def checkpoint_name(session: str, epoch: int, position: int, when: float) -> str:
    """A name that no other checkpoint has: a session has one owner for each epoch, which takes them in order."""
    return f"{session.replace('/', '@')}-e{epoch}-p{position}-{int(when * 1000):x}"
