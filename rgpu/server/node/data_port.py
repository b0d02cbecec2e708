"""The node's one data port: authenticate a peer, then hand its socket to a worker.

The daemon only speaks the preamble (tickets, salts, keys); the sealed frames
are the worker's business. So a node needs two ports, however many sessions it
has, and a worker never sees the pool secret.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import structlog

from rgpu.link.data import tickets
from rgpu.link.data.frames import Handover, server_preamble
from rgpu.link.data.tickets import Ticket
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

#: Peers that may be in the middle of a preamble at once; more wait in the backlog.
CONCURRENT_PREAMBLES = 32
MOVE_TICKET_SECONDS = 600


class DataPort:
    """Listens at ``bound``; ``address`` is where others reach it. What ``held`` has nothing of is refused."""

    def __init__(self, listen: tuple[str, int], pool_secret: bytes, held: HeldSessions, deadline: Deadline,
                 advertised: tuple[str, int] | None = None) -> None:
        """Bind. For use in a running event loop. ``advertised``: where others reach it, if not at ``listen``."""
        self._secret = pool_secret
        self._held, self._deadline = held, deadline
        self._loop = asyncio.get_running_loop()
        self._slots = threading.BoundedSemaphore(CONCURRENT_PREAMBLES)
        self._socket = socket.create_server(listen, backlog=128)
        self.bound: tuple[str, int] = self._socket.getsockname()[:2]
        self.address = advertised or self.bound
        self._thread = threading.Thread(target=self._accept, name="data-port", daemon=True)

    def admit(self, session: str, move: str) -> dict[str, Any]:
        """{address, ticket, secret} with which a move's source reaches the worker that receives the session here."""
        granted = tickets.issue(self._secret, session, move, "pages", lifetime=MOVE_TICKET_SECONDS)
        return {"address": list(self.address), "ticket": granted.ticket, "secret": granted.secret}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                return
            self._slots.acquire()
            threading.Thread(target=self._serve, args=(sock, peer), name="preamble", daemon=True).start()

    def _serve(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        try:
            found: list[WorkerHandle] = []

            def lookup(ticket: Ticket) -> int:
                self._deadline.check("an attachment")
                handle, epoch = self._held.find(ticket)
                found.append(handle)
                return epoch

            handover = server_preamble(sock, self._secret, lookup)
            asyncio.run_coroutine_threadsafe(self._hand_over(found[0], handover, sock.fileno()), self._loop).result(30)
        except RgpuError as error:
            log.info("data link refused", peer=f"{peer[0]}:{peer[1]}", error=error.code, reason=error.message)
        except Exception:  # noqa: BLE001 - a peer must not end the port
            log.exception("data link failed", peer=f"{peer[0]}:{peer[1]}")
        finally:
            sock.close()  # the worker has its own descriptor by now
            self._slots.release()

    @staticmethod
    async def _hand_over(handle: WorkerHandle, handover: Handover, fd: int) -> None:
        do = {"calls": "attach", "lane": "lane"}.get(handover.purpose, "receive")
        await handle.request(do, fds=(fd,), handover=handover.pack(), timeout=20.0)
