"""The rules that the effects of a whole pool must keep, whatever was broken in it. Pure.

Fed with what every process wrote down (:mod:`rgpu.session.effects`) and with
every change that the registry made to the session's record. Rules, by name:

================  =================================================================================
record-back       the record's epoch never falls, nor the position of its checkpoint while it lives
publication       a checkpoint is named at the epoch that took it, and that epoch was the record's
epoch-back        no attachment, accept or cut at a lower epoch after a higher one
accepted-twice    the program is given each answer once
unanswered        of a session whose program ended, every answer that was waited for was given
not-sent          an accepted answer was sent before, at that epoch
not-owner         …by a worker on the host that the record named owner of that epoch
before-active     …which had been told so
not-applied       …and which had applied the call, or was rebuilt behind it
two-workers       of two workers of one epoch, once the second is listened to the first is no more
gap               a worker applies calls in order, each once, from where it was rebuilt
after-offer       a worker that offered its session applies nothing until the move is off
cut-unpublished   a journal is cut only for a checkpoint that the record named, at that epoch, and not
                  further than the record allowed, after the leader began to name it
cut-needed        nobody is started, and nothing asked for, behind what was cut
================  =================================================================================

A worker that was cut off may go on applying calls and sending answers: receivers
refuse (OWNERSHIP 1), so only what was accepted is held against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rgpu.session.effects import Effect, History, Kind

RULES = ("record-back", "publication", "epoch-back", "accepted-twice", "unanswered", "not-sent", "not-owner",
         "before-active", "not-applied", "two-workers", "gap", "after-offer", "cut-unpublished", "cut-needed")


@dataclass(frozen=True, slots=True)
class Change:
    """The session's record as one transaction left it. ``checkpoint``: name, position, epoch."""

    revision: int
    state: str
    owner: str | None
    epoch: int
    checkpoint: tuple[str, int, int] | None = None
    cut: int = 0  #: how far the agent may have cut its journal


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    text: str


def check(histories: Sequence[History], changes: Sequence[Change]) -> list[Violation]:
    """Every violation in one session's effects; ``changes`` in the order of their revisions."""
    found = [*_record(changes)]
    workers = [history for history in histories if history.header.who == "worker"]
    leaders = [history for history in histories if history.header.who == "leader"]
    for history in workers:
        found += _worker(history)
    for history in histories:
        if history.header.who == "agent":
            found += _agent(history)
            found += _accepted(history, workers, changes)
            found += _cuts(history, workers, leaders, changes)
    return found


def _record(changes: Sequence[Change]) -> Iterator[Violation]:
    before: Change | None = None
    for change in changes:
        if before is not None and change.epoch < before.epoch:
            yield Violation("record-back", f"revision {change.revision} says epoch {change.epoch} after {before.epoch}")
        fresh = before is None or change.state == "starting"
        old = None if fresh or before is None else before.checkpoint
        if old is not None and change.checkpoint is not None and change.checkpoint[1] < max(change.cut, old[1] if
                                                                                  change.state != "recovering" else 0):
            yield Violation("record-back", f"revision {change.revision} names a checkpoint at {change.checkpoint[1]} "
                                           f"after one "
                                           f"at {old[1]}")
        if change.checkpoint is not None and change.checkpoint != old and not fresh and change.state != "recovering":
            name, _, epoch = change.checkpoint
            if not change.epoch == epoch == (before.epoch if before else epoch):
                yield Violation("publication", f"checkpoint {name} of epoch {epoch} was named at epoch {change.epoch}")
        before = change


def _worker(history: History) -> Iterator[Violation]:
    """Rules gap and after-offer."""
    position, offered = 0, False
    for effect in history.effects:
        if effect.kind in (Kind.BEGUN, Kind.REBUILT):
            position = effect.last
        elif effect.kind in (Kind.OFFERED, Kind.RESUMED):
            offered = effect.kind is Kind.OFFERED
        elif effect.kind is Kind.APPLIED:
            if effect.first != position + 1:
                yield Violation("gap", f"{history.name} applied {effect.first} to {effect.last} behind {position}")
            if offered:
                yield Violation("after-offer", f"{history.name} applied {effect.first} to {effect.last} after it had "
                                               "offered the session")
            position = effect.last


def _agent(history: History) -> Iterator[Violation]:
    """Rules epoch-back, accepted-twice, unanswered."""
    highest = 0
    wanted: set[int] = set()
    given: set[int] = set()
    for effect in history.effects:
        if effect.kind in (Kind.ATTACHED, Kind.ACCEPTED, Kind.CUT):
            if effect.epoch < highest:
                yield Violation("epoch-back", f"{effect.kind.name} of {effect.first} at epoch {effect.epoch} after "
                                              f"{highest}")
            highest = max(highest, effect.epoch)
        if effect.kind is Kind.WANTED:
            wanted.add(effect.first)
        elif effect.kind is Kind.ACCEPTED:
            if effect.first in given:
                yield Violation("accepted-twice", f"the answer of {effect.first}, again at epoch {effect.epoch}")
            given.add(effect.first)
        elif effect.kind is Kind.ENDED and not effect.note and (missing := wanted - given):
            yield Violation("unanswered", f"{len(missing)} answers were never given, the first that of {min(missing)}")


