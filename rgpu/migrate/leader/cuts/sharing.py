"""Finding the sessions that share communicators, which are checkpointed together."""

from __future__ import annotations

import structlog

from rgpu.migrate.leader.nodes import ASK_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.schema import SessionRecord

log = structlog.get_logger(__name__)

OVER = frozenset({"ended", "failed"})


class Sharing:
    """Query of the workers for shared communicators: the call that makes one names the sessions of its ranks."""

    def __init__(self, records: PoolRecords, commands: FencedCommands) -> None:
        self.records, self.commands = records, commands

    async def members(self, name: str) -> tuple[dict[str, SessionRecord], bool]:
        """Return, by name, a session and all that share communicators with it, transitively; and whether that is known.

        Sessions that are over do not count. The result is the session alone, and False, where a worker of the previous
        version, which does not report this, is among them. Raises :class:`NotFound`, and what a node raises.
        """
        first = (await self.records.held(name)).record
        found, todo = {name: first}, [first]
        while todo:
            one = todo.pop()
            if one.state != "running":
                continue  # it has no worker to query; its state decides whether a checkpoint may be taken without it
            peers = await self._peers(one)
            if peers is None:
                if one is not first:
                    log.warning("a checkpoint is taken of one session alone: the worker of another is of an earlier "
                                "version", session=name, peer=one.name)
                return {name: first}, False
            for peer in peers:
                held = None if peer in found else await self.records.find(peer)
                if held is not None and held.record.state not in OVER:
                    found[peer] = held.record
                    todo.append(held.record)
        return found, True
        return found

    async def live(self, names: list[str]) -> list[str]:
        """Return the names of the sessions that are not over."""
        held = [await self.records.find(name) for name in names]
        return [one.record.name for one in held if one is not None and one.record.state not in OVER]

    async def _peers(self, record: SessionRecord) -> list[str] | None:
        """Return the other sessions of its communicators; None: its worker does not report them."""
        seen = await self.commands.tell(str(record.owner), "worker.describe", {"session": record.name},
                                        epoch=record.epoch, timeout=ASK_SECONDS)
        return [str(peer) for peer in seen["peers"]] if "peers" in seen else None
