"""Gates of fake workers, for checkpoints of several sessions: they count collectives, and do what a leader says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rgpu.session.errors import Refused


class FakeGates:
    """``peers``: sessions that share the one communicator. ``old``: those whose workers are of the version before, and
    tell nothing.

    ``given``: what each gave to it. ``slow``: those that come to no boundary. ``meanwhile``: peers that a snapshot
    tells of, beside those. ``behind``: for how many looks a session is still behind its program.
    """

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.old: set[str] = set()
        self.given: dict[str, int] = {}
        self.slow: set[str] = set()
        self.meanwhile: dict[str, list[str]] = {}
        self.behind: dict[str, int] = {}
        self.closed: dict[str, str] = {}  #: by session: the attempt
        self.waiting: dict[str, str] = {}  #: sessions whose checkpoint waits, and the cut
        self.attempts: defaultdict[str, int] = defaultdict(int)  #: by cut
        self._ends: dict[tuple[str, str], asyncio.Future[None]] = {}

    def describe(self, session: str) -> dict[str, Any]:
        """What a worker says of its peers."""
        return {} if session in self.old else \
            {"peers": [one for one in self.peers if one != session and session in self.peers]}

    async def moment(self, session: str, cut: str) -> None:
        """A checkpoint waits for its moment. Raises :class:`Refused` where it is given up."""
        self.waiting[session] = cut
        end = self._ends[session, cut] = asyncio.get_running_loop().create_future()
        try:
            await end
        finally:
            del self.waiting[session]

    def result(self, session: str) -> dict[str, Any]:
        """What a checkpoint says of its moment."""
        if session in self.old:
            return {}
        return {"given": self._rows(session),
                "peers": [*self.describe(session).get("peers", []), *self.meanwhile.get(session, [])]}

    def told(self, session: str, do: str, cut: str, attempt: str = "", target: Mapping[str, int] | None = None,
             reason: str = "", **_: Any) -> dict[str, Any]:
        """Do what the leader says."""
        end = self._ends.get((session, cut))
        if do == "hold":
            self.attempts[attempt] += 1
            self.closed[session] = attempt
            self.given[session] = max([self.given.get(session, 0), *(target or {}).values()])
        elif do in ("open", "give_up", "take"):
            self.closed.pop(session, None)
        if do in ("take", "give_up") and end is not None and not end.done():
            end.set_result(None) if do == "take" else end.set_exception(Refused(f"it gave way: {reason}"))
        self.behind[session] = left = max(0, self.behind.get(session, 0) - 1)
        stands = session in self.closed and session not in self.slow
        return {"ready": self.waiting.get(session) == cut, "open": session not in self.closed, "stands": stands,
                "drained": stands, "given": self._rows(session),
                "behind": f"{left} looks to go" if left else ""}

    def _rows(self, session: str) -> dict[str, Any]:
        count = self.given.get(session, 0)
        return {"c": [count, count, list(self.peers)]} if session in self.peers else {}
