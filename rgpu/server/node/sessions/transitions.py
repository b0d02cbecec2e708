"""Carries out what a record commands for a worker here (:mod:`rgpu.migrate.records.reconcile` decides)."""

from __future__ import annotations

import structlog

from rgpu.link.faults import fault
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.worker_exits import end_worker

log = structlog.get_logger(__name__)


class Transitions:
    """Changes the sessions that a node holds."""

    def __init__(self, held: HeldSessions) -> None:
        self._held = held

    async def obey(self, session: str, move: str, action: str, epoch: int, still_open: str = "") -> None:
        """Activate, resume, forget or discard the worker here. Raises what the worker raises.

        ``still_open``: the move that is open on record; any other move that the worker sends for has been aborted.
        """
        held = self._held
        log.info("reconcile", session=session, move=move, action=action, epoch=epoch)
        fault(f"daemon.{action}")
        if action == "activate":
            incoming = held.incoming[session]
            await incoming.handle.request("activate", epoch=epoch)
            del held.incoming[session]
            held.bases.pop(session, None)  # the record names a newer one
            old = held.running.get(session)
            held.running[session], held.epochs[session] = incoming.handle, epoch
            if old is not None:
                await end_worker(old, "moved")
        elif action == "resume":
            held.paused.pop(session, None)
            await held.owned(session).request("resume", still_open=still_open)
        elif action == "forget":
            held.paused.pop(session, None)
            handle = held.running.pop(session, None)
            if handle is not None:
                await held.leaving.dismiss(handle, "moved")
        elif action == "discard":
            await held.discard(session, move)

    async def adopt(self, session: str, epoch: int) -> None:
        """Serve the session at a higher epoch (`rgpu pool adopt`); its agent attaches anew. Repeating is no error."""
        held = self._held
        if held.epochs.get(session, 0) >= epoch and session in held.running:
            return
        await held.owned(session).request("adopt", epoch=epoch)
        held.epochs[session] = epoch
        held.paused.pop(session, None)
