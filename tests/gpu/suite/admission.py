"""Which rows run remotely side by side: as many as are asked for, while their sessions fit the card together."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rgpu.api.settings import parse_size
from tests.gpu.suite.rows import Row


def asked(row: Row, memory: str | None) -> int:
    """Bytes that a row's sessions ask one card for. ``memory``: of each session, instead of the row's."""
    return parse_size(memory or row.memory) * len(row.parts) * row.ranks


def admissible(wanted: int, running: Sequence[int], jobs: int, card: int) -> bool:
    """Whether a row that asks for so many bytes may begin beside those that run; one that is too large for the card
    begins alone. ``card``: bytes, 0: not known.
    """
    return not running or (len(running) < jobs and (not card or sum(running) + wanted <= card))


def card_memory(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that sessions may have of the smallest device, by ``rgpu nodes -o json``; 0: no node says."""
    return min((int(device["total_memory"]) for node in nodes for device in node["devices"]), default=0)


class Turns:
    """Rows in the order in which they came, at most ``jobs`` at a time, see :func:`admissible`."""

    def __init__(self, jobs: int, card: int) -> None:
        self._jobs, self._card = jobs, card
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._running: list[int] = []

    @contextlib.contextmanager
    def turn(self, wanted: int) -> Iterator[None]:
        """Wait until a row that asks for so many bytes may run, and run it."""
        me = object()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(lambda: self._waiting[0] is me and admissible(wanted, self._running, self._jobs,
                                                                                 self._card))
            self._waiting.popleft()
            self._running.append(wanted)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(wanted)
                self._changed.notify_all()
