"""The question to the pool who owns the session: one at a time, and not before its time."""

from __future__ import annotations

from collections.abc import Callable

from rgpu.client.run.pool_desk import Desk
from rgpu.client.session.attachment import Event


class Asking:
    """Asks by a helper thread; all else is the loop's thread. ``post``: has a function called by the loop.

    ``seen``: the highest epoch that the agent has seen, when it is asked; from any thread. ``found``: told what the
    pool said.
    """

    def __init__(self, desk: Desk, session: str, seen: Callable[[], int], post: Callable[..., None],
                 found: Callable[[Event], None]) -> None:
        self._desk, self._session, self._seen, self._post, self._found = desk, session, seen, post, found
        self._under_way = False
        self.due = 0.0  #: monotonic seconds, before which nothing is asked

    def ask(self, again: float) -> None:
        """Ask, unless a question is under way; the next is due at ``again``."""
        if not self._under_way:
            self._under_way, self.due = True, again
            self._desk.submit(self._put)

    def _put(self) -> None:
        self._post(self._told, self._desk.find_owner(self._session, self._seen()))

    def _told(self, event: Event) -> None:
        self._under_way = False
        self._found(event)
