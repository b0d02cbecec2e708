"""Runs a worker's role of a move: each command of the table is carried out by the method ``do_COMMAND``.

One thread *drives* a role: a command with a result returns the next
event. Other threads may pass it events at any time (the record's content, a deadline):
these are handled at once, in their thread, and the result of the driving thread's present
command is then stale, which ends the driving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from rgpu.migrate.move.machine import Command, Event, Machine, Role
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

S = TypeVar("S", bound=Role)


class RoleShell(Generic[S]):
    """Base of both roles. Subclasses add a method for each command; it returns the event that follows, if any."""

    def __init__(self, machine: Machine[S], role: S, session: str, side: str) -> None:
        self.machine = machine
        self.role = role
        self.error: RgpuError | None = None  #: of the command that failed
        self.driving = False
        self.over = threading.Event()  #: the role has ended
        self.lock = threading.RLock()
        self._session, self._side = session, side

    def drive(self, kind: str) -> None:
        """Drive the role in the calling thread, from event ``kind`` until no command returns an event."""
        self.driving = True
        event: Event | None = self.event(kind)
        while event is not None:
            event = self._perform(self._take(event))
        with self.lock:
            self.driving = False

    def tell(self, kind: str, reason: str = "", found: Any = None) -> bool:
        """Handle an event from outside. Return False when it has no meaning in the present state."""
        event = self.event(kind, reason=reason, found=found)
        with self.lock:
            fits = not self.machine.step(self.role, event).stale
            commands = self._take(event)
        self._perform(commands)
        return fits

    @staticmethod
    def event(kind: str, *, reason: str = "", found: Any = None) -> Event:
        """Make an event of this moment."""
        return Event(kind, time.monotonic(), reason, found)

    def _take(self, event: Event) -> tuple[Command, ...]:
        with self.lock:
            before = self.role.state
            step = self.machine.step(self.role, event)
            self.role = step.role
            if step.stale:
                log.debug("a stale event", session=self._session, side=self._side, state=before, found=event.kind)
            elif self.role.state != before:
                log.info("move", session=self._session, side=self._side, state=self.role.state,
                         reason=self.role.reason)
            if self.role.state in self.machine.ends:
                self.over.set()
        if not step.stale:
            self.stepped(event)
        return step.commands

    def stepped(self, event: Event) -> None:
        """Called with each event that was handled; for progress."""

    def _perform(self, commands: tuple[Command, ...]) -> Event | None:
        following = None
        for command in commands:
            method: Callable[[Command], Event | None] = getattr(self, f"do_{command.do}")
            try:
                following = method(command) or following
            except RgpuError as error:
                return self._failed(command, error)
            except Exception as error:  # noqa: BLE001 - the role must go on, and the caller must get the error
                log.exception("a step of a move failed", session=self._session, side=self._side, command=command.do)
                return self._failed(command, RgpuError(f"{command.do}: {error}"))
        return following

    def _failed(self, command: Command, error: RgpuError) -> Event:
        log.info("a step of a move failed", session=self._session, side=self._side, command=command.do,
                 error=error.code, reason=error.message)
        self.error = error
        return self.event("failed", reason=error.message)
