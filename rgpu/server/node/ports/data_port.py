"""The node's one data port: authenticate a peer, then hand its socket to a worker.

The daemon handles only the preamble (tickets, salts, keys); the sealed frames
are handled by the worker. So a node needs two ports for any number of
sessions, and a worker never sees the pool secret. An unauthenticated peer
holds a descriptor and a few hundred bytes, for as long as the budget allows.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

import structlog

from rgpu.link.accepting import Warned
from rgpu.link.data import proofs, tickets
from rgpu.link.data.frames import Handover, tune
from rgpu.link.data.opening import Opening
from rgpu.link.data.tickets import Ticket
from rgpu.link.gate.budget import Budget, Stage
from rgpu.link.gate.gate import Gate, Visitor
from rgpu.link.keys import KeyPair
from rgpu.link.secrets import PoolSecrets
from rgpu.server.node.sessions.agents import SessionAgents
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.session.errors import LinkError, Refused, RgpuError

log = structlog.get_logger(__name__)

MOVE_TICKET_SECONDS = 600
#: Connections of one session that are handed to its worker at once: links of its agent and of other ranks, with lanes.
HANDED_AT_ONCE = 128


class DataPort:
    """Listens at ``bound``; others reach it at ``address``. Peers of sessions that are not in ``held`` are refused."""

    def __init__(self, listen: tuple[str, int], secrets: PoolSecrets, held: HeldSessions, deadline: Deadline,
                 budget: Budget, keys: KeyPair, agents: SessionAgents,
                 advertised: tuple[str, int] | None = None) -> None:
        """Bind. For use in a running event loop. ``keys``: this node's. ``advertised``: address for others, if not
        ``listen``.

        Raises :class:`LinkError` where that address is not free.
        """
        self._secrets = secrets
        self._held, self._deadline, self._keys, self._agents = held, deadline, keys, agents
        self._loop = asyncio.get_running_loop()
        self.gate = Gate("data port", listen, budget, lambda gate, sock, peer: _Peer(gate, sock, peer, self))
        self.bound = self.gate.bound
        self.address = advertised or self.bound
        self._handed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._warned = Warned()
        self._own: deque[str] = deque(maxlen=8)

    def own(self, name: str) -> None:
        """Do not log the refusal of peer ``name``: it is this node's own check of the port."""
        self._own.append(name)

    def admit(self, session: str, move: str) -> dict[str, Any]:
        """Grant {address, ticket, secret} for a move's source to connect to the worker that receives the session."""
        granted = tickets.issue(proofs.own_secret(self._keys), session, move, "pages", lifetime=MOVE_TICKET_SECONDS)
        return {"address": list(self.address), "ticket": granted.ticket, "secret": granted.secret}

    def start(self) -> None:
        """Begin to accept."""
        self.gate.start()

    def close(self) -> None:
        """Close the port and its gate."""
        self.gate.close()

    # -- in the gate's thread ----------------------------------------------------------
    def opening(self) -> tuple[Opening, list[WorkerHandle]]:
        """Make the state of one preamble, and a list that will contain its worker."""
        found: list[WorkerHandle] = []

        def lookup(ticket: Ticket) -> int:
            self._deadline.check("an attachment")
            handle, epoch = self._held.find(ticket)
            if ticket.purpose == "calls":
                self._agents.check(ticket, epoch)
            if self._handed[ticket.session] >= HANDED_AT_ONCE:
                raise Refused(f"{HANDED_AT_ONCE} connections of {ticket.session} are on their way to its worker "
                              "already: try again when they are there", session=ticket.session)
            found.append(handle)
            return epoch

        return Opening(self._secrets.accepted(), lookup, self._keys), found

    def refused(self, peer: str, error: RgpuError) -> None:
        """Log that a peer was refused; frequent refusals are logged at a limited rate."""
        if peer not in self._own and self._warned.due():
            log.info("data link refused", peer=peer, error=error.code, reason=error.message)

    def hand_over(self, handle: WorkerHandle, handover: Handover, sock: socket.socket, peer: str) -> None:
        """Give an authenticated connection to the worker; returns at once. The socket is closed after the handover."""
        with self._lock:
            self._handed[handover.session] += 1

        def done(future: Future[None]) -> None:
            sock.close()  # the worker has its own descriptor by now
            with self._lock:
                self._handed[handover.session] -= 1
                self._handed += Counter()  # drops entries at 0
            error = None if future.cancelled() else future.exception()
            if isinstance(error, RgpuError):
                log.info("data link refused", peer=peer, error=error.code, reason=error.message)
            elif error is not None:
                log.error("data link failed", peer=peer, error=repr(error))

        work = self._give(handle, handover, sock.fileno())
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(done)
        except RuntimeError:  # the loop has ended: so does the daemon
            work.close()
            sock.close()

    @staticmethod
    async def _give(handle: WorkerHandle, handover: Handover, fd: int) -> None:
        do = {"calls": "attach", "lane": "lane", "ranks": "ranks_serve"}.get(handover.purpose, "receive")
        await handle.request(do, fds=(fd,), handover=handover.pack(), timeout=20.0)


class _Peer(Visitor):
    """A connection in the middle of its preamble."""

    def __init__(self, gate: Gate, sock: socket.socket, peer: tuple[str, int], port: DataPort) -> None:
        super().__init__(gate, sock, peer)
        tune(sock)
        self._port = port
        self._opening, self._found = port.opening()
        self._came = bytearray()

    def ready(self, sock: socket.socket, events: int) -> bool:
        opening = self._opening
        while opening.needed:
            data = sock.recv(opening.needed - len(self._came))
            if not data:
                raise LinkError("the peer closed the connection while it was opened", reason="end of file")
            self.stage = Stage.SPEAKS
            self._came += data
            if len(self._came) == opening.needed:
                whole, self._came = bytes(self._came), bytearray()
                opening.take(whole)
        if sock.send(opening.answer) != len(opening.answer):
            raise LinkError("the peer takes no answer")
        if opening.error is not None:
            self._port.refused(self.peer, opening.error)
            return False
        assert opening.handover is not None
        self.gate.release(self)
        sock.setblocking(True)
        self._port.hand_over(self._found[0], opening.handover, sock, self.peer)
        return True
