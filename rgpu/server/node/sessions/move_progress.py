"""How far moves are, as their sources say, for those who commanded them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: What a worker says of a move under way, and who asked for it may know.
TOLD = frozenset({"phase", "round", "pages_sent", "pages_total", "pages_left", "bytes_sent", "mode", "why",
                  "expected", "behind_ms", "waiting_bytes"})
Progress = Callable[[dict[str, Any]], None]


class MoveProgress:
    """One listener for each session: the newest."""

    def __init__(self) -> None:
        self._listeners: dict[str, Progress] = {}

    @contextmanager
    def listening(self, session: str, on_progress: Progress | None) -> Iterator[None]:
        """``on_progress`` hears of the session's move while the block lasts; None hears nothing."""
        if on_progress is not None:
            self._listeners[session] = on_progress
        try:
            yield
        finally:
            if on_progress is not None and self._listeners.get(session) is on_progress:
                del self._listeners[session]

    def tell(self, session: str, values: dict[str, Any]) -> None:
        """What a worker said of a move of its session."""
        listener = self._listeners.get(session)
        if listener is not None:
            listener({key: value for key, value in values.items() if key in TOLD})
