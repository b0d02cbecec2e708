"""Checkpoints of sessions: written and named by the leader, and sessions brought back from one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rgpu.migrate.leader.cuts.cutting import Cutting
from rgpu.migrate.leader.cuts.sharing import OVER, Sharing
from rgpu.migrate.leader.cuts.writing import Writing, answer
from rgpu.migrate.leader.recovering.recovery import Recovery
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.schema import CheckpointName, SessionRecord
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.placement import request_for
from rgpu.session.errors import Fenced, LimitReached, NotFound, Refused, RgpuError

KEEP = 3600.0  #: s that the newest common checkpoint of several sessions is remembered
FRESH = 1.0  #: s: a common checkpoint that ended no longer ago also answers an automatic request


@dataclass(frozen=True, slots=True)
class Outcome:
    """Newest common checkpoint of several sessions. ``taken``: its snapshot point, ``over``: its end, monotonic s;
    ``error``: why there is none."""

    taken: float
    over: float
    answers: dict[str, dict[str, Any]]
    error: RgpuError | None = None


class Checkpoints:
    """Writer of checkpoints. Sessions that share communicators are checkpointed together (:mod:`.cuts`)."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks) -> None:
        self.term, self.records, self.locks = term, records, locks
        self.sharing, self.writing = Sharing(records, commands), Writing(term, commands)
        self.cutting = Cutting(term, records, commands, self.sharing, self.writing)
        self._refused: set[tuple[str, float]] = set()  #: (name, created) of sessions whose last one was over quota
        self._together: dict[str, Outcome] = {}  #: by session: its newest common checkpoint

    async def write(self, name: str, *, limited: bool = True, automatic: bool = False) -> dict[str, Any]:
        """Write and name a checkpoint; return {image, position, epoch, pages, bytes} and costs (:mod:`.cuts.writing`).

        It begins after a move or a recovery under way, and after another checkpoint of the session. Writing may
        take long and blocks no other operation: the session may be moved, ended, recovered meanwhile; then the worker
        gives the checkpoint up, or the naming is refused by the record's epoch. A session that shares communicators
        with others is checkpointed with all of them (:mod:`.cuts`), and {together, put_off} is returned, too.
        ``limited``: its user's quota applies. ``automatic``: requested by its agent, not by a person. Raises what the
        node raises, :class:`LimitReached`, :class:`Refused`, :class:`Fenced`.
        """
        asked = self.term.clock.monotonic()
        async with self.locks.session(name):
            members, known = await self.sharing.members(name)
        async with AsyncExitStack() as locked:
            for member in sorted(members):
                await locked.enter_async_context(self.locks.checkpoint(member))
            if len(members) > 1 and (done := self._done_meanwhile(name, asked, automatic)) is not None:
                return done
            for member in sorted(members):  # after a move or a recovery of each
                async with self.locks.session(member):
                    members[member] = (await self.records.held(member)).record
            members = {one: found for one, found in members.items() if one == name or found.state not in OVER}
            record = members[name]
            try:
                done = (await self._write_together(members, limited))[name] if len(members) > 1 else \
                    await self._write(record, limited, alone=not known)
            except LimitReached as error:
                await self._tell_refused(record, error)
                raise
            self._refused.discard((record.name, record.created))
            return done

    def _done_meanwhile(self, name: str, asked: float, automatic: bool) -> dict[str, Any] | None:
        """Return the answer to a request for which a common checkpoint was taken while it waited; None: none was.

        Agents of several members ask at about the same time. Raises the error of a failed common checkpoint.
        """
        last = self._together.get(name)
        if last is None or (last.taken < asked and not (automatic and last.over > asked - FRESH)):
            return None
        if last.error is not None:
            raise last.error
        return last.answers.get(name)

    async def _write_together(self, members: dict[str, SessionRecord], limited: bool) -> dict[str, dict[str, Any]]:
        """Write checkpoints of all members at one consistent cut."""
        asked, clock = self.term.clock.monotonic(), self.term.clock
        try:
            done = await self.cutting.run(members, limited)
            outcome = Outcome(done.taken, clock.monotonic(), done.answers)
        except RgpuError as error:
            outcome = Outcome(asked, clock.monotonic(), {}, error)
            told = {one for one, last in self._together.items() if str(last.error) == str(error)}
            for member in () if isinstance(error, Fenced | LimitReached) else sorted(members.keys() - told):
                await self.term.note("refuse_checkpoint", f"no checkpoint was written, and the session runs on: "
                                     f"{error.message}", session=member, user=members[member].user)
        self._together = {one: last for one, last in self._together.items() if last.over > asked - KEEP} | \
            dict.fromkeys(members, outcome)
        if outcome.error is not None:
            raise outcome.error
        return outcome.answers

    async def _tell_refused(self, record: SessionRecord, error: LimitReached) -> None:
        """Record a refusal, once until a checkpoint is written: an agent asks again every half minute."""
        known = record.name, record.created
        if known not in self._refused:
            self._refused.add(known)
            await self.term.note("refuse_checkpoint", f"no checkpoint was written, and the session runs on: "
                                 f"{error.message}", session=record.name, user=record.user)

    async def write_locked(self, name: str) -> dict[str, Any]:
        """Write a checkpoint as :meth:`write`, for a caller that holds the session's lock; no quota applies.

        It covers this session alone, also where that shares communicators, because it is about to lose its place.
        """
        return await self._write((await self.records.held(name)).record, False, alone=True)

    async def _write(self, record: SessionRecord, limited: bool, alone: bool) -> dict[str, Any]:
        """Write one checkpoint. ``alone``: also where the session shares communicators."""
        checkpoint, result = await self.writing.image(record, limited)
        if not alone and (others := await self.sharing.live([str(one) for one in result.get("peers") or ()])):
            raise Refused(f"{record.name} came to share communicators with {', '.join(others)} while its checkpoint "
                          "was taken, which counts for nothing: take it again", session=record.name)
        self.writing.publishing(checkpoint, record.name)
        published = await self.term.change(record.name, lambda held: self.writing.decide(held, record, checkpoint))
        await self.writing.notice(published.record, checkpoint)
        return answer(record.name, checkpoint, result)


class Restoring:
    """Restoring of sessions from a checkpoint on request."""

    def __init__(self, records: PoolRecords, locks: SessionLocks, recovery: Recovery) -> None:
        self.records, self.locks, self.recovery = records, locks, recovery

    async def restore(self, checkpoint: str, name: str, *, host: str | None = None,
                      position: int | None = None) -> dict[str, Any]:
        """Bring a session back from a checkpoint that its journal reaches.

        Returns {session, host, owner, epoch, position, checkpoint}.

        ``position``: of the checkpoint, from its manifest, where the record does not name it. Raises
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
    """Return the checkpoint to restore. Raises as :meth:`Restoring.restore`."""
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
