"""Table-driven state machines without I/O: from an event follow a new state and commands.

A role is an immutable value, so that a test can explore every interleaving of
several of them. An event without a row in the table is *stale* (a repeated
or late message): it changes nothing, and the step is marked so.

A guard is given the role as changed by the event, and returns whether its row fits;
a sentence instead of True becomes the reason of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Event:
    """Event for a role. ``now``: seconds on the clock of the process that runs the role; ``found``: the result of a
    command.
    """

    kind: str
    now: float = 0.0
    reason: str = ""
    found: Any = None


@dataclass(frozen=True, slots=True)
class Command:
    """Command that the shell must carry out, and why. ``found``: that of the event which led to it."""

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
    """Whole state of a role. Subclasses add the fields that their guards read."""

    state: str = "idle"
    reason: str = ""


@dataclass(frozen=True)
class Step(Generic[S]):
    """Result of an event. ``stale``: the table has no row for it in this state, and nothing changed."""

    role: S
    commands: tuple[Command, ...] = ()
    stale: bool = False
    row: Row | None = None


class Machine(Generic[S]):
    """A table, its guards, and the fields that an event (:attr:`note`) or entering a state (:attr:`enter`) sets."""

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
        """Return the same machine with another table."""
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
        """Every command in the table: a shell has exactly one method for each."""
        return frozenset(command for row in self.rows for command in row.commands)

    def step(self, role: S, event: Event) -> Step[S]:
        """Return the step of the first row that fits."""
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
