"""How long each phase of something took: a time line for those who look for what to make faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Milliseconds by phase, in the order in which they began first; one that comes again adds up. One thread's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock  #: seconds
        self._taken: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for ``name``, whether it ends well or not."""
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
        """Rounded to microseconds."""
        return {prefix + name: round(seconds * 1000, 3) for name, seconds in self._taken.items()}
