"""Rate limit of the threads that write a checkpoint: they wait for its share of a node's budget (:mod:`.budget`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rgpu.checkpoint.store.budget import TokenBucket


class Pace:
    """Write rate of one checkpoint. Thread-safe. ``rate``: bytes/s, 0: no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self._bucket = TokenBucket(rate, time.monotonic())
        self._condition = threading.Condition()
        self._exempt = 0
        self._stopped = False
        self._reported = (self._bucket.now, 0.0)
        self._waited = False

    def set_rate(self, rate: float) -> None:
        """Set the rate, bytes/s; it holds for waiting writers, too."""
        with self._condition:
            self._bucket.set_rate(rate, time.monotonic())
            self._condition.notify_all()

    def wait(self, size: int) -> bool:
        """Return True when ``size`` more bytes may be written; False after :meth:`stop`: they must not be written."""
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
        """Let no writer wait during the block: a session is paused. Bytes written so delay later ones."""
        with self._condition:
            self._exempt += 1
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._exempt -= 1

    def stop(self) -> None:
        """End all waiting: nothing more is to be written."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def renew(self, rate: float) -> tuple[float, bool]:
        """Set a new rate; return the result of :meth:`report`."""
        told = self.report()
        self.set_rate(rate)
        return told

    def report(self) -> tuple[float, bool]:
        """Return (bytes/s written since the last report, whether a thread had to wait)."""
        with self._condition:
            now, (when, taken) = time.monotonic(), self._reported
            used = (self._bucket.taken - taken) / max(1e-3, now - when)
            self._reported, waited, self._waited = (now, self._bucket.taken), self._waited, False
            return used, waited
