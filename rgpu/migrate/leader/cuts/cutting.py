"""Carrying out of cuts: closes and opens the gates of members, and publishes their checkpoints in one transaction.

The states are in :mod:`.cut`; this module sends the commands to the members' nodes, and keeps the times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from rgpu.link.faults import fault
from rgpu.migrate.leader.cuts import cut as table
from rgpu.migrate.leader.cuts.cut import Cut, Told, pause_after, read_rows
from rgpu.migrate.leader.cuts.sharing import Sharing
from rgpu.migrate.leader.cuts.writing import Writing, answer
from rgpu.migrate.leader.nodes import ASK_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import CONFLICT_TRIES, Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.schema import CheckpointName, SessionRecord
from rgpu.session.errors import Conflict, Fenced, LimitReached, Refused, RgpuError, StoreFull

log = structlog.get_logger(__name__)

MOST_MEMBERS = 60  #: in one transaction: etcd takes 128 operations, two for each
LOOK_SECONDS = 1.0  #: that a node may hold a query whether a checkpoint is prepared
CATCH_UP_SECONDS, CATCH_UP_LOOK = 30.0, 0.2  #: that recovered members may be behind, and between two looks
READY_SECONDS = 600.0  #: that members may take to prepare their checkpoints
ROUND_SECONDS, DRAIN_SECONDS = 0.05, 0.5  #: that a node may hold a query while a gate is closed
MARGIN = 2.0  #: seconds after the attempt's time until a gate opens by itself

Done = tuple[CheckpointName, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Common:
    """Published checkpoints of one cut. ``taken``: its snapshot point, monotonic s. ``answers``: by member."""

    taken: float
    answers: dict[str, dict[str, Any]]


class Cutting:
    """Maker of consistent cuts; see the module docstring."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, sharing: Sharing,
                 writing: Writing) -> None:
        self.term, self.records, self.commands = term, records, commands
        self.sharing, self.writing = sharing, writing
        self._patience: dict[frozenset[str], float] = {}  #: by members: patience that their last cut needed, s

    async def run(self, members: Mapping[str, SessionRecord], limited: bool) -> Common:
        """Write a checkpoint of each member at one cut, and name all of them, or none. The caller holds their locks.

        Raises what a node raises for any member, :class:`Refused` where they reach no consistent cut.
        """
        if len(members) > MOST_MEMBERS:
            raise Refused(f"{len(members)} sessions share communicators: checkpoints of {MOST_MEMBERS} at most can be "
                          "taken together", sessions=len(members))
        for record in members.values():
            if record.state != "running":
                raise Refused(f"{record.name} is {record.state}, not running: {record.reason}", session=record.name)
        known = frozenset(members)
        one = _OneCut(self, members, self._patience.pop(known, table.FIRST_PATIENCE))
        try:
            return await one.run(limited)
        finally:
            self._patience[known] = max(table.FIRST_PATIENCE, one.cut.patience / 2)


