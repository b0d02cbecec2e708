"""Reconciliation: reads the registry's records of the sessions held here and obeys them (OWNERSHIP 2)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from rgpu.link.faults import fault
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.reconcile import Holding, reconcile
from rgpu.migrate.records.schema import SessionRecord
from rgpu.migrate.registry.base import txn_certain
from rgpu.server.node.identity import Identity
from rgpu.server.node.pool.leader_reports import LeaderReports
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.pool.trust import RegistryTrust
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.transitions import Transitions
from rgpu.session.errors import PoolUnavailable, RgpuError, UnknownOutcome

log = structlog.get_logger(__name__)

WITHDRAW_TRIES = 5  #: attempts of a source's abort, while the record changes
AGAIN_SECONDS = 0.5  #: between two readings of a record that decides nothing yet


class Reconciler:
    """Brings the sessions held here into the state of their records. ``spawn``: starts background work."""

    def __init__(self, identity: Identity, records: PoolRecords, held: HeldSessions, trust: RegistryTrust,
                 reports: LeaderReports, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._identity, self._records, self._held = identity, records, held
        self._trust, self._reports, self._spawn = trust, reports, spawn
        self._transitions = Transitions(held)
        self._waiting: set[tuple[str, str]] = set()  #: (session, move) whose record is read again later
        self._read: dict[str, Held] = {}  #: last read records of sessions whose move is open
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def reconcile(self, *, session: str, move: str, **_: Any) -> dict[str, Any]:
        """Read the record and obey it; one that decides nothing yet is read again later.

        The state held is read from this node, never from the request. ``move``: the one to reconcile, empty for any.
        Returns {done, reason}. Raises what the registry and the worker raise.
        """
        async with self._locks[session]:
            held = self._held.holds(session, move)
            read = await self._records.find(session)
            record = read.record if read else None
            if held is None:
                return self._nothing_held(session, record)
            kind, epoch, held_for = held
            if record is not None and record.epoch < epoch and kind != "incoming":
                await self.doubt(session, epoch, record.epoch)
            found = reconcile(record, Holding(self._identity.host, self._identity.incarnation,
                                           kind, epoch, held_for))  # type: ignore[arg-type]
            if kind == "paused" and found.action == "stay paused" and read is not None:
                self._read[session] = read
            else:
                self._read.pop(session, None)
            if found.action != "stay paused":
                open_move = record.open_move if record else None
                await self._transitions.obey(session, held_for, found.action, found.epoch,
                                             open_move.id if open_move else "")
            elif kind in ("paused", "incoming"):
                self.watch(session, held_for)
            return {"done": found.action, "reason": found.reason}

    async def doubt(self, session: str, epoch: int, known: int) -> bool:
        """Report that a session is held at a higher epoch than on record; False: the registry is never doubted."""
        return await self._trust.doubt(
            f"{self._identity.host} holds {session} at epoch {epoch}, and the registry says {known}")

    def _nothing_held(self, session: str, record: SessionRecord | None) -> dict[str, Any]:
        """Handle a record whose worker is missing here: it died after verification, before it was activated."""
        if session in self._held.running:  # its end is reported with its reason, once its device was examined
            return {"done": "its worker is here, or has just ended"}
        host = self._identity.host
        if record is not None and record.state == "running" \
                and (record.owner, record.incarnation) == (host, self._identity.incarnation):
            log.warning("a session of ours has no worker", session=session, epoch=record.epoch)
            self._spawn(self._reports.worker_died(session, record.epoch, f"its worker on {host} died in a move"))
        return {"done": "nothing is held here"}

    # -- requests of workers -----------------------------------------------------
    async def withdraw(self, session: str, move: str, reason: str) -> None:
        """Try to abort a move whose commit a source here has awaited for too long; the registry decides (OWNERSHIP 2).

        The record is compared as it was read last, so this is one round trip where nothing has changed since. The
        outcome is sent to the worker, which asks again if it receives none.
        """
        async with self._locks[session]:
            outcome, why = await self._abort(session, move, reason)
            log.info("a source withdraws", session=session, move=move, outcome=outcome, reason=why)
            if outcome == "won":
                self._held.paused.pop(session, None)
            await self._answer(session, "withdrawn", move=move, outcome=outcome, reason=why)

    async def _abort(self, session: str, move: str, reason: str) -> tuple[str, str]:
        """Return (won, lost or unknown; why). An unknown outcome is never guessed."""
        fault("daemon.withdraw")
        read = self._read.pop(session, None)
        try:
            for _ in range(WITHDRAW_TRIES):
                read = read or await self._records.session(session)
                decision = ownership.abort(read, epoch=self._held.epochs.get(session, 0), move=move,
                                           now=time.time(), reason=reason, source=self._identity.host)
                result = await txn_certain(self._records.registry, decision.compares, decision.operations)
                if result.succeeded:
                    return ("unknown", "a test lost the answer") if fault("daemon.withdraw.done") == "lost" \
                        else ("won", reason)
                read = None  # the record has changed
        except (UnknownOutcome, PoolUnavailable) as error:
            return "unknown", error.message
        except RgpuError as error:  # committed, aborted or ended already
            return "lost", error.message
        return "lost", "the record changes too fast"

    async def read_for(self, session: str, move: str) -> None:
        """Reconcile at a worker's request; the worker is informed also when the record decides nothing."""
        done = await self.reconcile(session=session, move=move)
        if done["done"] == "stay paused":
            await self._answer(session, "undecided", move=move, reason=str(done.get("reason", "")))

    async def _answer(self, session: str, what: str, **values: Any) -> None:
        handle = self._held.running.get(session)
        if handle is not None:
            with contextlib.suppress(RgpuError):
                await handle.request(what, **values)

    # -- until it is decided --------------------------------------------------------
    def watch(self, session: str, move: str) -> None:
        """Read the record until it decides: the coordinator that began the move may have died."""
        if (session, move) not in self._waiting:
            self._waiting.add((session, move))
            self._spawn(self._again(session, move))

    async def _again(self, session: str, move: str) -> None:
        await asyncio.sleep(AGAIN_SECONDS)
        self._waiting.discard((session, move))
        try:
            await self.reconcile(session=session, move=move)
        except RgpuError as error:
            log.info("cannot reconcile yet", session=session, reason=error.message)
            self.watch(session, move)

    async def reconcile_all(self) -> None:
        """Reconcile every session held here, after the registry was unreachable."""
        for session in list(self._held.running) + list(self._held.incoming):
            with contextlib.suppress(RgpuError):
                incoming = self._held.incoming.get(session)
                await self.reconcile(session=session, move=incoming.move if incoming else "")
