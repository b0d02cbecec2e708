"""The fence against deposed leaders, and against nodes that were never elected (OWNERSHIP 6).

A node obeys a leader revision only from the node whose election is on record with it. A revision that it has not
seen is looked up in the registry, and kept; a known one needs no registry, which may be unreachable (OWNERSHIP 3):

====================  ==================================  ========================================
the revision is       sent by                             then
====================  ==================================  ========================================
below the highest     any node                            ``fenced``: that leader was deposed
the highest seen      the node that was elected by it     done
the highest seen      another node                        ``authentication_failed``
above the highest     the node that is on record with it  it is the highest from here on: done
above the highest     another node                        ``authentication_failed``
above what is known   any node, while none is elected     ``fenced``: a leader without a record was deposed
above what is known   any, without the registry           ``pool_unavailable``: nothing new is begun then
====================  ==================================  ========================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from rgpu.migrate.membership.members import node_name
from rgpu.session.errors import AuthenticationFailed, Fenced, PoolUnavailable, RgpuError

log = structlog.get_logger(__name__)

#: Reads the leader linearizably: (host, create revision of the election's record); None while there is none.
Elected = Callable[[], Awaitable[tuple[str, int] | None]]


def judge(verb: str, leader: int, signer: str, elected: tuple[str, int]) -> RgpuError | None:
    """Return why a command is refused, None for one that is done; pure. ``signer``: name of the key that sent it.

    ``elected``: (host, revision) of the highest election known, looked up if ``leader`` was above it; ("", 0): none is.
    """
    host, highest = elected
    if leader < highest:
        return Fenced(f"{verb} by leader revision {leader}, which is over: {host} leads by {highest}")
    if not host:
        return Fenced(f"{verb} by leader revision {leader}: no node is elected")
    if leader > highest:
        return AuthenticationFailed(f"{verb} by leader revision {leader}, sent by {signer}: no such election is on "
                                    f"record; {host} leads by {highest}", reason="not elected")
    if signer != node_name(host):
        return AuthenticationFailed(f"{verb} by leader revision {leader}, sent by {signer}: {host} was elected by it",
                                    reason="not elected")
    return None


class LeaderFence:
    """``elected``: reads the leader. ``highest``: the highest leader revision on record that this node has seen."""

    def __init__(self, host: str, elected: Elected) -> None:
        self._host, self._read = host, elected
        self.leader, self.highest = "", 0
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None

    async def check(self, verb: str, leader: int, signer: str) -> None:
        """Let a command of the leader pass. ``signer``: name of the authenticated key that sent it (``node-HOST``).

        Raises :class:`Fenced`, :class:`AuthenticationFailed`, and :class:`PoolUnavailable` for a revision that is not
        known here while the registry cannot be read.
        """
        stands = True
        if leader > self.highest or not self.leader:
            try:
                stands = await self._look()
            except RgpuError as error:
                raise PoolUnavailable(f"{verb} by leader revision {leader}, which {self._host} has not seen, and the "
                                      f"registry does not tell it who was elected: {error.message}") from error
        gone = not stands and leader > self.highest
        refusal = judge(verb, leader, signer, ("", 0) if gone else (self.leader, self.highest))
        if refusal is not None:
            log.warning("a leader's command is refused", verb=verb, leader=leader, signer=signer, code=refusal.code,
                        reason=refusal.message)
            raise refusal

    def begin(self, elected: tuple[str, int] | None) -> None:
        """Take the leader of the registry as it is now, and forget revisions seen before."""
        self.leader, self.highest = elected or ("", 0)

    async def _look(self) -> bool:
        """Read the leader, by a reading that begins after this call; return whether there is one.

        Waiting callers share the next reading, so that one reading at a time is under way for any number of commands.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._look_once())
        return await asyncio.shield(self._next)

    async def _look_once(self) -> bool:
        async with self._turn:
            self._next = None
            found = await self._read()
        if found is not None and found[1] >= self.highest:  # lower only after a registry's restore: `pool adopt`
            self.leader, self.highest = found
        return found is not None
