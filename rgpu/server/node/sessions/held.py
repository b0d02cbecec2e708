"""The sessions that a node holds: their workers, at which epoch, and for which move.

The node owns worker processes; the registry decides which node owns a session, nothing here does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rgpu.link.data.tickets import Ticket
from rgpu.server.node.sessions.worker_exits import LeavingWorkers, end_worker
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.session.errors import Fenced, NotFound

REMEMBERED = 256  #: ended sessions whose last figures a node keeps


@dataclass
class Incoming:
    """A session that this node receives in a move."""

    move: str
    handle: WorkerHandle
    epoch: int


@dataclass(eq=False)
class Claim:
    """One worker that is being made for a session. Two leaders may command it at once: one has just been replaced."""

    epoch: int


@dataclass
class HeldSessions:
    """The sessions of one host, by name."""

    host: str
    running: dict[str, WorkerHandle] = field(default_factory=dict)
    incoming: dict[str, Incoming] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    #: the newest start of a session here: an earlier start still under way detects by it that it was superseded
    claims: dict[str, Claim] = field(default_factory=dict)
    receiving: dict[str, str] = field(default_factory=dict)  #: the newest move of a session to this node, likewise
    bases: dict[str, str] = field(default_factory=dict)  #: the checkpoint that a worker here wrote or was made from
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)  #: last views of sessions that ended here
    #: sessions sent by a move whose outcome is not known yet: the move, empty if only an earlier daemon knew it
    paused: dict[str, str] = field(default_factory=dict)
    leaving: LeavingWorkers = field(default_factory=LeavingWorkers)

    # -- asking -----------------------------------------------------------------
    def handles(self) -> list[WorkerHandle]:
        """Handles of workers that take a part of a device, as long as their processes live."""
        return list(self.running.values()) + [i.handle for i in self.incoming.values()] + list(self.leaving.handles)

    def here(self, session: str) -> bool:
        """Whether a worker of the session is here, also one that a move makes."""
        return session in self.running or session in self.incoming

    def handle(self, session: str) -> WorkerHandle | None:
        """The session's worker here, also one that a move makes."""
        incoming = self.incoming.get(session)
        return self.running.get(session) or (incoming.handle if incoming else None)

    def owned(self, session: str) -> WorkerHandle:
        """The session's living worker. Raises :class:`NotFound`."""
        handle = self.running.get(session)
        if handle is None or handle.closed.is_set():
            raise NotFound(f"session {session} is not on {self.host}", session=session)
        return handle

    def find(self, ticket: Ticket) -> tuple[WorkerHandle, int]:
        """The worker that a ticket gives access to, and its epoch. Raises :class:`NotFound`."""
        if ticket.purpose == "pages":
            incoming = self.incoming.get(ticket.session)
            if incoming is None or ticket.agent != incoming.move:
                raise NotFound(f"{self.host} does not receive {ticket.session} in that move")
            return incoming.handle, incoming.epoch
        return self.owned(ticket.session), self.epochs[ticket.session]

    def holds(self, session: str, move: str) -> tuple[str, int, str] | None:
        """State of the session here: ("incoming" | "paused" | "running", epoch, move); None: it is not here.

        ``move``: the requested one, empty for any; the result names the one that it is held for, which may differ.
        """
        incoming = self.incoming.get(session)
        if incoming is not None and (not move or incoming.move == move):
            return "incoming", incoming.epoch, incoming.move
        handle = self.running.get(session)
        if handle is None or handle.closed.is_set():
            return None
        if session in self.paused:
            return "paused", self.epochs[session], self.paused[session]
        return "running", self.epochs[session], ""

    def newest_epoch(self, session: str) -> int:
        """The newest epoch at which the session was commanded here; 0 for none."""
        claim = self.claims.get(session)
        return max(self.epochs.get(session, 0), claim.epoch if claim else 0)

    def check_claim(self, session: str, claim: Claim) -> None:
        """Check that ``claim`` is the newest start of the session. Raises :class:`Fenced`."""
        if self.claims.get(session) is not claim:
            raise Fenced(f"{self.host} was told something newer of {session} while its worker started at epoch "
                         f"{claim.epoch}")

    # -- ending -------------------------------------------------------------------
    async def replace(self, session: str) -> None:
        """End the worker that runs the session: another one is to be made."""
        handle = self.running.pop(session, None)
        if handle is not None:
            await end_worker(handle, "replaced")

    async def discard(self, session: str, move: str | None = None) -> None:
        """End the worker that receives the session; with ``move`` only if it receives it for that one."""
        incoming = self.incoming.get(session)
        if incoming is not None and (move is None or incoming.move == move):
            del self.incoming[session]
            await end_worker(incoming.handle, "discarded")

    async def forget(self, session: str) -> bool:
        """End the workers of the session; return whether one ran.

        The session lives on elsewhere: its agent is told to look for it, not that it ended.
        """
        self.claims.pop(session, None)
        self.receiving.pop(session, None)
        self.paused.pop(session, None)
        await self.discard(session)
        handle = self.running.pop(session, None)
        if handle is not None:
            await end_worker(handle, "moved")
        return handle is not None

    async def end(self, session: str, reason: str) -> bool:
        """End the session's worker; return whether one ran. An unknown session is no error (it ended before).

        The end of its process is awaited, so that the next program, on a whole GPU, finds the memory free.
        """
        self.claims.pop(session, None)
        self.receiving.pop(session, None)
        await self.discard(session)
        handle = self.running.get(session)
        if handle is not None:
            self._remember(session, await handle.refresh())
            self.running.pop(session, None)
            await end_worker(handle, reason)
        return handle is not None

    def _remember(self, session: str, view: dict[str, Any]) -> None:
        """Keep the last view of an ended session's worker, for `rgpu ps --all`."""
        self.ended.pop(session, None)
        self.ended[session] = {**view, "worker_pid": None, "memory_bytes": 0}
        while len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]

    def died(self, session: str, pid: int) -> str | None:
        """Drop a worker process that has ended; return "running" or "incoming", None if it held no session."""
        handle = self.running.get(session)
        if handle is not None and handle.pid == pid:
            self.paused.pop(session, None)
            del self.running[session]
            return "running"
        incoming = self.incoming.get(session)
        if incoming is not None and incoming.handle.pid == pid:
            del self.incoming[session]
            return "incoming"
        return None