class _OneCut:
    """One cut. ``members``: their records at its beginning."""

    def __init__(self, parts: Cutting, members: Mapping[str, SessionRecord], patience: float) -> None:
        self._parts, self._members = parts, members
        self.cut = Cut(members, patience)
        self._id = parts.term.new_id()
        self._writing: dict[str, asyncio.Task[Done]] = {}
        self._taken = self._deadline = self._begun = 0.0
        self._answers: dict[str, dict[str, Any]] = {}
        self._limited = False

    async def run(self, limited: bool) -> Common:
        """See :meth:`Cutting.run`."""
        self._limited = limited
        steps = {"catching_up": self._catch_up, "preparing": self._prepare, "holding": self._round,
                 "draining": self._round, "waiting": self._wait, "taking": self._take,
                 "writing": self._write, "publishing": self._publish}
        self._deadline = self._now() + CATCH_UP_SECONDS
        try:
            while self.cut.state not in table.OVER:
                fault(f"cut.{self.cut.state}")
                await self._step(steps[self.cut.state])
            if self.cut.state == "abandoned":
                raise Refused(f"the checkpoints of {', '.join(sorted(self._members))}, which share communicators, came "
                              f"to no common moment, after {self.cut.put_off} attempts: {self.cut.reason}; they run on")
            return Common(self._taken, self._answers)
        finally:
            if self.cut.state != "done":
                await asyncio.shield(self._give_up(self.cut.reason or "the leader gave it up"))

    async def _step(self, step: Any) -> None:
        """Carry out a state's step; a failed checkpoint or member ends the cut. Raises the error of the failure."""
        try:
            for name, task in self._writing.items():
                if task.done() and (error := task.exception()) is not None:
                    raise _of_member(name, error) from error
            await step()
        except BaseException as error:
            self.cut.feed("failed", reason=error.message if isinstance(error, RgpuError) else str(error))
            raise

    # -- steps of the states ------------------------------------------------------------
    async def _catch_up(self) -> None:
        """Wait until no member is behind its program, and begin all checkpoints then: a collective that waits for such
        a member would count as work that does not end."""
        behind = {name: str(said.get("behind") or "") for name, said in (await self._tell_all("look")).items()}
        for name, why in behind.items():
            if not why:
                self.cut.feed("caught_up", name)
        if self.cut.state == "preparing":
            self._writing = {name: asyncio.ensure_future(self._parts.writing.image(record, self._limited, self._id))
                             for name, record in self._members.items()}
            self._deadline = self._now() + READY_SECONDS
            return
        late, why = next((name, why) for name, why in behind.items() if why)
        if self._now() > self._deadline:
            raise Refused(f"no checkpoint was taken of {', '.join(sorted(self._members))}: for "
                          f"{CATCH_UP_SECONDS:.0f} s {late} has been behind its program: {why}", session=late)
        await asyncio.sleep(CATCH_UP_LOOK)

    async def _prepare(self) -> None:
        """Query the members until each has prepared its checkpoint as far as possible while the session runs."""
        answers = await self._tell_all("look", wait=LOOK_SECONDS)
        for name, said in answers.items():
            if said["ready"]:
                self.cut.feed("ready", name)
        if self.cut.state == "holding":
            self._begin()
        elif self._now() > self._deadline:
            raise Refused(f"checkpoints were not prepared within {READY_SECONDS:.0f} s")

    async def _round(self) -> None:
        """Have each member apply calls up to the largest numbers and pause there."""
        cut, left = self.cut, self._deadline - self._now()
        drain = cut.state == "draining"
        targets = cut.targets()
        answers = await self._tell_all("hold", targets, attempt=self._attempt, seconds=cut.patience + MARGIN,
                                       wait=max(0.0, min(left, DRAIN_SECONDS if drain else ROUND_SECONDS)), drain=drain)
        for name, said in answers.items():
            cut.feed("told", name, Told(said["stands"], said["drained"], read_rows(said["given"])))
        opened = [name for name, said in answers.items() if said["open"]]
        if cut.state in ("holding", "draining") and (opened or self._now() > self._deadline):
            cut.feed("late", reason=f"the gate of {', '.join(opened)} opened by itself" if opened else "")

    async def _wait(self) -> None:
        """Let the members run on for a while: one may wait for another outside of communicators."""
        log.info("a checkpoint of several sessions is put off", sessions=sorted(self._members),
                 attempt=self.cut.attempt, seconds=self.cut.patience, reason=self.cut.reason)
        await self._tell_all("open", attempt=self._attempt)
        until = self._now() + pause_after(self.cut.patience)
        while (left := until - self._now()) > 0:  # a message now and then: the prepared checkpoints wait for one
            await asyncio.sleep(min(left, LOOK_SECONDS))
            await self._tell_all("look")
        self.cut.feed("again")
        self._begin()

    def _begin(self) -> None:
        """Begin an attempt: gates are closed from here on."""
        self._begun = self._now()
        self._deadline = self._begun + self.cut.patience

    async def _take(self) -> None:
        self._taken = self._now()
        for name in await self._tell_all("take", attempt=self._attempt):
            self.cut.feed("took", name)

    async def _write(self) -> None:
        """Wait until all checkpoints are durable, and check that they are of one cut."""
        await asyncio.wait(self._writing.values(), return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() is not None for task in self._writing.values()):
            return  # the next step raises the error
        done = {name: task.result()[1] for name, task in self._writing.items()}
        if why := self.cut.agree({name: read_rows(result.get("given")) for name, result in done.items()}):
            raise Refused(f"the snapshots are of no one moment: {why}")
        others = {peer for result in done.values() for peer in result.get("peers") or ()} - self._members.keys()
        if others := set(await self._parts.sharing.live(sorted(others))):
            raise Refused(f"{', '.join(sorted(others))} came to share communicators meanwhile")
        for name in done:
            self.cut.feed("durable", name)

    async def _publish(self) -> None:
        """Name all checkpoints in one transaction, so that they count from here on."""
        parts, put_off = self._parts, self.cut.put_off
        done = {name: (task.result()[0].replace(put_off=put_off), task.result()[1])
                for name, task in self._writing.items()}
        others = ", ".join(sorted(self._members))
        reason = f", at one moment of {others}" + (f", after {put_off} attempts in vain" if put_off else "")
        for name, (checkpoint, _) in done.items():
            parts.writing.publishing(checkpoint, name)
        for _ in range(CONFLICT_TRIES):
            decisions = [parts.writing.decide(await parts.records.held(name), self._members[name], checkpoint, reason)
                         for name, (checkpoint, _) in done.items()]
            try:
                published = await parts.term.apply_all(decisions)
                break
            except Conflict:
                continue
        else:
            raise Conflict(f"the records of {others} change too fast")
        said = {"together": sorted(done), "put_off": put_off, "held_ms": round((self._taken - self._begun) * 1000, 3)}
        self._answers = {name: {**answer(name, checkpoint, result), **said}
                         for name, (checkpoint, result) in done.items()}
        self.cut.feed("published")
        fault("cut.published")
        await asyncio.gather(*(parts.writing.notice(held.record, done[held.record.name][0]) for held in published))

    # -- members -------------------------------------------------------------------------
    async def _give_up(self, reason: str) -> None:
        """Open all gates, and stop the writing of checkpoints; a member that is not reached does both by itself."""
        log.info("a checkpoint of several sessions is given up", sessions=sorted(self._members), reason=reason)
        await asyncio.gather(*(self._tell(name, "give_up", attempt=self._attempt, reason=reason)
                               for name in self._members), return_exceptions=True)
        for task in self._writing.values():
            task.cancel()
        await asyncio.gather(*self._writing.values(), return_exceptions=True)

    async def _tell_all(self, do: str, targets: Mapping[str, Mapping[str, int]] | None = None,
                        **about: Any) -> dict[str, dict[str, Any]]:
        """Send a command to all members at once; return their answers. Raises the first error, once all are done."""
        names = sorted(self._members)
        answers = await asyncio.gather(*(self._tell(name, do, **about, **(
            {"target": dict(targets[name])} if targets is not None else {})) for name in names),
            return_exceptions=True)
        for name, said in zip(names, answers, strict=True):
            if isinstance(said, BaseException):
                raise _of_member(name, said) from said
        return dict(zip(names, answers, strict=True))  # type: ignore[arg-type]

    async def _tell(self, name: str, do: str, **about: Any) -> dict[str, Any]:
        record = self._members[name]
        return await self._parts.commands.tell(
            str(record.owner), "session.cut", {"session": name, "do": do, "cut": self._id, **about},
            epoch=record.epoch, timeout=ASK_SECONDS)

    @property
    def _attempt(self) -> str:
        return f"{self._id}/{self.cut.attempt}"

    def _now(self) -> float:
        return self._parts.term.clock.monotonic()


def _of_member(name: str, error: BaseException) -> BaseException:
    """Return the error with the member's name; errors that callers distinguish keep their type."""
    if not isinstance(error, RgpuError) or isinstance(error, Fenced | LimitReached | StoreFull):
        return error
    return Refused(f"no checkpoint was taken of {name}, and so of none that shares communicators with it: "
                   f"{error.message}", session=name)
