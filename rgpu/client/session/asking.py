"""Requests to the pool for the session's owner: one at a time, each not before it is due."""

from __future__ import annotations

from collections.abc import Callable

from rgpu.client.run.pool_requests import PoolRequests
from rgpu.client.session.attachment import Event


class Asking:
    """Sends requests on a helper thread; its methods run in the loop. ``post``: has the loop call a function.

    ``seen``: returns the highest epoch that the agent has seen; called on any thread. ``found``: called with the pool's
    answer.
    """

    def __init__(self, requests: PoolRequests, session: str, seen: Callable[[], int], post: Callable[..., None],
                 found: Callable[[Event], None]) -> None:
        self._requests, self._session, self._seen, self._post, self._found = requests, session, seen, post, found
        self._under_way = False
        self.due = 0.0  #: monotonic seconds, before which no request is sent

    def ask(self, again: float) -> None:
        """Send a request, unless one is under way; the next is due at ``again`` (monotonic seconds)."""
        if not self._under_way:
            self._under_way, self.due = True, again
            self._requests.submit(self._put)

    def _put(self) -> None:
        self._post(self._told, self._requests.find_owner(self._session, self._seen()))

    def _told(self, event: Event) -> None:
        self._under_way = False
        self._found(event)
