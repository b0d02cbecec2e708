"""Gangs on record: ``gangs/NAME``, and every change of it as a pure decision.

A gang is the sessions that one job binds together. Each member has an owner record of its own, changed as any
session's (:mod:`rgpu.migrate.records.ownership`); the gang's record names its *generation*: which members, at which
epochs, belong together. A member that moved, was recovered or ended has another epoch or no record, so that the gang's
record is stale, and :func:`advance` raises the generation by compare-and-swap. A worker that joins a generation
presents its epoch: a worker of an older epoch is in no newer generation.

========  ====================================  =======================================================
decision  from                                  to
========  ====================================  =======================================================
form      no record, or ended                   running, generation + 1: with all members, in one transaction
admit     running, further sessions of members  running, with them; the generation stays
advance   running, members at other epochs      running, generation + 1
end       running, no member lives              ended
resume    ended, a member lives                 running, generation + 1: its run has started more processes
========  ====================================  =======================================================

A member's first session is NAME.RANK. Further processes of that rank (a data loader, a rank that torchrun started
again) have sessions of their own, NAME.RANK/2 and so on, which are members too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from rgpu.migrate.records.keys import LEADER, gang_key, queue_key
from rgpu.migrate.records.ownership import Decision
from rgpu.migrate.records.schema import (
    MAX_TEXT,
    SCHEMA,
    U63,
    HistoryRecord,
    Name,
    Program,
    Record,
    Seconds,
    SessionRecord,
    Text,
    encode,
)
from rgpu.migrate.registry.base import Compare, Delete, Operation, Put, unchanged
from rgpu.session.devices import MAX_LIST, MAX_RANKS
from rgpu.session.errors import AlreadyExists, UsageError

GangState = Literal["running", "ended"]
MAX_MEMBERS = 4 * MAX_RANKS  #: with the further sessions of ranks; members beyond it are not named in the record


class GangRun(Record, frozen=True, kw_only=True):
    """Part of one ``rgpu run`` in a gang: ``ranks`` from ``first`` on. ``name``: the run's; ``program``: its client."""

    name: Name
    agent: Text
    program: Program = Program()
    first: Annotated[int, Meta(ge=0, lt=MAX_LIST)] = 0
    ranks: Annotated[int, Meta(ge=1, le=MAX_LIST)] = 1


class GangRecord(Record, frozen=True, kw_only=True):
    """``gangs/NAME``. ``epochs``: the members of this generation, each at its epoch; ``generation``: from 1 on.

    ``changed``, ``created`` (no member is older), ``ended``: Unix time, s.
    """

    v: int = SCHEMA
    name: Name
    state: GangState = "running"
    user: Text = ""
    generation: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 1
    epochs: Annotated[dict[Name, U63], Meta(max_length=MAX_MEMBERS)] = {}
    ranks: Annotated[int, Meta(ge=1, le=MAX_LIST)]
    spread: bool = False
    runs: Annotated[list[GangRun], Meta(max_length=MAX_RANKS)] = []
    created: Seconds = 0.0
    changed: Seconds = 0.0
    ended: Seconds = 0.0
    reason: Text = ""

    def run_of(self, agent: str, program: Program) -> GangRun | None:
        """Return the run that this program began in the gang; None: there is none."""
        return next((run for run in self.runs if (run.agent, run.program.pid, run.program.host) == (
            agent, program.pid, program.host)), None)


@dataclass(frozen=True, slots=True)
class HeldGang:
    """Record of a gang as it was read."""

    record: GangRecord
    revision: int  #: mod revision


@dataclass(frozen=True, slots=True)
class GangDecision:
    """Decision about a gang: a transaction (without the election's comparison), the record that it makes, and why."""

    name: str
    compares: tuple[Compare, ...]
    operations: tuple[Operation, ...]
    record: GangRecord
    reason: str


def member_name(gang: str, rank: int) -> str:
    """Return the session name of a gang's rank: ``train.0``. Further sessions of the rank are ``train.0/2`` and on."""
    return f"{gang}.{rank}"


def check_gang_name(name: str) -> str:
    """Return the name, if it is valid for a gang. Raises :class:`UsageError`."""
    if not 0 < len(name) <= 56 or not name[0].isalnum() or not name.isascii() or \
            not all(c.isalnum() or c in "._-" for c in name):
        raise UsageError(f"a gang cannot be called {name!r}: use 1 to 56 letters, digits, dots, dashes and "
                         "underscores, beginning with a letter or digit", name=name)
    return name


