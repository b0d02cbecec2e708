"""The link from this node to the leader: local when this node leads, over control otherwise.

Verbs of the leader are passed on as ``node.command``, which only nodes may send; the node that was asked has checked
the caller's role.
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

ASK_SECONDS = 660.0  #: longest time of a verb at the leader
LONGEST = {"session.checkpoint": 2 * CHECKPOINT_SECONDS + 60}  #: a checkpoint may wait for another one
LEADER_LOOK = 0.5  #: seconds between two checks that the asked leader still leads
LEADER_AGAIN = 0.2  #: seconds until the leader's record is read again
FIND_SECONDS = 10.0  #: without a leader's record until the request fails
#: Verbs that are asked of the next leader when the one that worked on them lost its place, beside the idempotent ones:
#: a checkpoint that may have been taken already is taken again, which costs an image and harms nothing.
AGAIN = frozenset({"session.checkpoint"})
ELECTION_SECONDS = 10.0  #: that an election may take once the lease of the previous leader has ended

Progress = Callable[[dict[str, Any]], None]
#: A verb of the leader: (args, caller, function that reports progress) → result
LeaderVerb = Callable[[dict[str, Any], Actor, Progress], Awaitable[dict[str, Any]]]


class LeaderLink:
    """Passes verbs to the leader. ``verbs``: the leader's, for when this node leads. ``lease``: of the leader's record,
    s. ``me``: this node, as the caller of its own requests."""

    def __init__(self, local: LocalLeader, verbs: Mapping[str, LeaderVerb], records: PoolRecords, peers: Peers,
                 lease: float, me: Actor) -> None:
        self._me = me
        self._local, self._verbs, self._records, self._peers = local, verbs, records, peers
        self._lease = lease

    async def ask(self, verb: str, args: dict[str, Any], actor: Actor | None = None,
                  on_progress: Progress = lambda values: None) -> dict[str, Any]:
        """Have the leader do ``verb`` for ``actor`` (None: this node), on whichever node leads. Raises what it raises.

        The record of a leader that stepped down stays until its lease ends: the request is repeated, to that leader or
        its successor, for that long. Raises :class:`PoolUnavailable` after it.
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
                if error.detail.get("worked"):  # it took as long as it took: an election begins now
                    until = time.monotonic() + patience
                if time.monotonic() > until:
                    raise PoolUnavailable(f"no coordinator took {verb} for {patience:.0f} s: try again, or look with "
                                          f"`rgpu nodes` ({error.message})") from error
                await asyncio.sleep(LEADER_AGAIN)

    async def _find(self) -> tuple[Endpoint, int] | None:
        """The leader's endpoint and revision; None when this node leads.

        Raises :class:`PoolUnavailable` while no node leads.
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
        """Return the leader's answer. If its term ended before it answered, the outcome is unknown.

        Raises :class:`PoolUnavailable` with the reason "not leading" for a verb that may be repeated: the caller then
        asks the next leader (a program's end, for example, is reported once only). Raises :class:`UnknownOutcome`
        for other verbs.
        """
        while not (await asyncio.wait([call], timeout=LEADER_LOOK))[0]:
            if await self._records.leader_revision() != revision:
                await asyncio.wait([call], timeout=LEADER_LOOK)  # its answer may be on the way
                if not call.done():
                    call.cancel()
                    if verb not in VERBS or VERBS[verb].idempotent or verb in AGAIN:
                        raise PoolUnavailable(f"the coordinator changed while it worked on {verb}",
                                              reason="not leading", worked=True)
                    raise UnknownOutcome(f"the coordinator changed while it worked on {verb}; the next one finishes or "
                                         "undoes it: look with `rgpu ps`", verb=verb)
        return call.result()
