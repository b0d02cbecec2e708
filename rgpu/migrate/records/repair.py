"""Repair of a registry that went back: `rgpu pool adopt` as a pure decision (OWNERSHIP 10).

A registry that was restored from a backup, wiped, or exchanged no longer names the right
owners. The nodes determine them: a session is where a worker holds its memory.
Each node reports the sessions that it holds, with the record as it last read it; this module
compares the reports with the present records and returns a :class:`Plan`: for
each session the record to write, at the highest epoch that any process has seen
+ 1, so that every agent accepts it and no older owner can come back. Three cases
are left to the operator:

* two claims on one session (two hosts hold it, or the registry names another
  host at an epoch not below the one held): ``keep`` names the host;
* a host that should answer and does not: ``without`` declares it lost;
* a session held by a node that never read its record: ``forget`` gives it up.

=========================================  =====================================================
held by                                    what follows
=========================================  =====================================================
one host, as in the record                 keep: nothing is written
one host; the record is older, names       own: that host, its incarnation, a new epoch; other
another owner before it, or is missing     copies are forgotten
no host; its program ended since           end
no host; on record as running              recover: as after a loss, from checkpoint and journal
no host; on record as waiting              keep: the leader continues with it
=========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rgpu.migrate.records.schema import U63, U64, KeyRecord, Name, Record, SessionRecord, Text

#: Larger epochs in a report are ignored: no real epoch gets near this.
MOST_EPOCH = 2**40

Action = Literal["keep", "own", "recover", "end", "forget"]


class Holding(Record, frozen=True, kw_only=True):
    """One session on one node. ``record``: as the node last read it; None: it never did."""

    session: Name
    holds: Literal["running", "paused", "incoming"]
    epoch: U63
    record: SessionRecord | None = None
    attached: bool = False
    position: U63 = 0


class Report(Record, frozen=True, kw_only=True):
    """Answer of one node. ``mistrust``: why it does not trust the registry; empty while it does.

    ``ended``: sessions whose program ended there, with the epoch; ``seen``: (session, agent's public key, epoch) from
    agents' requests for their owner.
    """

    host: Name
    incarnation: U64
    public_key: Text
    mistrust: Text = ""
    holdings: list[Holding] = []
    ended: dict[str, int] = {}
    seen: list[tuple[str, str, int]] = []


@dataclass(frozen=True, slots=True)
class Step:
    """Action on one session. ``record``: to be written over the record at ``revision``; None: nothing is written."""

    session: str
    action: Action
    host: str
    before: int  #: the registry's epoch, 0 without a record
    epoch: int
    reason: str
    record: SessionRecord | None = None
    revision: int = 0
    stale: tuple[str, ...] = ()  #: hosts whose copy is forgotten


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a repair. ``problems``: with any, nothing may be done. ``went_back``: why; empty: no repair is needed."""

    went_back: str
    steps: tuple[Step, ...]
    problems: tuple[str, ...]
    keys: tuple[KeyRecord, ...]  #: keys of nodes that answer and are not on record

    @property
    def changes(self) -> list[Step]:
        return [step for step in self.steps if step.action != "keep"]


@dataclass(frozen=True, slots=True)
class Answers:
    """Decisions of an operator where the reports do not decide. ``keep``: session: host."""

    keep: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()
    forget: Collection[str] = ()


def plan(records: Mapping[str, tuple[SessionRecord, int]], reports: Sequence[Report], expected: Collection[str],
         members: Collection[str], answers: Answers, now: float) -> Plan:
    """Plan a repair. ``records``: session: (record, mod revision); ``expected``: hosts that should answer;
    ``members``: names of the node keys on record; ``now``: Unix time, s."""
    steps: list[Step] = []
    problems = _silent(reports, expected, answers)
    names = set(records) | {held.session for report in reports for held in report.holdings}
    for name in sorted(names):
        try:
            step = _Session(name, records.get(name), reports, answers, now).decide()
        except _Undecided as error:
            problems.append(str(error))
            continue
        if step is not None:
            steps.append(step)
    unknown = [f"--keep {name}={host}: {host} does not hold {name}" for name, host in sorted(answers.keep.items())
               if not any(report.host == host and held.session == name and held.holds != "incoming"
                          for report in reports for held in report.holdings)]
    keys = tuple(KeyRecord(name=f"node-{report.host}"[:63], role="node", public=report.public_key)
                 for report in reports if f"node-{report.host}"[:63] not in members)
    return Plan(_why(reports, records), tuple(steps), tuple(problems + unknown), keys)


def _why(reports: Sequence[Report], records: Mapping[str, tuple[SessionRecord, int]]) -> str:
    """Return why the registry went back: a node does not trust it, or holds a session at a higher epoch; or empty."""
    for report in reports:
        if report.mistrust:
            return f"{report.host}: {report.mistrust}"
    for report in reports:
        for held in report.holdings:
            known = records.get(held.session)
            if held.holds != "incoming" and (known is None or known[0].epoch < held.epoch):
                return f"{report.host} holds {held.session} at epoch {held.epoch}, the registry says " \
                       f"{known[0].epoch if known else 'nothing'}"
    return ""


def _silent(reports: Sequence[Report], expected: Collection[str], answers: Answers) -> list[str]:
    answered = {report.host for report in reports}
    return [f"{host} does not answer: what it holds is not known; start its daemon, or say that it is gone for good: "
            f"--without {host}" for host in sorted(set(expected) - answered - set(answers.without))]


class _Undecided(Exception):
    """The reports do not decide; the message names the option that would."""


class _Session:
    """Reports and record of one session."""

    def __init__(self, name: str, known: tuple[SessionRecord, int] | None, reports: Sequence[Report],
                 answers: Answers, now: float) -> None:
        self.name, self.now = name, now
        self.record: SessionRecord | None = known[0] if known is not None else None
        self.revision = known[1] if known is not None else 0
        self.reports, self.answers = reports, answers
        found = [(report, held) for report in reports for held in report.holdings if held.session == name]
        self.claims = [(report, held) for report, held in found if held.holds != "incoming"]
        self.held = [held for _, held in found]
        seen = [epoch for report in reports for session, agent, epoch in report.seen
                if session == name and epoch <= MOST_EPOCH and agent in self._agents()]
        self.highest = max([self.before, *(held.epoch for held in self.held), *seen])

    @property
    def before(self) -> int:
        return self.record.epoch if self.record is not None else 0

    def _agents(self) -> set[str]:
        """Return the agents whose reports of the session's epoch count: those of its records."""
        known = [self.record, *(held.record for held in self.held)]
        return {record.agent for record in known if record is not None}

    def decide(self) -> Step | None:
        """Return the action on the session; None: none is needed. Raises :class:`_Undecided`."""
        if not self.claims:
            return self._nobody() if self.record is not None and self.record.live else None
        if self.name in self.answers.forget:
            return self._forget()
        report, held = self._claim()
        record = self.record
        stale = tuple(other.host for other, _ in self.claims if other.host != report.host)
        if record is not None and record.live and record.open_move is None and not stale \
                and self.highest == record.epoch == held.epoch \
                and (record.owner, record.incarnation) == (report.host, report.incarnation):
            return self._step("keep", report.host, record.epoch, "the registry is right about it")
        base = self._base(report, held)
        epoch = self.highest + 1
        reason = f"taken over from {report.host}, which held it at epoch {held.epoch}; the registry said " + (
            f"{record.state} at epoch {record.epoch}" if record is not None else "nothing")
        owned = base.replace(
            state="running", owner=report.host, incarnation=report.incarnation, epoch=epoch, move=None, reason=reason,
            changed=self.now, running_since=self.now, cut=max(base.journal_from, self._cut()), failures=[])
        return self._step("own", report.host, epoch, reason, owned, stale)

    def _claim(self) -> tuple[Report, Holding]:
        """Return the host that holds it. The record counts as a claim of another host from the held epoch on."""
        names = [f"{report.host} (epoch {held.epoch}{', its agent attached' if held.attached else ''})"
                 for report, held in self.claims]
        highest = max(held.epoch for _, held in self.claims)
        record = self.record
        if record is not None and record.live and record.epoch >= highest \
                and record.owner not in {report.host for report, _ in self.claims}:
            names.append(f"{record.owner} (on record at epoch {record.epoch}, holds nothing)")
        wanted = self.answers.keep.get(self.name)
        if len(names) == 1:
            return self.claims[0]
        for report, held in self.claims:
            if report.host == wanted:
                return report, held
        holders = " or ".join(f"--keep {self.name}={report.host}" for report, _ in self.claims)
        raise _Undecided(f"{self.name} is claimed twice: {', '.join(names)}; decide with {holders}")

    def _base(self, report: Report, held: Holding) -> SessionRecord:
        """Return the newest record of the session, whose owner may be stale."""
        known = [record for record in (self.record, held.record) if record is not None]
        if not known:
            raise _Undecided(f"{report.host} holds {self.name} and never read its record, and the registry has none: "
                             f"its user is not known; give it up with --forget {self.name}")
        return max(known, key=lambda record: (record.live, record.epoch,
                                              record.checkpoint.position if record.checkpoint else 0))

    def _cut(self) -> int:
        """Return the position up to which the agent may have cut its journal, by any record."""
        return max((record.journal_from for record in (self.record, *(held.record for held in self.held))
                    if record is not None), default=0)

    def _forget(self) -> Step:
        stale = tuple(report.host for report, _ in self.claims)
        record = None
        if self.record is not None and self.record.live:
            record = self.record.replace(state="ended", owner=None, move=None, epoch=self.highest, changed=self.now,
                                         reason="given up with --forget")
        return self._step("forget", "", self.highest, "given up with --forget", record, stale)

    def _nobody(self) -> Step:
        record = self.record
        assert record is not None
        if record.state in ("starting", "recovering") and self.highest == record.epoch:
            why = f"it is {record.state}: the leader goes on with it"
            return self._step("keep", str(record.owner), record.epoch, why)
        ended = max((report.ended.get(self.name, 0) for report in self.reports), default=0)
        if ended >= record.epoch:
            reason = "its program ended after the registry's state was written"
            return self._step("end", "", self.highest, reason, record.replace(
                state="ended", owner=None, move=None, epoch=self.highest, reason=reason, changed=self.now))
        reason = f"no node holds it; the registry said {record.state} on {record.owner} at epoch {record.epoch}"
        return self._step("recover", str(record.owner), self.highest, reason, record.replace(
            state="recovering", move=None, epoch=self.highest, reason=reason, changed=self.now, cut=self._cut()))

    def _step(self, action: Action, host: str, epoch: int, reason: str, record: SessionRecord | None = None,
              stale: tuple[str, ...] = ()) -> Step:
        return Step(self.name, action, host, self.before, epoch, reason, record, self.revision, stale)