def form(held: HeldGang | None, *, name: str, user: str, ranks: int, spread: bool, runs: Sequence[GangRun],
         members: Sequence[Decision], queued: dict[str, int], now: float, reason: str) -> GangDecision:
    """Create all members and the gang's record in one transaction. ``members``: the creation of each.

    ``queued``: names and mod revisions of the requests that waited for it, which are deleted. Raises
    :class:`AlreadyExists` while a gang of that name runs.
    """
    if held is not None and held.record.state != "ended":
        raise AlreadyExists(f"there is a gang {name} already: choose another name with --gang or --name, or end it "
                            f"with `rgpu kill {name}`", gang=name)
    record = GangRecord(
        name=name, user=user, ranks=ranks, spread=spread, runs=list(runs), changed=now,
        created=min([now, *(member.record.created for member in members)]), reason=reason[:MAX_TEXT],
        epochs={member.record.name: member.record.epoch for member in members},
        generation=held.record.generation + 1 if held else 1)
    compares = [one for member in members for one in member.compares if one.key != LEADER]
    compares += [unchanged(queue_key(one), at) for one, at in {name: 0, **queued}.items()]
    operations = [one for member in members for one in member.operations]
    operations += [Delete(queue_key(one)) for one in queued]
    return _decide("form", held, record, reason, compares, operations)


def advance(held: HeldGang, sessions: Iterable[SessionRecord], now: float) -> GangDecision | None:
    """Update the record to its members as they are now; None: it is up to date.

    ``sessions``: all on record. A member counts while it lives or is parked. An unfinished start, recovery or move
    changes nothing yet: the generation follows the epochs, which rise with each new owner.
    """
    old = held.record
    mine = [one for one in sessions if one.gang == old.name and one.created >= old.created]
    epochs = _members_now(old, mine)
    if old.state == "ended":
        if not epochs:
            return None
        why = f"generation {old.generation + 1}: its run began again ({', '.join(sorted(epochs))})"
        record = old.replace(state="running", ended=0.0, generation=old.generation + 1, epochs=epochs, changed=now,
                             reason=why[:MAX_TEXT])
        return _decide("resume", held, record, why)
    if not epochs:
        ends = sorted({one.reason for one in mine if one.reason})
        why = f"no member is left ({ends[0]})" if len(ends) == 1 else "no member is left"
        record = old.replace(state="ended", ended=now, changed=now, reason=why[:MAX_TEXT])
        return _decide("end", held, record, why)
    if epochs == old.epochs:
        return None
    if {name: epochs.get(name) for name in old.epochs} == old.epochs:
        why = f"further sessions of its ranks: {', '.join(sorted(epochs.keys() - old.epochs.keys()))}"
        return _decide("admit", held, old.replace(epochs=epochs, changed=now, reason=why[:MAX_TEXT]), why)
    why = f"generation {old.generation + 1}: {'; '.join(_differences(old.epochs, epochs, mine))}"
    record = old.replace(generation=old.generation + 1, epochs=epochs, changed=now, reason=why[:MAX_TEXT])
    return _decide("advance", held, record, why)


def _members_now(old: GangRecord, sessions: Sequence[SessionRecord]) -> dict[str, int]:
    """Return each member that lives or is parked, at its epoch: members on record first, then the oldest."""
    here = [one for one in sessions if one.live or one.parked is not None]
    here.sort(key=lambda one: (one.name not in old.epochs, one.created, one.name))
    return {one.name: one.epoch for one in here[:MAX_MEMBERS]}


def _differences(before: dict[str, int], after: dict[str, int], sessions: Sequence[SessionRecord]) -> list[str]:
    said = {one.name: one for one in sessions}
    found = [f"{name} is on {said[name].owner} at epoch {epoch}" if name in before else f"{name} has come"
             for name, epoch in sorted(after.items()) if before.get(name) != epoch]
    return found + [f"{name} is over ({said[name].reason if name in said else 'its record was deleted'})"
                    for name in sorted(before) if name not in after]


def _decide(decision: str, held: HeldGang | None, record: GangRecord, reason: str, compares: Iterable[Compare] = (),
            operations: Iterable[Operation] = ()) -> GangDecision:
    key = gang_key(record.name)
    compares = dict.fromkeys([unchanged(key, held.revision if held else 0), *compares])  # a node may take several
    return GangDecision(decision, tuple(compares), (*operations, Put(key, encode(record))), record, reason)


def story(decision: GangDecision, now: float, signature: dict[str, Any]) -> HistoryRecord:
    """Return the decision's history entry. ``signature``: of :meth:`rgpu.migrate.leader.term.decisions.Term`."""
    record = decision.record
    return HistoryRecord(when=now, session=record.name, decision=f"gang_{decision.name}",
                         reason=decision.reason[:MAX_TEXT], epoch=record.generation, user=record.user, **signature)


def describe(decision: GangDecision) -> dict[str, Any]:
    """Return a decision for the log."""
    return {"decision": f"gang_{decision.name}", "gang": decision.record.name,
            "generation": decision.record.generation, "reason": decision.reason}
