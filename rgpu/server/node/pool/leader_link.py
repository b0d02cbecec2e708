"""The way from this node to the leader: here when this node leads, over control otherwise.

What only the leader may do is passed on as ``node.command``, which only nodes may send; the asker's role was checked by
the node that was asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rgpu.link.control.access import Actor
from rgpu.link.control.verbs import VERBS
from rgpu.link.keys import Endpoint
from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.errors import Fenced, PoolUnavailable, UnknownOutcome

ASK_SECONDS = 660.0  #: that a leader may take
LONGEST = {"session.checkpoint": 2 * CHECKPOINT_SECONDS + 60}  #: one may wait for another
LEADER_LOOK = 0.5  #: seconds between two looks whether the asked leader still leads
LEADER_AGAIN = 0.2  #: seconds until who leads is read again
FIND_SECONDS = 10.0  #: until it is said that nobody leads
ELECTION_SECONDS = 10.0  #: that an election may take once the record of the leader before has gone with its lease

Progress = Callable[[dict[str, Any]], None]
#: What a leader does: (args, who asks, how to report progress) → result
LeaderVerb = Callable[[dict[str, Any], Actor, Progress], Awaitable[dict[str, Any]]]


class LeaderLink:
    """``verbs``: what the leader does, for when this node leads. ``lease``: of the leader's record, s. ``me``: this
    node, as it asks for itself."""

    def __init__(self, local: LocalLeader, verbs: Mapping[str, LeaderVerb], records: PoolRecords, peers: Peers,
                 lease: float, me: Actor) -> None:
        self._me = me
        self._local, self._verbs, self._records, self._peers = local, verbs, records, peers
        self._lease = lease

    async def ask(self, verb: str, args: dict[str, Any], actor: Actor | None = None,
                  on_progress: Progress = lambda values: None) -> dict[str, Any]:
        """Have the leader do it for ``actor`` (None: this node), here or on the node that leads. Raises what it raises.

        A leader that stepped down is named by its record until the lease of that ends: it is asked again, or its
        successor, for that long. Raises :class:`PoolUnavailable` after it.
        """
        patience = self._lease + ELECTION_SECONDS
        until = time.monotonic() + patience
        while True:
            leader = await self._find()
            if leader is None:
                return await self._verbs[verb](args, actor or self._me, on_progress)
            try:
                message = {"verb": verb, "args": args, "public": actor.public if actor else ""}
                call = asyncio.ensure_future(self._peers.at(leader[0]).call(
                    "node.command", message, timeout=LONGEST.get(verb, ASK_SECONDS), on_progress=on_progress))
                return dict(await self._while_it_leads(call, leader[1], verb) or {})
            except (Fenced, PoolUnavailable) as error:
                if error.detail.get("reason") != "not leading":
                    raise
                if time.monotonic() > until:
                    raise PoolUnavailable(f"no coordinator took {verb} for {patience:.0f} s: try again, or look with "
                                          f"`rgpu nodes` ({error.message})") from error
                await asyncio.sleep(LEADER_AGAIN)

    async def _find(self) -> tuple[Endpoint, int] | None:
        """Where the leader answers, and its revision; None when this node leads.

        Raises :class:`PoolUnavailable` while nobody does.
        """
        deadline = time.monotonic() + FIND_SECONDS
        while self._local.coordinator is None:
            found = await self._records.leader()
            if found is not None and found[0] != self._local.host:
                node = (await self._records.nodes()).get(found[0])
                if node is not None:
                    return Endpoint(node.control, node.public_key, node.host), found[1]
            if time.monotonic() > deadline:
                raise PoolUnavailable("the pool has no coordinator at the moment: try again")
            await asyncio.sleep(0.05)
        return None

    async def _while_it_leads(self, call: asyncio.Future[Any], revision: int, verb: str) -> Any:
        """The leader's answer; if it leads no more before it answered, nobody knows what it had done.

        Raises :class:`PoolUnavailable` with the reason "not leading" for a verb that may be repeated: the next
        leader is asked then, because nobody else will (the end of a program is told once).
        """
        while not (await asyncio.wait([call], timeout=LEADER_LOOK))[0]:
            if await self._records.leader_revision() != revision:
                await asyncio.wait([call], timeout=LEADER_LOOK)  # its answer may be on the way
                if not call.done():
                    call.cancel()
                    if verb not in VERBS or VERBS[verb].idempotent:
                        raise PoolUnavailable(f"the coordinator changed while it worked on {verb}",
                                              reason="not leading")
                    raise UnknownOutcome(f"the coordinator changed while it worked on {verb}; the next one finishes or "
                                         "undoes it: look with `rgpu ps`", verb=verb)
        return call.result()
