"""Sharing of memory between workers of this node: which session a token names, and which session may open it.

A token is a claim. Whether a session may open it is decided here, by the records (the same user, the same device of
this node); the exporting worker checks that it issued the token (:mod:`rgpu.server.worker.sharing`). Before memory is
handed over both sessions' records state that they share: from then on neither can be recovered alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import structlog

from rgpu.migrate.records.schema import SessionRecord
from rgpu.server.node.pool.leader_reports import Ask
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.session.devices import parts
from rgpu.session.errors import Refused, RgpuError
from rgpu.session.objects import handle_tokens

log = structlog.get_logger(__name__)


class SharedMemory:
    """``ask``: requests to the leader. ``user_of``: the user of a session."""

    def __init__(self, held: HeldSessions, records: PoolRecords, ask: Ask,
                 user_of: Callable[[SessionRecord], str]) -> None:
        self._held, self._records, self._ask, self._user_of = held, records, ask, user_of
        self._on_record: set[frozenset[tuple[str, int]]] = set()  #: pairs of (session, epoch) that are on record

    async def open(self, session: str, values: dict[str, Any]) -> None:
        """Open a handle for a worker. ``values``: {pid: of the worker, number: of its request, token}."""
        number, importer = int(values["number"]), self._held.running.get(session)
        if importer is None or importer.pid != int(values["pid"]):
            return  # it owns nothing: it ends, or a move makes it
        try:
            exporter = self._exporter(session, values["token"])
            await self._allow(session, exporter.session)
        except Refused as error:
            log.info("a handle is not opened", session=session, reason=error.message)
            await importer.request("share_denied", number=number, reason=error.message)
            return
        try:
            await self._note(session, exporter.session)
            await self._tie(importer, exporter, number)
        except RgpuError as error:  # a session is about to move, or no leader: the worker asks again
            log.info("a handle is not opened yet", session=session, reason=error.message)

    def _exporter(self, session: str, token: Any) -> WorkerHandle:
        """The worker of the session that a token names. Raises :class:`Refused`."""
        if not isinstance(token, bytes) or len(token) != handle_tokens.SIZE:
            raise Refused("a handle has 64 bytes")
        digest = handle_tokens.session_of(token)
        for name, handle in self._held.running.items():
            if handle_tokens.session_digest(name) == digest and not handle.closed.is_set():
                if name == session:
                    raise Refused("the handle is the session's own")
                return handle
        raise Refused("no session on this node made the handle")

    async def _allow(self, session: str, peer: str) -> None:
        """Check that both sessions are of one user and have a device in common. Raises :class:`Refused`."""
        mine, other = await self._records.record(session), await self._records.record(peer)
        if not self._user_of(mine) or self._user_of(mine) != self._user_of(other):
            raise Refused("the handle is of another user's session")
        if set(parts(mine.device)).isdisjoint(parts(other.device)):
            raise Refused(f"the handle is of memory on {other.device}, and this session has {mine.device}")

    async def _note(self, session: str, peer: str) -> None:
        """Have the leader write into both records that the sessions share. Raises what the leader raises."""
        epochs = self._held.epochs
        pair = frozenset({(session, epochs.get(session, 0)), (peer, epochs.get(peer, 0))})
        if pair in self._on_record:
            return
        for name, other in ((peer, session), (session, peer)):
            await self._ask("session.shares", {"session": name, "host": self._held.host,
                                               "epoch": epochs.get(name, 0), "peer": other})
        self._on_record.add(pair)

    async def _tie(self, importer: WorkerHandle, exporter: WorkerHandle, number: int) -> None:
        """Give each worker one end of a socket pair. Raises what they raise."""
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, two:
            await importer.request("share_link", fds=(two.fileno(),), number=number, peer=exporter.session)
            try:
                await exporter.request("share_serve", fds=(one.fileno(),), peer=importer.session)
            except RgpuError as error:  # its end is closed: the importer notices
                log.info("a worker did not give what it shares", session=exporter.session, reason=error.message)
