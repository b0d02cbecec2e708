"""Table-driven state machines without I/O: an event goes in, a new state and commands come out.

A role is an immutable value, so that a test can explore every interleaving of
several of them. An event that the table has no row for is *stale* (a repeated
or late message): it changes nothing, and the answer says so.

A guard looks at the role, as the event has left it, and says whether a row fits;
one that says so in a sentence gives the row's reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Event:
    """What happened. ``now``: seconds on the clock of the process that runs the role; ``found``: what a command has
    found.
    """

    kind: str
    now: float = 0.0
    reason: str = ""
    found: Any = None


@dataclass(frozen=True, slots=True)
class Command:
    """What the shell must do, and why. ``found``: of the event that led to it."""

    do: str
    reason: str
    found: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table: in ``state``, on ``event`` (and if ``guard`` holds): go to ``next`` and do ``commands``."""

    state: str
    event: str
    next: str
    commands: tuple[str, ...]
    reason: str
    guard: str = ""


S = TypeVar("S", bound="Role")


@dataclass(frozen=True, slots=True)
class Role:
    """A role's whole state. Subclasses add what their guards look at."""

    state: str = "idle"
    reason: str = ""


@dataclass(frozen=True)
class Step(Generic[S]):
    """``stale``: the table has no row for this event in this state, and nothing changed."""

    role: S
    commands: tuple[Command, ...] = ()
    stale: bool = False
    row: Row | None = None


class Machine(Generic[S]):
    """A table, its guards, and what an event (:attr:`note`) and a state (:attr:`enter`) leave in the role's data."""

    def __init__(self, rows: Iterable[Row], guards: Mapping[str, Callable[[S, Event], bool | str]],
                 note: Callable[[S, Event], Mapping[str, Any]] = lambda role, event: {},
                 enter: Callable[[S, Event], Mapping[str, Any]] = lambda role, event: {}) -> None:
        self.rows = tuple(rows)
        self.guards = guards
        self.note = note
        self.enter = enter
        self._index: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            self._index.setdefault((row.state, row.event), []).append(row)

    def with_rows(self, rows: Iterable[Row]) -> Machine[S]:
        """The same machine with another table."""
        return Machine(rows, self.guards, self.note, self.enter)

    @property
    def states(self) -> frozenset[str]:
        return frozenset(row.state for row in self.rows) | self.ends

    @property
    def ends(self) -> frozenset[str]:
        """States that no row leaves."""
        return frozenset(row.next for row in self.rows) - frozenset(row.state for row in self.rows)

    @property
    def commands(self) -> frozenset[str]:
        """Every command that a row gives: a shell has one method for each, and no others."""
        return frozenset(command for row in self.rows for command in row.commands)

    def step(self, role: S, event: Event) -> Step[S]:
        """The first row that fits decides."""
        rows = self._index.get((role.state, event.kind))
        if not rows:
            return Step(role, stale=True)
        noted = replace(role, **self.note(role, event))
        for row in rows:
            said = self.guards[row.guard](noted, event) if row.guard else True
            if said:
                reason = said if isinstance(said, str) else event.reason or row.reason
                after = replace(noted, state=row.next, reason=reason)
                after = replace(after, **self.enter(after, event))
                return Step(after, tuple(Command(do, reason, event.found) for do in row.commands), row=row)
        return Step(role, stale=True)
