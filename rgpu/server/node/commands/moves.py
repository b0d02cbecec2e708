"""``move.receive`` and ``move.send``: this node as the destination of a move, and as its source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.phases import Phases
from rgpu.link.data.frames import connect
from rgpu.link.faults import fault
from rgpu.link.local.dialing import Dialer
from rgpu.migrate.leader.nodes import MOVE_SECONDS
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.device_room import DeviceRoom
from rgpu.server.node.sessions.held import HeldSessions, Incoming
from rgpu.server.node.sessions.worker_exits import end_worker
from rgpu.server.node.workers.starter import WorkerStarter
from rgpu.session.errors import Fenced, Refused


class MoveCommands:
    """``watch``: has a session's record read until it decides.

    ``admit``: (session, move) → {address, ticket, secret} for the source's worker to reach the one here.
    """

    def __init__(self, held: HeldSessions, room: DeviceRoom, starter: WorkerStarter, deadline: Deadline,
                 watch: Callable[[str, str], object], admit: Callable[[str, str], dict[str, Any]]) -> None:
        self._held, self._room, self._starter, self._deadline = held, room, starter, deadline
        self._watch, self._admit = watch, admit

    async def receive(self, *, session: str, move: str, epoch: int, quota: int, device: str | None = None,
                      **_: Any) -> dict[str, Any]:
        """Be the destination: start a worker that waits for pages; return the ticket for it.

        Raises :class:`Refused`, :class:`Fenced` when a newer command arrived meanwhile.
        """
        held = self._held
        if epoch <= held.newest_epoch(session) and (session in held.running or session in held.claims):
            raise Refused(f"{session} runs on {held.host} already")
        fault("daemon.receive")
        held.receiving[session] = move
        phases = Phases()
        with phases.phase("room"):
            await held.discard(session)
            spec = await self._room.find(device, quota, session)
        with phases.phase("worker"):
            handle = await self._starter.start(session, epoch=epoch, device=spec, quota=quota, state="incoming")
        if held.receiving.get(session) != move:  # another move has begun, or the session ended
            await end_worker(handle, "discarded")
            raise Fenced(f"{held.host} was told something newer of {session} while its worker started for move {move}")
        del held.receiving[session]
        held.incoming[session] = Incoming(move, handle, epoch)
        self._watch(session, move)  # the leader that began the move may end before it
        with phases.phase("deadline"):
            await handle.give_deadline(self._deadline.descriptor())
        return {**self._admit(session, move), "device": spec, "worker_pid": handle.pid, "spare": handle.warm,
                "phases_ms": phases.ms()}

    async def send(self, *, session: str, move: str, address: list[Any], ticket: bytes, secret: bytes,
                   options: dict[str, Any] | None = None, wishes: dict[str, Any] | None = None,
                   **_: Any) -> dict[str, Any]:
        """Be the source: send everything; on return the session is paused and the copy verified.

        ``options``: those of :class:`MoveOptions`; leaders of 0.1 call them ``wishes``.
        Raises :class:`PoolUnavailable` past the deadline, :class:`NotFound`, and what the worker raises; the session
        then runs on.
        """
        self._deadline.check("a move")
        fault("daemon.send")
        handle = self._held.owned(session)
        asked = asyncio.get_running_loop().time()
        with Dialer(lambda: connect((str(address[0]), int(address[1])))) as dialer:  # a worker has no network
            result = await handle.request("send", move=move, address=list(address), ticket=ticket, secret=secret,
                                          fds=(dialer.descriptor,), timeout=MOVE_SECONDS, **(options or wishes or {}))
        self._held.paused[session] = move
        self._watch(session, move)
        return {**result, "send_ms": (asyncio.get_running_loop().time() - asked) * 1000}