@dataclass
class _Sent:
    """One worker, as far as its answers concern the agent."""

    history: History
    answers: dict[int, int]  #: call: when its answer first went out
    active: int  #: since when it was the owner, ns; 0: never
    rebuilt: int  #: the position that it was rebuilt at
    applied: int  #: and how far it came


def _sent(history: History, epoch: int) -> _Sent:
    sent = _Sent(history, {}, 0, 0, 0)
    for effect in history.effects:
        if effect.kind is Kind.REBUILT:
            sent.rebuilt = effect.last
        elif effect.kind is Kind.APPLIED:
            sent.applied = effect.last
        elif effect.kind is Kind.ACTIVE and effect.epoch == epoch:
            sent.active = sent.active or effect.when
        elif effect.kind is Kind.ANSWERED and effect.epoch == epoch:
            sent.answers.setdefault(effect.first, effect.when)
    return sent


def _accepted(agent: History, workers: Sequence[History], changes: Sequence[Change]) -> Iterator[Violation]:
    """Rules not-sent, not-owner, before-active, not-applied, two-workers."""
    owners: dict[int, set[str | None]] = defaultdict(set)
    for change in changes:
        if change.owner is not None:
            owners[change.epoch].add(change.owner)
    by_epoch: dict[int, list[_Sent]] = {}
    order: dict[int, list[History]] = defaultdict(list)
    for effect in agent.effects:
        if effect.kind is not Kind.ACCEPTED:
            continue
        epoch, seq = effect.epoch, effect.first
        if epoch not in by_epoch:
            by_epoch[epoch] = [_sent(history, epoch) for history in workers]
        senders = [sent for sent in by_epoch[epoch] if sent.answers.get(seq, effect.when + 1) <= effect.when]
        if not senders:
            yield Violation("not-sent", f"the answer of {seq} was accepted at epoch {epoch}, and nobody had sent it")
            continue
        proper = [sent for sent in senders if sent.history.header.host in owners[epoch]]
        if not proper:
            yield Violation("not-owner", f"the answer of {seq} at epoch {epoch} came from {senders[0].history.name}; "
                                         f"the record names {sorted(map(str, owners[epoch])) or 'nobody'}")
            continue
        if not any(0 < sent.active <= sent.answers[seq] for sent in proper):
            yield Violation("before-active", f"{proper[0].history.name} sent the answer of {seq} before it was the "
                                             f"owner at epoch {epoch}")
        elif not any(seq <= max(sent.applied, sent.rebuilt) for sent in proper):
            yield Violation("not-applied", f"{proper[0].history.name} answered {seq} and stood at {proper[0].applied}")
        if len(senders) == 1:
            yield from _turn(order[epoch], senders[0].history, seq, epoch)


def _turn(order: list[History], sender: History, seq: int, epoch: int) -> Iterator[Violation]:
    if sender in order[:-1]:
        yield Violation("two-workers", f"the answer of {seq} came from {sender.name} again, after {order[-1].name} had "
                                       f"been listened to at the same epoch {epoch}")
    elif not order or order[-1] is not sender:
        order.append(sender)


def _cuts(agent: History, workers: Sequence[History], leaders: Sequence[History], changes: Sequence[Change]
          ) -> Iterator[Violation]:
    """Rules cut-unpublished, cut-needed."""
    begun: dict[str, int] = {}
    for history in leaders:
        for effect in history.effects:
            if effect.kind is Kind.PUBLISHING:
                begun[effect.note] = min(effect.when, begun.get(effect.note, effect.when))
    cuts: list[Effect] = []
    for effect in agent.effects:
        if effect.kind is Kind.CUT:
            yield from _cut(effect, begun, changes)
            cuts.append(effect)
        elif effect.kind is Kind.ATTACHED and cuts and effect.first <= max(cut.last for cut in cuts):
            yield Violation("cut-needed", f"the agent was asked to ship from {effect.first} at epoch {effect.epoch}; "
                                          f"it had cut up to {max(cut.last for cut in cuts)}")
    for history in workers:
        for effect in history.effects:
            kept = max((cut.last for cut in cuts if cut.when < effect.when), default=0)
            if effect.kind is Kind.ACTIVE and effect.last < kept:
                yield Violation("cut-needed", f"{history.name} became the owner at position {effect.last}; the journal "
                                              f"had been cut up to {kept}")


def _cut(effect: Effect, begun: dict[str, int], changes: Sequence[Change]) -> Iterator[Violation]:
    named = [change for change in changes if change.checkpoint is not None and change.checkpoint[0] == effect.note]
    allowed = [change for change in named if change.epoch == effect.epoch and change.cut >= effect.last]
    if not named:
        yield Violation("cut-unpublished", f"cut to {effect.last} for checkpoint {effect.note}, which no record ever "
                                           f"named")
    elif not allowed:
        yield Violation("cut-unpublished", f"cut to {effect.last} at epoch {effect.epoch} for checkpoint "
                                           f"{effect.note}; the "
                                           f"record allowed {max(change.cut for change in named)} at epoch "
                                           f"{named[0].epoch}")
    elif effect.note not in begun or begun[effect.note] > effect.when:
        yield Violation("cut-unpublished", f"cut for checkpoint {effect.note} before anybody began to name it")
