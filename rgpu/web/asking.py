"""Requests of a login to the daemon: each with that login's grant; concurrent pages share the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rgpu.link.control.async_client import AsyncControlClient
from rgpu.web.logins import Login

FRESH_SECONDS = 0.7  #: for which an answer is reused for the same request of a login
ANSWER_SECONDS = 10.0
LONG_SECONDS = 1300.0  #: without a message of progress, for actions that take long


class Asking:
    """Requests to the daemon. ``client``: to the daemon that started this process, under the page's own key."""

    def __init__(self, client: AsyncControlClient) -> None:
        self._client = client
        self._fresh: dict[tuple[str, str, str], tuple[float, asyncio.Task[Any]]] = {}

    async def look(self, login: Login, verb: str, **args: Any) -> Any:
        """Return the answer of a verb that changes nothing; at most :data:`FRESH_SECONDS` old.

        Raises the daemon's error, and :class:`PoolUnavailable`.
        """
        now = asyncio.get_running_loop().time()
        for key in [key for key, (until, task) in self._fresh.items() if until < now and task.done()]:
            del self._fresh[key]
        key = (login.grant, verb, repr(sorted(args.items())))
        found = self._fresh.get(key)
        if found is None or found[1].done() and found[0] < now:
            task = asyncio.ensure_future(self._client.call(verb, args, ANSWER_SECONDS, grant=login.grant))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised to the callers that wait
            found = self._fresh[key] = (now + FRESH_SECONDS, task)
        return await asyncio.shield(found[1])

    async def act(self, login: Login, verb: str, args: dict[str, Any],
                  on_progress: Callable[[dict[str, Any]], None] | None = None) -> Any:
        """Call a verb that changes something, and return its result. Raises as :meth:`look`."""
        result = await self._client.call(verb, args, LONG_SECONDS, on_progress, grant=login.grant)
        self._fresh.clear()
        return result

    async def redeem(self, code: str) -> dict[str, Any]:
        """Redeem a login code. Raises :class:`AuthenticationFailed`, :class:`PoolUnavailable`."""
        return dict(await self._client.call("web.redeem", {"code": code}, ANSWER_SECONDS))

    async def logout(self, login: Login) -> None:
        """End a grant at the daemon. Raises :class:`PoolUnavailable`."""
        await self._client.call("web.logout", {"grant": login.grant}, ANSWER_SECONDS)
