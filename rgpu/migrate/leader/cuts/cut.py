"""One cut of sessions that share communicators (members of a gang): pure.

Each member's gate is closed at a boundary between two calls; it tells what its ranks have given to the collectives of
each communicator, and to the messages of each pair. Those that are behind apply calls up to the furthest. Once all have
given the same, and that is complete, nothing is half inside: there each takes its snapshot. The checkpoints count when
all of them are durable, by one transaction.

==========  ==================================  ===========  ===============================================
state       event                               next         what the members are told in the next state
==========  ==================================  ===========  ===============================================
preparing   ready: all are                      holding      hold: close the gate, at the furthest given
holding     told: all stand, with the same      draining     hold, and have it complete
draining    told: one gave more meanwhile       holding      hold, at the furthest given
draining    told: all have it complete          taking       take: the snapshot is taken here, and goes on
holding     late: the attempt's time is over    waiting      open
draining    late                                waiting      open
waiting     again                               holding      hold, in a further attempt
taking      took: all have                      writing      (nothing: they run on and write)
writing     durable: all are, of one cut        publishing   (nothing: the records of all change at once)
publishing  published                           done         cut: journals may be cut
any of      failed: a member moved, was lost,   abandoned    open, give up: nothing of it counts
these       ended, refuses, took too long
==========  ==================================  ===========  ===============================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["preparing", "holding", "draining", "waiting", "taking", "writing", "publishing", "done", "abandoned"]
Event = Literal["ready", "told", "late", "again", "took", "durable", "published", "failed"]

#: (state, event) → the state that follows; where the event is a member's, once the guard holds for all of them.
TABLE: Mapping[tuple[State, Event], State] = {
    ("preparing", "ready"): "holding",
    ("holding", "told"): "draining",
    ("draining", "told"): "taking",
    ("holding", "late"): "waiting",
    ("draining", "late"): "waiting",
    ("waiting", "again"): "holding",
    ("taking", "took"): "writing",
    ("writing", "durable"): "publishing",
    ("publishing", "published"): "done",
}
#: While one is in these, the gate of a member may be closed.
GATED: frozenset[State] = frozenset({"holding", "draining", "taking"})
OVER: frozenset[State] = frozenset({"done", "abandoned"})

FIRST_PATIENCE = 0.2  #: seconds that gates stay closed in the first attempt
MOST_PATIENCE = 10.0  #: and at most: what a move may take, where nothing else is asked for
MOST_TRIES = 8
GIVEN_UP = -2  #: a member has aborted the communicator: nothing of it is waited for


@dataclass(frozen=True, slots=True)
class Row:
    """What a member gave to one communicator, or pair. ``least``, ``most``: of its ranks; ``of``: who has ranks."""

    least: int
    most: int
    of: frozenset[str]


@dataclass(frozen=True, slots=True)
class Told:
    """What a member says of itself. ``stands``: its gate is closed, and no call is being applied."""

    stands: bool = False
    drained: bool = False
    given: Mapping[str, Row] = field(default_factory=dict)


def read_rows(given: Any) -> dict[str, Row]:
    """Return what a worker says it gave (``Given.rows``)."""
    return {str(name): Row(int(least), int(most), frozenset(map(str, of))) for name, (least, most, of)
            in dict(given or {}).items()}


def furthest(given: Mapping[str, Mapping[str, Row]]) -> dict[str, int]:
    """Return for each communicator and pair how much a member gave at most; without those that one has given up."""
    found: dict[str, int] = {}
    over = {name for rows in given.values() for name, row in rows.items() if row.least == GIVEN_UP}
    for rows in given.values():
        for name, row in rows.items():
            if name.partition(" ")[0] not in over:
                found[name] = max(found.get(name, row.most), row.most)
    return found


def targets(given: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, int]]:
    """Return for each member how far it has to come: the furthest, of what it takes part in."""
    most, found = furthest(given), {member: dict[str, int]() for member in given}
    for name, number in most.items():
        for member in frozenset().union(*(rows[name].of for rows in given.values() if name in rows)):
            if member in found and (number > 0 or name in given[member]):
                found[member][name] = max(number, 0)
    return found


def behind(given: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Return who has not given what another one has, each with what it is."""
    return [f"{member} has given {given[member][name].least if name in given[member] else 0} of {number} to {name}"
            for member, wanted in sorted(targets(given).items()) for name, number in sorted(wanted.items())
            if name not in given[member] or given[member][name].least < number]


class Cut:
    """See the module docstring: fed with events, it tells the state. ``put_off``: attempts that were in vain."""

    def __init__(self, members: Iterable[str], patience: float = FIRST_PATIENCE) -> None:
        self.members = frozenset(members)
        self.state: State = "preparing"
        self.attempt, self.patience, self.put_off = 1, patience, 0
        self.reason = ""
        self.told: dict[str, Told] = {}
        self._done: set[str] = set()  #: members of which the guard of this state holds

    @property
    def given(self) -> dict[str, Mapping[str, Row]]:
        """What each member told last; nothing of who did not tell."""
        return {member: self.told[member].given if member in self.told else {} for member in self.members}

    def targets(self) -> dict[str, dict[str, int]]:
        """Return how far each member has to come, as far as is known."""
        return targets(self.given)

    def feed(self, event: Event, member: str = "", told: Told | None = None, reason: str = "") -> State:
        """Take an event, and return the state that it leads to. What a state has no row for changes nothing."""
        if event == "failed" and self.state not in OVER:
            self.state, self.reason = "abandoned", f"{member}: {reason}" if member else reason
        elif event == "told" and self.state in ("holding", "draining", "waiting"):
            assert told is not None
            self.told[member] = told
            self._judge()
        elif (following := TABLE.get((self.state, event))) is not None and event != "told":
            if event in ("ready", "took", "durable"):
                self._done.add(member)
                if self._done < self.members:
                    return self.state
            self._enter(following, event, reason)
        return self.state

    def _judge(self) -> None:
        """What all have told last decides."""
        if self.state == "waiting" or self.told.keys() < self.members:
            return
        same = all(one.stands for one in self.told.values()) and not behind(self.given)
        if self.state == "holding" and same:
            self._enter("draining", "told")
        elif self.state == "draining" and not same:
            self.state = "holding"
        if self.state == "draining" and all(one.drained for one in self.told.values()):
            self._enter("taking", "told")

    def _enter(self, state: State, event: Event, reason: str = "") -> None:
        self._done.clear()
        if event == "late":
            self.put_off += 1
            self.reason = reason or self.why_not()
            if self.attempt >= MOST_TRIES:
                state = "abandoned"
        elif event == "again":
            self.attempt += 1
            self.patience = min(2 * self.patience, MOST_PATIENCE)
            self.told.clear()
        self.state = state

    def why_not(self) -> str:
        """Why it is not complete yet, for people."""
        silent = sorted(self.members - self.told.keys())
        moving = sorted(member for member, one in self.told.items() if not one.stands)
        busy = sorted(member for member, one in self.told.items() if one.stands and not one.drained)
        found = behind(self.given)
        if silent:
            return f"{', '.join(silent)} did not answer"
        if found:
            return "; ".join(found[:4])
        return f"{', '.join(moving)} came to no boundary between two calls" if moving else \
            f"work of {', '.join(busy)} is not complete"

    def agree(self, given: Mapping[str, Mapping[str, Row]]) -> str:
        """Return why snapshots of the members are of no one cut, by what each had given; empty where they are."""
        return "; ".join(behind(given)[:4])


def pause_after(patience: float) -> float:
    """Seconds that the members run on between two attempts: twice what they were held for."""
    return 2 * patience
