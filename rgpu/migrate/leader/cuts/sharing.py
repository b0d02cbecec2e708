"""Sessions that share communicators, which are checkpointed together."""

from __future__ import annotations

import structlog

from rgpu.migrate.leader.nodes import ASK_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.schema import SessionRecord

log = structlog.get_logger(__name__)

OVER = frozenset({"ended", "failed"})


class Sharing:
    """See the module docstring. Workers know it: who has ranks of a communicator stands in the call that makes it."""

    def __init__(self, records: PoolRecords, commands: FencedCommands) -> None:
        self.records, self.commands = records, commands

    async def members(self, name: str) -> tuple[dict[str, SessionRecord], bool]:
        """Return a session and all that share communicators with it, or with one that does, by name; whether it is so.

        Sessions that are over count no more. Only itself, and False, where a worker of the version before, which tells
        nothing, is among them. Raises :class:`NotFound`, and what a node raises.
        """
        first = (await self.records.held(name)).record
        found, todo = {name: first}, [first]
        while todo:
            one = todo.pop()
            if one.state != "running":
                continue  # nobody can be asked; whether a checkpoint may be taken without it is decided by its state
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
        """Return those of these sessions that are not over."""
        held = [await self.records.find(name) for name in names]
        return [one.record.name for one in held if one is not None and one.record.state not in OVER]

    async def _peers(self, record: SessionRecord) -> list[str] | None:
        """Return the other sessions of its communicators; None: its worker does not tell."""
        seen = await self.commands.tell(str(record.owner), "worker.describe", {"session": record.name},
                                        epoch=record.epoch, timeout=ASK_SECONDS)
        return [str(peer) for peer in seen["peers"]] if "peers" in seen else None
