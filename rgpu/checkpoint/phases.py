"""Durations of the phases of an operation: a time line for finding out what to make faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Milliseconds by phase, in the order in which each began first; repetitions add up. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  #: seconds
        self._taken: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase ``name``, whether the block ends well or raises."""
        self._taken.setdefault(name, 0.0)
        began = self._clock()
        try:
            yield
        finally:
            self._taken[name] += self._clock() - began

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to the time of a phase."""
        self._taken[name] = self._taken.get(name, 0.0) + seconds

    def ms(self, prefix: str = "") -> dict[str, float]:
        """Return milliseconds by phase, rounded to microseconds; ``prefix`` is put before each name."""
        return {prefix + name: round(seconds * 1000, 3) for name, seconds in self._taken.items()}
