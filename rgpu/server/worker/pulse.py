"""Notices that this process stood still: a thread whose beat is late.

A process that is stopped (SIGSTOP, a frozen container or machine) goes on without a word, in the middle of what it did.
The thread that applies looks at the last beat before it applies what came meanwhile; so does the thread that beats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT = 0.05  #: seconds
IDLE_BEATS = 3  #: that are one, while nothing is applied: the processor rests, and standing still is noticed as before
LATE = 0.45  #: seconds without a beat, or more than that


class Pulse:
    """``late(seconds)`` is told each time that the process stood still, once.

    ``each(now, beats)`` is called at each beat, with the number of beats that it stands for; it says whether nothing
    is under way.
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
        """Whether it stood still until just now; for any thread."""
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
