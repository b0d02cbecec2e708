"""Commands to nodes, fenced by the leader's term (OWNERSHIP 6)."""

from __future__ import annotations

from typing import Any

import structlog

from rgpu.migrate.leader.nodes import NodeCommands, Progress
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.session.errors import Fenced, LinkError, RgpuError, TimedOut

log = structlog.get_logger(__name__)


class FencedCommands:
    """Sender of commands with the term's revision, the session's epoch and an id. ``link``: connection to nodes."""

    def __init__(self, link: NodeCommands, term: Term, records: PoolRecords) -> None:
        self._link, self._term, self._records = link, term, records

    async def tell(self, host: str, verb: str, args: dict[str, Any], *, epoch: int, timeout: float, tries: int = 1,
                   on_progress: Progress | None = None) -> dict[str, Any]:
        """Have ``host`` carry out a command; where the outcome is unknown it is repeated under the same id.

        ``timeout``: of each try, s. ``tries``: number in all. Raises as :meth:`NodeCommands.command`.
        """
        command_id = self._term.new_id()
        while True:
            tries -= 1
            try:
                return await self._link.command(host, verb, args, leader=self._term.leader.revision, epoch=epoch,
                                                command_id=command_id, timeout=timeout, on_progress=on_progress)
            except (LinkError, TimedOut) as error:
                if tries <= 0:
                    raise
                log.info("asked again", host=host, verb=verb, reason=error.message)

    async def suggest(self, host: str | None, verb: str, args: dict[str, Any], *, epoch: int,
                      timeout: float = 5.0) -> bool:
        """Send a command on which nothing depends; return whether it was carried out. Raises :class:`Fenced`."""
        if not host or await self._records.node(host) is None:
            return False
        try:
            await self.tell(host, verb, args, epoch=epoch, timeout=timeout)
            return True
        except Fenced:
            raise
        except RgpuError as error:
            log.info("not done", host=host, verb=verb, session=args.get("session"), reason=error.message)
            return False
