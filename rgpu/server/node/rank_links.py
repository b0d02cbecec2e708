"""Rank links of this node's workers: where the other session is served, and whether this one may connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Any

import structlog

from rgpu.link.data import tickets
from rgpu.link.data.frames import connect
from rgpu.link.data.lanes import MOST as MOST_LANES
from rgpu.link.secrets import PoolSecrets
from rgpu.migrate.records.schema import SessionRecord
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.session.errors import LinkError, RgpuError

log = structlog.get_logger(__name__)

TICKET_SECONDS = 60.0
OVER = frozenset({"ended", "failed"})


class RankLinks:
    """Connects a worker of this node to another session's worker. ``user_of``: the user of a session."""

    def __init__(self, held: HeldSessions, records: PoolRecords, secrets: PoolSecrets,
                 user_of: Callable[[SessionRecord], str]) -> None:
        self._held, self._records, self._secrets, self._user_of = held, records, secrets, user_of
        self._dialing: set[tuple[int, str]] = set()

    async def dial(self, session: str, values: dict[str, Any]) -> None:
        """Connect a worker that asks for a rank link; does nothing where it is linked to the peer's owner already.

        ``values``: {pid: of the worker, peer: the session, linked: epoch of the worker that it is linked to, or 0,
        borrows: whether it maps memory that others lend}. After a failure the worker asks again.
        """
        pid, peer = int(values["pid"]), str(values["peer"])
        handle, epoch = self._asker(session, pid)
        if handle is None or (pid, peer) in self._dialing:
            return
        self._dialing.add((pid, peer))
        try:
            await self._link(handle, epoch, session, peer, int(values.get("linked") or 0), bool(values.get("borrows")))
        except RgpuError as error:
            log.info("no rank link yet", session=session, peer=peer, reason=error.message)
        finally:
            self._dialing.discard((pid, peer))

    async def widen(self, session: str, values: dict[str, Any]) -> None:
        """Make further connections to the worker that a rank link of a worker leads to; none where any fails.

        ``values``: {pid: of the worker, peer: the session, linked: epoch of the worker that it is linked to, count}.
        """
        pid, peer, count = int(values["pid"]), str(values["peer"]), min(int(values["count"]), MOST_LANES)
        handle, epoch = self._asker(session, pid)
        other = await self._records.find(peer)
        if handle is None or other is None or other.record.epoch != int(values["linked"]):
            return
        try:
            with contextlib.ExitStack() as opened:
                sockets, grants = [], []
                for _ in range(count):
                    sock, granted = await self._connect(other.record, f"{session}@{epoch}")
                    sockets.append(opened.enter_context(sock))
                    grants.append([granted.ticket, granted.secret])
                await handle.request("ranks_widen", fds=tuple(sock.fileno() for sock in sockets), peer=peer,
                                     grants=grants)
        except RgpuError as error:
            log.info("no lanes beside a rank link", session=session, peer=peer, reason=error.message)

    async def _connect(self, other: SessionRecord, asker: str) -> tuple[socket.socket, tickets.Granted]:
        """Connect to the data port of a session's owner, with a ticket for the asker. Raises :class:`LinkError`."""
        node = (await self._records.nodes()).get(other.owner or "")
        if node is None or not node.data:
            raise LinkError(f"no node serves session {other.name}")
        host, _, port = node.data.rpartition(":")
        granted = tickets.issue(self._secrets.issuing(), other.name, asker, "ranks", lifetime=TICKET_SECONDS)
        return await asyncio.to_thread(connect, (host, int(port))), granted

    def _asker(self, session: str, pid: int) -> tuple[WorkerHandle | None, str]:
        """The worker, and its epoch for the ticket, with a plus behind it for a worker that a move makes: such a worker
        may receive past results, and does not represent the session."""
        handle, incoming = self._held.running.get(session), self._held.incoming.get(session)
        if handle is not None and handle.pid == pid:
            return handle, f"{self._held.epochs.get(session, 0)}"
        if incoming is not None and incoming.handle.pid == pid:
            return incoming.handle, f"{incoming.epoch}+"
        return None, ""

    async def _link(self, handle: WorkerHandle, epoch: str, session: str, peer: str, linked: int,
                    borrows: bool) -> None:
        mine, other = await self._records.find(session), await self._records.find(peer)
        if mine is None:
            return
        why = self._refusal(mine.record, other.record if other else None, peer)
        if why:
            await handle.request("ranks_gone", peer=peer, reason=why)
            return
        assert other is not None
        if linked and other.record.epoch <= linked:
            return
        sock, granted = await self._connect(other.record, f"{session}@{epoch}")
        lent, memory = await self._lend(other.record) if borrows else (b"", None)
        with sock, memory or contextlib.nullcontext():
            fds = (sock.fileno(),) if memory is None else (sock.fileno(), memory.fileno())
            values: dict[str, Any] = {"lent": lent} if lent else {}  # older workers do not accept the key
            await handle.request("ranks_link", fds=fds, peer=peer, epoch=other.record.epoch, ticket=granted.ticket,
                                 secret=granted.secret, **values)

    async def _lend(self, other: SessionRecord) -> tuple[bytes, socket.socket | None]:
        """Have a worker of this node lend memory: the number and the other end of its socket; (b"", None) elsewhere."""
        lender = self._held.running.get(other.name)
        if lender is None or other.owner != self._held.host or self._held.epochs.get(other.name) != other.epoch:
            return b"", None
        number = secrets.token_bytes(16)
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one:
            try:
                await lender.request("ranks_lend", fds=(one.fileno(),), number=number)
            except RgpuError as error:  # it is of an older version, or ends: data is sent then
                log.info("a worker lends no memory", session=other.name, reason=error.message)
                two.close()
                return b"", None
        return number, two

    def _refusal(self, mine: SessionRecord, other: SessionRecord | None, peer: str) -> str:
        """Return why this session will never reach ``peer``; empty: it may now, or later."""
        if other is None:
            return f"there is no session {peer}"
        if self._user_of(mine) != self._user_of(other):
            return f"session {peer} is another user's"
        if other.state in OVER:
            return f"it has {other.state}" if not other.reason else f"it has {other.state}: {other.reason}"
        return ""
