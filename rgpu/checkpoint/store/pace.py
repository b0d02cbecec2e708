"""Threads that write to a store wait here for their share of a node's budget (:mod:`.budget`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rgpu.checkpoint.store.budget import TokenBucket


class Pace:
    """Thread-safe. ``rate``: bytes/s, 0: no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self._bucket = TokenBucket(rate, time.monotonic())
        self._condition = threading.Condition()
        self._exempt = 0
        self._stopped = False
        self._reported = (self._bucket.now, 0.0)
        self._waited = False

    def set_rate(self, rate: float) -> None:
        """Set the rate, bytes/s; writers that wait are told."""
        with self._condition:
            self._bucket.set_rate(rate, time.monotonic())
            self._condition.notify_all()

    def wait(self, size: int) -> bool:
        """Return when ``size`` more bytes may be written; False: not at all, see :meth:`stop`."""
        with self._condition:
            ticket = self._bucket.take(size, time.monotonic())
            while not self._stopped and not self._exempt:
                seconds = self._bucket.wait(ticket, time.monotonic())
                if seconds <= 0:
                    break
                self._waited = True
                self._condition.wait(seconds)
            return not self._stopped

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Nobody waits: a session stands still meanwhile. What is written so is waited for afterwards."""
        with self._condition:
            self._exempt += 1
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._exempt -= 1

    def stop(self) -> None:
        """Nobody waits any more: nothing more is to be written."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def renew(self, rate: float) -> tuple[float, bool]:
        """A new rate, and what :meth:`report` says."""
        told = self.report()
        self.set_rate(rate)
        return told

    def report(self) -> tuple[float, bool]:
        """(bytes/s that were written since the last report, whether anybody had to wait)."""
        with self._condition:
            now, (when, taken) = time.monotonic(), self._reported
            used = (self._bucket.taken - taken) / max(1e-3, now - when)
            self._reported, waited, self._waited = (now, self._bucket.taken), self._waited, False
            return used, waited
