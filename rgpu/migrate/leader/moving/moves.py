"""All moves of a leader: begins, follows and cancels them, and takes over those of a former leader."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog

from rgpu.migrate.leader.moving.checks import MoveCheck
from rgpu.migrate.leader.moving.mover import Mover
from rgpu.migrate.leader.nodes import Progress
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.records.ownership import Held
from rgpu.session.errors import MoveFailed, Refused

log = structlog.get_logger(__name__)

MOVES_PER_NODE = 4  #: at a time, from it and to it
MEASURED_BYTES = 64 << 20  #: least bytes of a move that counts as a measurement of the link
MOST_LEARNED = 1000  #: sessions whose replay mismatches are remembered


class Moves:
    """Moves of this term, at most one for each session. ``freed``: called when a move ends, as memory may be free."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, locks: SessionLocks,
                 freed: Callable[[], None]) -> None:
        self.term, self.records, self.commands, self.locks, self._freed = term, records, commands, locks, freed
        self._movers: dict[str, Mover] = {}
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOVES_PER_NODE))
        self._progress: dict[str, dict[str, Any]] = {}
        self.rates: dict[frozenset[str], float] = {}  #: bytes/s between two hosts, measured by their last move
        self._learned: dict[str, float] = {}  #: by session: share of pages that a replay got wrong

    # -- beginning ----------------------------------------------------------------
    async def migrate(self, name: str, host: str, *, options: MoveOptions | None = None, device: str | None = None,
                      on_progress: Progress | None = None, why: str = "") -> dict[str, Any]:
        """Move a session while it runs, because of ``why``; return the statistics of ``rgpu migrate -o json``.

        A failed replay is followed by another move, by copy. Raises
        :class:`NotFound`, :class:`Refused` before anything was changed, :class:`MoveFailed`
        when the move was aborted (detail: the statistics), :class:`Fenced`.
        """
        if name in self._movers:
            raise Refused(f"{name} is being moved already ({self._movers[name].role.state})", session=name)
        options = options or MoveOptions()
        async with self.locks.session(name), self._slots_of(str((await self.records.held(name)).record.owner), host):
            try:
                return await self._move(name, host, device, options, on_progress, why)
            except Refused as error:
                await self.term.note("refuse_move", f"not to {host}: {error.message}", session=name)
                raise

    async def _move(self, name: str, host: str, device: str | None, options: MoveOptions,
                    on_progress: Progress | None, why: str) -> dict[str, Any]:
        def mover_for(options: MoveOptions) -> Mover:
            check = MoveCheck(self.records, self.commands, name, host, device, why=why)
            return Mover(self.term, self.records, self.commands, name, check=check, options=options,
                         on_progress=lambda values: self._progressed(name, values, on_progress))

        options = replace(options, mismatched=self._learned.get(name, 0.0))
        mover = mover_for(options)
        try:
            return await self._drive(mover)
        except MoveFailed as failed:
            if not mover.replay_failed:
                raise
            log.warning("the replay did not work out: copying", session=name, move=mover.move, reason=failed.message)
            return {**await self._drive(mover_for(replace(options, mode="copy"))), "fell_back": failed.message}

    def _progressed(self, name: str, values: dict[str, Any], tell: Progress | None) -> None:
        self._progress[name] = values
        if tell is not None:
            tell(values)

    @asynccontextmanager
    async def _slots_of(self, *hosts: str) -> AsyncIterator[None]:
        """Wait for a slot of each host, of :data:`MOVES_PER_NODE`. (Taken in one order, so that there is no deadlock.)
        """
        async with AsyncExitStack() as held:
            for host in sorted(set(hosts)):
                await held.enter_async_context(self._slots[host])
            yield

    async def plan(self, name: str, host: str, *, options: MoveOptions | None = None,
                   device: str | None = None) -> dict[str, Any]:
        """Run every check that changes nothing, and forecast the cost, for ``rgpu migrate --dry-run``.

        Raises as :meth:`migrate` would before anything was changed.
        """
        check = self.check(name, host, device, forecast=True)
        await check.run()
        record, chosen = check.held.record, (options or MoveOptions()).as_dict()
        return {"session": name, "from": record.owner, "to": host, "device": check.device, "reason": check.reason,
                "epoch": record.epoch, "options": chosen, "wishes": chosen,
                "forecast": dict(check.found.get("forecast") or {})}

    def check(self, name: str, host: str, device: str | None = None, *, forecast: bool = False) -> MoveCheck:
        """Make the checks of a move, to be run. ``forecast``: also have the source forecast the cost."""
        return MoveCheck(self.records, self.commands, name, host, device, forecast=forecast)

    # -- driving ------------------------------------------------------------------
    async def _drive(self, mover: Mover) -> dict[str, Any]:
        """Run a mover; the caller holds the session's lock."""
        self._movers[mover.name] = mover
        try:
            return await mover.run()
        finally:
            del self._movers[mover.name]
            self._learn(mover)
            self._measured(mover.statistics())
            self._progress.pop(mover.name, None)
            self._freed()

    def _measured(self, move: dict[str, Any]) -> None:
        """Record a move's measured speed, for metrics and for placing the members of a gang near each other."""
        self.term.observe("move", move)
        seconds, sent = float(move["total_ms"]) / 1000, int(move["bytes_sent"])
        if move["outcome"] == "committed" and sent >= MEASURED_BYTES and seconds > 0:
            self.rates[frozenset((str(move["from"]), str(move["to"])))] = sent / seconds

    def _learn(self, mover: Mover) -> None:
        """Remember a replay's mismatches for the next forecast; a new leader begins without them."""
        if mover.learned is not None:
            self._learned.pop(mover.name, None)
            if mover.learned:
                self._learned[mover.name] = mover.learned
                if len(self._learned) > MOST_LEARNED:
                    del self._learned[next(iter(self._learned))]

    async def finish(self, held: Held) -> None:
        """Drive an unfinished or unreconciled move to its end from the record alone; the caller holds the lock."""
        assert held.record.move is not None
        mover = Mover(self.term, self.records, self.commands, held.record.name, move=held.record.move.id)
        try:
            await self._drive(mover)
        except MoveFailed as error:
            log.info("an unfinished move was undone", session=held.record.name, reason=error.message)

    # -- moves under way ----------------------------------------------------------
    def under_way(self) -> dict[str, dict[str, Any]]:
        """Return {session: {state, from, to, phase, round, pages_sent, bytes_sent …}} of this leader's moves."""
        found = {}
        for name, mover in self._movers.items():
            sides = mover.statistics()
            found[name] = {"state": mover.role.state, "from": sides["from"], "to": sides["to"],
                           **self._progress.get(name, {})}
        return found

    def cancel(self, name: str, reason: str, host: str | None = None) -> None:
        """Abort a session's move if it is not ready yet; ``host``: only a move from or to that host."""
        mover = self._movers.get(name)
        if mover is not None and (host is None or mover.involves(host)):
            mover.cancel(reason)

    def cancel_all(self, host: str, reason: str) -> None:
        """Abort, if they are not ready, the moves from and to a lost host."""
        for mover in self._movers.values():
            if mover.involves(host):
                mover.cancel(reason)

    def end_term(self) -> None:
        """Abort the moves of this term that are not ready: the next leader undoes them, and callers need not wait."""
        for mover in self._movers.values():
            mover.cancel("its leader leads no more")

    async def abort(self, name: str, move: str | None = None, reason: str = "aborted on request") -> dict[str, Any]:
        """Abort a move that is not ready yet; return the move's present state. Raises :class:`NotFound`."""
        mover = self._movers.get(name)
        if mover is not None and (not move or move == mover.move):
            mover.cancel(reason)
        return await self.status(name)

    async def status(self, name: str) -> dict[str, Any]:
        """Return {session, move: its record or None, role: the state of the move that this leader drives}."""
        record = (await self.records.held(name)).record
        mover = self._movers.get(name)
        move = record.move
        return {"session": name, "role": mover.role.state if mover else None,
                "progress": mover.progress if mover else {}, "move": None if move is None else {
            "id": move.id, "from": move.source, "to": move.destination, "state": move.state, "reason": move.reason}}
