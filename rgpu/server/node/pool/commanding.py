"""Commands from this node's coordinator to nodes, waited for only while the commanded node lives.

A connection does not show that its peer has died, and a command to a
node may take half an hour. The registry shows it: a daemon that was started again
has another incarnation and has lost the command, and one whose record
is absent for longer than its lease will not return with the same incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from rgpu.link.keys import Endpoint
from rgpu.migrate.leader.nodes import Progress
from rgpu.migrate.leader.term.decisions import acting
from rgpu.migrate.membership.members import node_name
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.errors import LinkError, RgpuError

LOOK = 1.0  #: seconds between two looks at the node's record

T = TypeVar("T")


async def unless_gone(answer: Awaitable[T], incarnation: Callable[[], Awaitable[int | None]], asked: int,
                      patience: float, what: str) -> T:
    """Await ``answer``; raise :class:`LinkError` once the node that was asked cannot give it any more.

    ``incarnation``: reads the node's incarnation in the registry, None for no record; its errors are ignored.
    ``asked``: the incarnation that was asked. ``patience``: seconds that its record may be absent: a daemon that lost
    its lease briefly works on. ``what``: for the error.
    """
    task = asyncio.ensure_future(answer)
    away = 0.0
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            try:
                now = await incarnation()
            except RgpuError:
                continue
            away = away + LOOK if now is None else 0.0
            if task.done():
                break
            if now not in (None, asked):
                raise LinkError(f"{what}: the node was started again meanwhile and has lost the command")
            if away > patience:
                raise LinkError(f"{what}: the node has gone")
        return task.result()
    finally:
        task.cancel()


class Perform(Protocol):
    """The command entrance of this node."""

    async def __call__(self, verb: str, args: dict[str, Any], *, leader: int, command_id: str, signer: str,
                       on_progress: Progress | None = None) -> dict[str, Any]: ...


class NodeCommander:
    """Commands of a coordinator here (:class:`rgpu.migrate.leader.nodes.NodeCommands`): to this node, and to others.

    ``here``: executes commands to this node. ``lease``: s that another node's record may be absent.
    """

    def __init__(self, host: str, here: Perform, records: PoolRecords, peers: Peers, lease: float) -> None:
        self._host, self._here, self._records, self._peers, self._lease = host, here, records, peers, lease

    async def command(self, host: str, verb: str, args: dict[str, Any], *, leader: int, epoch: int, command_id: str,
                      timeout: float = 30.0, on_progress: Progress | None = None) -> dict[str, Any]:
        """Command this node directly, others over control."""
        if host == self._host:
            return await self._here(verb, args, leader=leader, command_id=command_id, signer=node_name(host),
                                    on_progress=on_progress)
        node = await self._records.living(host)
        client = self._peers.at(Endpoint(node.control, node.public_key, host))
        message = {"verb": verb, "args": args, "actor": acting.get()}
        call = client.call("node.command", message, timeout=timeout, leader=leader,
                           epoch=epoch, command=command_id, on_progress=on_progress)
        result = await unless_gone(call, lambda: self._records.incarnation_of(host), node.incarnation,
                                   self._lease, f"{verb} on {host}")
        return dict(result or {})
