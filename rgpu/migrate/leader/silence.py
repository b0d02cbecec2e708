"""End of sessions whose client host is silent for longer than its grace, after a checkpoint (OWNERSHIP 9).

A worker measures since when no agent's host was heard, on a clock that runs on while daemons are frozen or restarted;
its node reports that to the leader repeatedly. The leader writes the beginning into the session's record, so that it
outlives the worker, the node and the leader. :func:`decide` is pure:

==================================================  ==================================================================
state                                               action
==================================================  ==================================================================
the agent is heard                                  the silence is removed from the record
silent for less than the grace                      its beginning is recorded; next report when the grace is over
a worker's first FIRST_AGENT_SECONDS                the same: an agent that looks for its owner needs some time
silent for the grace                                a checkpoint is taken; if the agent is still not heard: ended
==================================================  ==================================================================

A worker that never had an agent (after a recovery, a move) does not restart the count: the time on record applies.
Where its client reports that the program has not used the session yet (`session.keep`), the agent counts as heard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from rgpu.migrate.leader.checkpoints import Checkpoints
from rgpu.migrate.leader.endings import Endings
from rgpu.migrate.leader.nodes import ASK_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import SessionRecord
from rgpu.session.errors import Fenced, RgpuError

log = structlog.get_logger(__name__)

AGENT_GRACE = 600.0  #: seconds, where neither the session nor the pool sets another value
FIRST_AGENT_SECONDS = 15.0  #: that a worker which never had an agent waits for one, whatever the silence before it
NOTICED_SECONDS = 5.0  #: shorter silences (an agent attaches anew) are ignored
LONGEST_WAIT = 60.0  #: s until a silent session is checked again


@dataclass(frozen=True, slots=True)
class Quiet:
    """Report of a worker: seconds since an agent's host was heard (0: it is), and whether the worker ever had one."""

    seconds: float
    had_agent: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision. ``since``: beginning of the silence by the leader's clock; 0: none. ``wait``: s to the next report."""

    action: Literal["none", "note", "end"]
    since: float = 0.0
    wait: float = LONGEST_WAIT


def decide(record: SessionRecord, quiet: Quiet, now: float, grace: float) -> Verdict:
    """Decide by the table of the module. ``grace``: the pool's, s, where the session asked for none."""
    if quiet.seconds < NOTICED_SECONDS:
        return Verdict("note" if record.silent_since and quiet.had_agent else "none")
    since, grace = now - quiet.seconds, grace_of(record, grace)
    if record.silent_since and not quiet.had_agent:
        since = min(since, record.silent_since)
    left = max(grace - (now - since), 0.0 if quiet.had_agent else min(FIRST_AGENT_SECONDS, grace) - quiet.seconds)
    if left <= 0:
        return Verdict("end", since)
    known = record.silent_since and abs(record.silent_since - since) < NOTICED_SECONDS
    return Verdict("none" if known else "note", since, min(LONGEST_WAIT, left))


def grace_of(record: SessionRecord, grace: float) -> float:
    """Return for how many seconds the session's client host may be silent."""
    return record.wants.client_grace or grace


class Silence:
    """The leader's part. Ending a session is automation, which an operator may pause; recording is not."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks,
                 checkpoints: Checkpoints, endings: Endings, grace: float,
                 kept: Callable[[str], bool] = lambda name: False) -> None:
        """Make the part. ``grace``: the pool's, s; ``kept(name)``: see :meth:`Admission.kept`."""
        self.term, self.records, self.commands, self.locks = term, records, commands, locks
        self.checkpoints, self.endings, self.grace, self._kept = checkpoints, endings, grace, kept

    async def told(self, name: str, host: str, *, epoch: int, seconds: float, had_agent: bool = True) -> float:
        """Decide about a session whose node reports for how long its client host was silent.

        Returns after how many seconds the node is to report again.
        """
        kept = not had_agent and self._kept(name)
        quiet = Quiet(0.0, True) if kept else Quiet(seconds, had_agent)
        verdict = decide((await self.records.held(name)).record, quiet, self.term.clock.wall(), self.grace)
        if verdict.action == "note":
            await self._note(name, host, epoch, verdict.since)
        elif verdict.action == "end":
            if (pause := await self.records.paused()) is not None:
                log.info("a silent client's session is left alone", session=name, reason=pause)
                return LONGEST_WAIT
            await self._end(name, host, epoch, verdict.since)
        return min(verdict.wait, FIRST_AGENT_SECONDS) if kept else verdict.wait

    async def _note(self, name: str, host: str, epoch: int, since: float) -> None:
        async with self.locks.session(name):
            held = await self.records.held(name)
            if self._theirs(held, host, epoch):
                await self.term.change(name, lambda h: ownership.silence(
                    h, epoch=epoch, since=since, leader=self.term.leader, now=self.term.clock.wall(),
                    reason="its client host is silent" if since else "its client host is heard again"))

    async def _end(self, name: str, host: str, epoch: int, since: float) -> None:
        async with self.locks.checkpoint(name), self.locks.session(name):
            if not self._theirs(await self.records.held(name), host, epoch):
                return
            try:
                parked = f"parked in checkpoint {(await self.checkpoints.write_locked(name))['image']}"
            except Fenced:
                raise
            except RgpuError as error:
                parked = f"no checkpoint could be taken: {error.message}"
            if await self._back(name, host, epoch):
                log.info("a silent client came back while its session was checkpointed", session=name)
                return
            seconds = self.term.clock.wall() - since
            await self.endings.end_epoch(name, epoch, f"its client host was silent for {seconds:.0f} s; {parked}")

    async def _back(self, name: str, host: str, epoch: int) -> bool:
        """Whether the agent is heard again by now."""
        try:
            seen = await self.commands.tell(host, "worker.describe", {"session": name}, epoch=epoch,
                                            timeout=ASK_SECONDS)
        except Fenced:
            raise
        except RgpuError:
            return False
        return bool(seen.get("attached")) and float(seen.get("silent_s") or 0.0) < NOTICED_SECONDS

    def _theirs(self, held: Held, host: str, epoch: int) -> bool:
        record = held.record
        return (record.owner, record.epoch, record.state) == (host, epoch, "running")
