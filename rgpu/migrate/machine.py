"""Table-driven state machines without I/O: an event goes in, a new state and commands come out.

A role is an immutable value, so that a test can explore every interleaving of
several of them. An event that the table has no row for is *stale* (a repeated
or late message): it changes nothing, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Event:
    """What happened. ``now``: seconds on the clock of whoever runs the role; ``pages``: of a round."""

    kind: str
    now: float = 0.0
    pages: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """What the shell must do, and why."""

    do: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """In ``state``, on ``event`` (and if ``guard`` holds): go to ``next`` and do ``commands``."""

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


class Machine(Generic[S]):
    """A table, its guards, and what an event leaves in the role's data."""

    def __init__(self, rows: tuple[Row, ...], guards: Mapping[str, Callable[[S, Event], bool]],
                 note: Callable[[S, Event], Mapping[str, Any]] = lambda role, event: {}) -> None:
        self.rows = rows
        self._guards = guards
        self._note = note
        self._index: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            self._index.setdefault((row.state, row.event), []).append(row)

    @property
    def states(self) -> frozenset[str]:
        return frozenset(row.state for row in self.rows) | frozenset(row.next for row in self.rows)

    def step(self, role: S, event: Event) -> Step[S]:
        """The first row that fits decides."""
        noted = replace(role, **self._note(role, event))
        for row in self._index.get((role.state, event.kind), ()):
            if not row.guard or self._guards[row.guard](noted, event):
                reason = event.reason or row.reason
                commands = tuple(Command(do, reason) for do in row.commands)
                return Step(replace(noted, state=row.next, reason=reason), commands)
        return Step(role, stale=True)
