"""Counts a session's time on its device, and limits it to its share of that time.

The applying thread pauses, at a record's boundary, while the session has
overdrawn its allowance (:mod:`.allowance`); work submitted before continues.
No result that a program can observe depends on it: calls are applied later,
in the same order.

Work may wait for a call that was not applied yet (a kernel that spins, a host
function, SEMANTICS 19). So while there is work on the device the session is
not paused for longer than :data:`STUCK` at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Protocol

from rgpu.server.worker.allowance import Allowance

LOOK = 0.02  #: seconds between two looks while there is a limit: as much as may be submitted ahead
IDLE_LOOK = 0.5  #: the same while there is no limit
REST_LOOK = 2.0  #: the same while the device did nothing for the session since the last look
STUCK = 1.0  #: seconds: the longest pause while the device works
LONGEST = 5.0  #: seconds: the longest pause at a time, whatever the session owes
RECENT = 10.0  #: seconds over which the recent share is taken


class Working(Protocol):
    """The part of the device that is needed here."""

    def busy_seconds(self) -> float:
        """Return the seconds that the device has worked for the session."""


class Held(Protocol):
    """The part of the runtime that is needed here."""

    @property
    def device(self) -> Working:
        """Device of the session, None while there is none."""

    def pause(self, brief: bool) -> None:
        """Stop applying calls."""

    def resume(self, brief: bool) -> None:
        """Go on applying calls."""


class Limiter:
    """Limiter of one session's compute, while its worker lives."""

    def __init__(self, runtime: Held) -> None:
        self._runtime = runtime
        self._allowance = Allowance()
        self._changed = threading.Condition()
        self._over = False
        self._looked = (time.monotonic(), runtime.device.busy_seconds())
        self._recent = deque([self._looked])
        self._stood = 0.0
        self._worked = True  #: the device worked for the session between the last two looks
        self._thread = threading.Thread(target=self._run, name="limiter", daemon=True)
        self._thread.start()

    def limit(self, share: float) -> None:
        """Limit the session to this share (0 to 1) of the device's time from now on; 0: no limit."""
        with self._changed:
            self._allowance = Allowance(share)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop limiting; wait for the thread."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def describe(self) -> dict[str, Any]:
        """Return {busy_s, recent, limit, held_s}.

        ``busy_s``: seconds with work on the device; ``recent``: share of the last :data:`RECENT` seconds; ``limit``:
        share that it may have, None: any; ``held_s``: seconds that it was paused for the limit.
        """
        with self._changed:
            (then, before), now, busy = self._recent[0], time.monotonic(), self._runtime.device.busy_seconds()
            return {"busy_s": round(busy, 3), "recent": round(min(1.0, (busy - before) / max(now - then, 1e-3)), 3),
                    "limit": self._allowance.share or None, "held_s": round(self._stood, 3)}

    def _run(self) -> None:
        while not self._over:
            if self._look() > 0:
                self._hold()
            with self._changed:
                if not self._over:
                    self._changed.wait(LOOK if self._allowance.share else IDLE_LOOK if self._worked else REST_LOOK)

    def _look(self) -> float:
        """Count the work since the last look. Return the seconds that the session has to pause."""
        with self._changed:
            now, busy = time.monotonic(), self._runtime.device.busy_seconds()
            then, before = self._looked
            self._looked, self._worked = (now, busy), busy > before
            if now - self._recent[-1][0] >= IDLE_LOOK:
                self._recent.append(self._looked)
                while len(self._recent) > 1 and self._recent[1][0] <= now - RECENT:
                    self._recent.popleft()
            return self._allowance.spend(now - then, busy - before)

    def _hold(self) -> None:
        """Pause the session until nothing is owed any more, or until the module docstring's bounds."""
        self._runtime.pause(brief=True)
        began = time.monotonic()
        try:
            while not self._over and (owed := self._look()) > 0:
                stood, busy = time.monotonic() - began, self._looked[1]
                with self._changed:
                    self._changed.wait(min(owed, LOOK))
                working = self._runtime.device.busy_seconds() > busy
                if stood >= LONGEST or (working and stood >= STUCK):
                    return
        finally:
            self._runtime.resume(brief=True)
            self._stood += time.monotonic() - began
