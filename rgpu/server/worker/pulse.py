"""Notices that this process was suspended: a thread whose beat is late.

A process that was suspended (SIGSTOP, a frozen container or machine) continues without notice, wherever it was.
The applying thread checks the last beat before it applies calls received meanwhile; so does the thread that beats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT = 0.05  #: seconds
IDLE_BEATS = 3  #: beats made as one while nothing is applied: it saves wake-ups, and a suspension is noticed as before
LATE = 0.45  #: seconds without a beat that count as a suspension


class Pulse:
    """The beating thread. It calls ``late(seconds)`` once for each time that the process was suspended.

    ``each(now, beats)`` is called at each beat, with the number of beats that it counts for; it returns whether
    nothing is under way.
    """

    def __init__(self, late: Callable[[float], None], each: Callable[[float, int], bool]) -> None:
        self._late, self._each = late, each
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Begin to beat, in a thread of its own."""
        self._last = time.monotonic()
        self._thread.start()

    def look(self) -> None:
        """Check whether the process was suspended until just now, and report it; for any thread."""
        if time.monotonic() - self._last > LATE:
            self._beat()

    def _run(self) -> None:
        beats = 1
        while True:
            time.sleep(beats * BEAT)
            self._beat()
            beats = IDLE_BEATS if self._each(self._last, beats) else 1

    def _beat(self) -> None:
        with self._lock:
            now = time.monotonic()
            stood, self._last = now - self._last, now
        if stood > LATE:
            self._late(stood)
