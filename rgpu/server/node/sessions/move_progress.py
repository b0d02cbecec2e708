"""Progress of moves, as reported by their sources, for the callers that commanded them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Fields of a worker's report on a move that are passed on.
TOLD = frozenset({"phase", "round", "pages_sent", "pages_total", "pages_left", "bytes_sent", "mode", "why",
                  "expected", "behind_ms", "waiting_bytes"})
Progress = Callable[[dict[str, Any]], None]


class MoveProgress:
    """Passes progress on to one listener for each session, the newest."""

    def __init__(self) -> None:
        self._listeners: dict[str, Progress] = {}

    @contextmanager
    def listening(self, session: str, on_progress: Progress | None) -> Iterator[None]:
        """Call ``on_progress``, if given, with reports on the session's move while the block lasts."""
        if on_progress is not None:
            self._listeners[session] = on_progress
        try:
            yield
        finally:
            if on_progress is not None and self._listeners.get(session) is on_progress:
                del self._listeners[session]

    def tell(self, session: str, values: dict[str, Any]) -> None:
        """Pass on a worker's report on the move of its session."""
        listener = self._listeners.get(session)
        if listener is not None:
            listener({key: value for key, value in values.items() if key in TOLD})
