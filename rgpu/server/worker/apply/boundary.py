"""The boundary between two records, where the session can be paused: one thread applies, others pause it.

Between two records the applying thread checks whether it has to pause, or to end; so a snapshot is always at a
record's boundary. It waits there for the device, too, without holding up a snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rgpu.session.errors import LinkError, TimedOut


class Boundary:
    """See the module docstring.

    ``interrupt(True)`` makes the applying thread check here soon, until ``interrupt(False)`` was called as often.
    """

    def __init__(self, interrupt: Callable[[bool], None]) -> None:
        self.under_way = False  #: a driver call runs in another thread: this is no boundary
        self.waited = 0.0  #: seconds that the applying thread waited here for work, or was paused
        self._interrupt = interrupt
        self._condition = threading.Condition()
        self._pauses = 0
        self._brief = 0  #: of these, those that end by themselves
        self._paused_at = 0.0  #: when the first of them began
        self._applying = False
        self._stopped = False
        self._successors = 0  #: threads that wait to become the applying thread
        self._feeder = threading.Lock()  #: held by the thread that applies

    # -- the applying thread ------------------------------------------------------
    def enter(self) -> None:
        """Apply records from here on. Raises :class:`LinkError` where the thread has to end instead."""
        with self._condition:
            self._condition.wait_for(lambda: self._pauses == 0 or self._sent_away())
            if self._pauses:
                self.check()
            self._applying = True

    def leave(self) -> None:
        """Apply no record from here on."""
        with self._condition:
            self._applying = self.under_way
            self._condition.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        """Call ``done`` until it is true, without holding up a snapshot. Raises :class:`LinkError` as :meth:`check`."""
        self.leave()
        began = time.monotonic()
        try:
            while not done():
                self.check()
        finally:
            self.enter()
            self.waited += time.monotonic() - began

    def check(self) -> None:
        """Raise :class:`LinkError` where the applying thread has to end."""
        if self._sent_away():
            raise LinkError("another connection takes over, or the session ends here")

    def _sent_away(self) -> bool:
        return self._stopped or self._successors > 0

    # -- which thread that is -----------------------------------------------------
    def take_over(self, seconds: float) -> None:
        """Become the applying thread; an earlier one that waits has to end. Raises :class:`TimedOut`."""
        self._successors += 1
        self._interrupt(True)
        try:
            with self._condition:
                self._condition.notify_all()
            if not self._feeder.acquire(timeout=seconds):
                raise TimedOut("an earlier connection of the agent is still applying a call")
        finally:
            self._successors -= 1
            self._interrupt(False)

    def hand_back(self) -> None:
        """End the applying thread's turn."""
        self._feeder.release()

    def stop(self) -> None:
        """End a waiting applying thread; nothing can be applied usefully after it."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._interrupt(True)

    # -- pauses -------------------------------------------------------------------
    def pause(self, brief: bool = False) -> None:
        """Pause: on return no record is being applied, and none will be until :meth:`resume`.

        ``brief``: it ends after some seconds whatever happens; :meth:`resume` is told so, too.
        """
        self._interrupt(True)
        with self._condition:
            self._paused_at = self._paused_at if self._pauses else time.monotonic()
            self._pauses += 1
            self._brief += brief
            self._condition.wait_for(lambda: not self._applying)

    def hold(self) -> None:
        """Pause at the next boundary, without waiting for it; the applying thread itself may call this."""
        self._interrupt(True)
        with self._condition:
            self._paused_at = self._paused_at if self._pauses else time.monotonic()
            self._pauses += 1

    def stands(self, seconds: float) -> bool:
        """Whether, within that time, no record is being applied and none will be."""
        with self._condition:
            return self._condition.wait_for(lambda: self._pauses > 0 and not self._applying, seconds)

    @property
    def paused(self) -> bool:
        """Whether a pause is in force."""
        return self._pauses > 0

    @property
    def paused_for_long(self) -> bool:
        """Whether a pause is in force that may last until another process decides."""
        return self._pauses > self._brief

    @property
    def stood(self) -> float:
        """Seconds since the present pause began."""
        return time.monotonic() - self._paused_at

    def resume(self, brief: bool = False) -> None:
        """Undo one :meth:`pause`."""
        self._interrupt(False)
        with self._condition:
            self._pauses -= 1
            self._brief -= brief
            self._condition.notify_all()
