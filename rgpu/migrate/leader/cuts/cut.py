"""One consistent cut of sessions that share communicators (members of a gang): pure.

A cut begins when no member is behind its program, as one that was just recovered is: its peers' collectives wait for
it. Each member's gate is closed at a boundary between two calls; the member then reports how many collectives its ranks
have issued to each communicator, and how many messages to each pair. Members that are behind apply calls up to the
furthest. Once all have issued the same number, and the work is complete, no collective or message is in flight: each
member takes its snapshot there. The checkpoints count when all of them are durable, by one transaction.

=========== ==================================  ===========  ===============================================
state       event                               next         command to the members in the next state
=========== ==================================  ===========  ===============================================
catching_up caught_up: no member is behind      preparing    (checkpoints are begun)
preparing   ready: all are                      holding      hold: close the gate, at the furthest number
holding     told: all paused, equal numbers     draining     hold, and complete the work
draining    told: one issued more meanwhile     holding      hold, at the furthest number
draining    told: all work is complete          taking       take: the snapshot is taken, and calls go on
holding     late: the attempt's time is over    waiting      open
draining    late                                waiting      open
waiting     again                               holding      hold, in a further attempt
taking      took: all have                      writing      (none: they run on and write)
writing     durable: all are, of one cut        publishing   (none: all records change at once)
publishing  published                           done         cut: journals may be cut
any of      failed: a member moved, was lost,   abandoned    open, give up: no checkpoint counts
these       ended, refused, took too long
=========== ==================================  ===========  ===============================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["catching_up", "preparing", "holding", "draining", "waiting", "taking", "writing", "publishing", "done",
                "abandoned"]
Event = Literal["caught_up", "ready", "told", "late", "again", "took", "durable", "published", "failed"]

#: (state, event) → next state; an event of a member leads on once the guard holds for all members.
TABLE: Mapping[tuple[State, Event], State] = {
    ("catching_up", "caught_up"): "preparing",
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
#: States in which the gate of a member may be closed.
GATED: frozenset[State] = frozenset({"holding", "draining", "taking"})
OVER: frozenset[State] = frozenset({"done", "abandoned"})

FIRST_PATIENCE = 0.2  #: seconds that gates stay closed in the first attempt
MOST_PATIENCE = 10.0  #: seconds at most: the default downtime of a move
MOST_TRIES = 8
GIVEN_UP = -2  #: a member has aborted the communicator, which is then ignored


@dataclass(frozen=True, slots=True)
class Row:
    """Number that a member issued to one communicator or pair. ``least``, ``most``: of its ranks; ``of``: the members
    that have ranks of it."""

    least: int
    most: int
    of: frozenset[str]


@dataclass(frozen=True, slots=True)
class Told:
    """Report of a member. ``stands``: its gate is closed, and no call is being applied."""

    stands: bool = False
    drained: bool = False
    given: Mapping[str, Row] = field(default_factory=dict)


def read_rows(given: Any) -> dict[str, Row]:
    """Decode the numbers that a worker reports (``Given.rows``)."""
    return {str(name): Row(int(least), int(most), frozenset(map(str, of))) for name, (least, most, of)
            in dict(given or {}).items()}


def furthest(given: Mapping[str, Mapping[str, Row]]) -> dict[str, int]:
    """Return the largest number for each communicator and pair; without communicators that a member has aborted."""
    found: dict[str, int] = {}
    over = {name for rows in given.values() for name, row in rows.items() if row.least == GIVEN_UP}
    for rows in given.values():
        for name, row in rows.items():
            if name.partition(" ")[0] not in over:
                found[name] = max(found.get(name, row.most), row.most)
    return found


def targets(given: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, int]]:
    """Return for each member the numbers to reach: the largest of each communicator and pair that it takes part in."""
    most, found = furthest(given), {member: dict[str, int]() for member in given}
    for name, number in most.items():
        for member in frozenset().union(*(rows[name].of for rows in given.values() if name in rows)):
            if member in found and (number > 0 or name in given[member]):
                found[member][name] = max(number, 0)
    return found


def behind(given: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Return a sentence for each member and communicator or pair where the member is behind another."""
    return [f"{member} has given {given[member][name].least if name in given[member] else 0} of {number} to {name}"
            for member, wanted in sorted(targets(given).items()) for name, number in sorted(wanted.items())
            if name not in given[member] or given[member][name].least < number]


class Cut:
    """State machine of one cut, fed with events. ``put_off``: number of failed attempts."""

    def __init__(self, members: Iterable[str], patience: float = FIRST_PATIENCE) -> None:
        self.members = frozenset(members)
        self.state: State = "catching_up"
        self.attempt, self.patience, self.put_off = 1, patience, 0
        self.reason = ""
        self.told: dict[str, Told] = {}
        self._done: set[str] = set()  #: members for which the guard of this state holds

    @property
    def given(self) -> dict[str, Mapping[str, Row]]:
        """Last reported numbers of each member; empty for members without a report."""
        return {member: self.told[member].given if member in self.told else {} for member in self.members}

    def targets(self) -> dict[str, dict[str, int]]:
        """Return the numbers that each member has to reach, by the reports so far."""
        return targets(self.given)

    def feed(self, event: Event, member: str = "", told: Told | None = None, reason: str = "") -> State:
        """Take an event, and return the state that it leads to. An event without a row changes nothing."""
        if event == "failed" and self.state not in OVER:
            self.state, self.reason = "abandoned", f"{member}: {reason}" if member else reason
        elif event == "told" and self.state in ("holding", "draining", "waiting"):
            assert told is not None
            self.told[member] = told
            self._judge()
        elif (following := TABLE.get((self.state, event))) is not None and event != "told":
            if event in ("caught_up", "ready", "took", "durable"):
                self._done.add(member)
                if self._done < self.members:
                    return self.state
            self._enter(following, event, reason)
        return self.state

    def _judge(self) -> None:
        """Change the state by the last reports of all members."""
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
        """Return why the cut is not complete yet, for people."""
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
        """Return why the members' snapshots are not of one cut, by their numbers; empty where they are."""
        return "; ".join(behind(given)[:4])


def pause_after(patience: float) -> float:
    """Return the seconds that the members run on between two attempts: twice those for which they were held."""
    return 2 * patience
