"""The check of an agent that attaches to a session held here: it must be the one on record, with an admitted key.

=====================  ========================  ==========================================================
the ticket was made    the record says           then
=====================  ========================  ==========================================================
by the record's agent  anything                  accepted, while that key is admitted
by another agent       anything                  refused
by a node (v 1)        the agent proves its key  refused: any holder of the pool's secret could have made it
by a node (v 1)        it does not               accepted, while that key is admitted: the agent is of the
                                                 previous version
either                 an earlier epoch, or not  refused for the moment: the record is read, agents try again
                       known
=====================  ========================  ==========================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rgpu.link.data.tickets import Ticket
from rgpu.link.keys import AuthorizedKeys
from rgpu.migrate.records.schema import SessionRecord
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable, RgpuError


def judge(ticket: Ticket, epoch: int, record: SessionRecord | None, let_in: bool) -> RgpuError | None:
    """Return why the ticket's holder is refused, None where it attaches; pure. ``epoch``: the one that is held here.

    ``record``: as last read; ``let_in``: whether the ticket's key is admitted.
    """
    name = ticket.session
    if record is None or record.epoch < epoch:
        return PoolUnavailable(f"the record of {name} at epoch {epoch} is being read: try again", session=name,
                               reason="record")
    if ticket.agent != record.agent:
        return AuthenticationFailed(f"{name} belongs to another agent than the ticket's", session=name, reason="agent")
    if record.proves_key and not ticket.proven:
        return AuthenticationFailed(f"the agent of {name} proves its own key: tickets of the pool's secret do not open "
                                    "it", session=name, reason="not proven")
    if not let_in:
        return AuthenticationFailed(f"the key of {name}'s agent is let in no more", session=name, reason="key")
    return None


class SessionAgents:
    """``recall``: a session's record as last read; ``read``: reads it now. ``spawn``: starts a task in ``loop``."""

    def __init__(self, recall: Callable[[str], SessionRecord | None], read: Callable[[str], Awaitable[object]],
                 authorized: AuthorizedKeys, loop: asyncio.AbstractEventLoop, spawn: Callable[[Any], object]) -> None:
        self._recall, self._read, self._authorized, self._loop, self._spawn = recall, read, authorized, loop, spawn
        self._reading: set[str] = set()

    def check(self, ticket: Ticket, epoch: int) -> None:
        """Check a ticket; for any thread.

        Raises :class:`AuthenticationFailed`, and :class:`PoolUnavailable` until the record was read.
        """
        session = ticket.session
        refusal = judge(ticket, epoch, self._recall(session), self._authorized.find(ticket.agent) is not None)
        if isinstance(refusal, PoolUnavailable):
            self._loop.call_soon_threadsafe(self._begin, session)
        if refusal is not None:
            raise refusal

    def _begin(self, session: str) -> None:
        if session not in self._reading:
            self._reading.add(session)
            self._spawn(self._look(session))

    async def _look(self, session: str) -> None:
        try:
            await self._read(session)
        except RgpuError:  # the agent tries again, and the record is read again
            pass
        finally:
            self._reading.discard(session)
