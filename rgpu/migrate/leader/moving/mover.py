"""Driver of one move: the shell around :data:`rgpu.migrate.move.coordinator.COORDINATOR`.

Every command of the role is one method here, which carries it out and returns the
event that follows. No decisions are made in this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from rgpu.checkpoint.phases import Phases
from rgpu.link.faults import fault
from rgpu.migrate.leader.moving.checks import MoveCheck
from rgpu.migrate.leader.nodes import ASK_SECONDS, MOVE_SECONDS, START_SECONDS, Progress
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.move.coordinator import COORDINATOR, CoordinatorRole
from rgpu.migrate.move.machine import Command, Event
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Decision, Held
from rgpu.session.errors import (
    Conflict,
    Fenced,
    MoveFailed,
    NotFound,
    PoolUnavailable,
    Refused,
    RgpuError,
    UnknownOutcome,
)

log = structlog.get_logger(__name__)

READ_AGAIN_SECONDS = 0.2
RECONCILE_TRIES = 3
STATISTICS = ("rounds", "pages_total", "pages_sent", "bytes_sent", "bytes_pulled", "mismatched_pages", "repaired_bytes",
              "sampled_pages", "sampled_mismatches")


class Mover:
    """Driver of one move of one session; :meth:`run` is called once."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, name: str, *,
                 check: MoveCheck | None = None, move: str = "", options: MoveOptions | None = None,
                 on_progress: Progress | None = None) -> None:
        """Make the driver. ``check``: of a move that begins; None: ``move`` is unfinished, to be finished or undone."""
        self.term, self.records, self.commands = term, records, commands
        self.name = name
        self.role = CoordinatorRole()
        self.move = move or f"move-{term.new_id()}"
        self.check = check
        self.options = options or MoveOptions()
        self.progress: dict[str, Any] = {}  #: last progress report of the source
        self._on_progress = on_progress
        self._cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._error: RgpuError | None = None
        self._why = ""  #: what decided the move, for the caller
        self._unwritten = ""  #: why it is not known whether a decision was written
        self._receiver: dict[str, Any] = {}
        self._statistics: dict[str, Any] = {}
        self._epoch = 0
        self._source = self._destination = ""
        self._began = term.clock.monotonic()
        self._phases = Phases(term.clock.monotonic)
        self._offered_at = self._reconciled_at = 0.0

    def cancel(self, reason: str) -> None:
        """Abort the move if it is not ready yet."""
        if not self._cancelled.done():
            self._cancelled.set_result(reason)

    def involves(self, host: str) -> bool:
        """Whether a host is the move's source or destination."""
        return host in (self._source, self._destination)

    async def run(self) -> dict[str, Any]:
        """Drive the move to its end; return the statistics for ``rgpu migrate``.

        Raises :class:`Refused` (or what a check raises) before anything was changed,
        :class:`MoveFailed` when it was aborted, :class:`Fenced` when another leader took over.
        """
        event: Event | None = Event("start" if self.check else "resume")
        while event is not None:
            before = self.role.state
            step = COORDINATOR.step(self.role, event)
            if step.stale:
                raise AssertionError(f"the move's table has no row for {event.kind} in {before}")
            self.role, event = step.role, None
            log.info("move", session=self.name, move=self.move, state=self.role.state, reason=self.role.reason)
            for command in step.commands:
                event = await self._do(command) or event
        log.info("move ends", session=self.name, move=self.move, outcome=self.role.state, reason=self.role.reason)
        return self._outcome()

    async def _do(self, command: Command) -> Event | None:
        done: Callable[[Command], Awaitable[Event | None]] = getattr(self, f"do_{command.do}")
        fault(f"mover.{command.do}")
        with self._phases.phase(command.do):
            event = await done(command)
        if fault(f"mover.{command.do}.done") == "lost":
            return Event("unknown", reason="a test lost the answer")
        return event

    # -- the commands of the role, in the order of a good move --------------------
    async def do_run_checks(self, command: Command) -> Event:
        """Run the checks; events: passed, refused."""
        assert self.check is not None
        try:
            await self.check.run()
        except RgpuError as error:
            self._error = error
            return Event("refused", reason=error.message)
        record = self.check.held.record
        self._epoch, self._source, self._destination = record.epoch, str(record.owner), self.check.host
        return Event("passed", reason=self.check.reason)

    async def do_write_begin(self, command: Command) -> Event:
        """Write the move into the record, if the destination still has enough memory."""
        assert self.check is not None
        check = self.check
        async with self.records.placing:
            try:
                await check.still_fits()
            except RgpuError as error:
                self._error = error
                return Event("refused", reason=error.message)
            return await self._write(lambda held: ownership.begin_move(
                held, epoch=self._epoch, move=self.move, node=check.node, device=check.device, leader=self.term.leader,
                now=self.term.clock.wall(), reason=command.reason))

    async def do_command_receive(self, command: Command) -> Event:
        """Have the destination start a worker that receives the session."""
        assert self.check is not None
        args = {"session": self.name, "move": self.move, "epoch": self._epoch + 1,
                "quota": self.check.held.record.quota, "device": self.check.device, "source": self._source}
        return await self._command(self._destination, "move.receive", args, "received", START_SECONDS)

    async def do_command_send(self, command: Command) -> Event:
        """Have the source send; the event follows when the copy is verified."""
        chosen = self.options.as_dict()
        args = {"session": self.name, "move": self.move, "options": chosen, "wishes": chosen,  # their name in 0.1
                "host": self._destination, **{key: self._receiver.get(key) for key in ("address", "ticket", "secret")}}
        event = await self._command(self._source, "move.send", args, "offered", MOVE_SECONDS)
        self._offered_at = self.term.clock.monotonic()
        return event

    @property
    def replay_failed(self) -> bool:
        """Whether the move ended because its replay failed, so that copying may succeed."""
        return self.role.state == "aborted" and self._error is not None and bool(self._error.detail.get("replay"))

    @property
    def learned(self) -> float | None:
        """Return the share of pages that a replay of this move got wrong; None: nothing was replayed."""
        found = self._statistics
        if found.get("mode") == "replay":
            return int(found.get("mismatched_pages") or 0) / max(1, int(found.get("pages_total") or 0))
        share = self._error.detail.get("mismatched") if self._error is not None else None
        return min(max(float(share), 0.0), 1.0) if isinstance(share, int | float) else None

    async def do_write_ready(self, command: Command) -> Event:
        """Write that the source is paused and the copy verified."""
        return await self._write(lambda held: ownership.move_ready(
            held, epoch=self._epoch, move=self.move, leader=self.term.leader, now=self.term.clock.wall(),
            reason=command.reason))

    async def do_write_commit(self, command: Command) -> Event:
        """Commit: one transaction names the new owner (OWNERSHIP 2)."""
        try:
            node = await self.records.node(self._destination)
        except RgpuError as error:
            return Event("unknown", reason=error.message)
        if node is None:
            return Event("refused", reason=f"the lease of {self._destination} has ended")
        return await self._write(lambda held: ownership.commit(
            held, epoch=self._epoch, move=self.move, node=node, leader=self.term.leader, now=self.term.clock.wall(),
            reason=f"moved from {self._source} to {self._destination}{self._how()}: {command.reason}"),
            why=f"every page was verified on {self._destination}")

    async def do_write_abort(self, command: Command) -> Event:
        """Abort: write that the source stays the owner."""
        return await self._write(lambda held: ownership.abort(
            held, epoch=self._epoch, move=self.move, leader=self.term.leader, now=self.term.clock.wall(),
            reason=command.reason), why=command.reason)

    async def do_read_record(self, command: Command) -> Event:
        """Read the state of this move from the record; wait a little when the registry does not answer."""
        try:
            held = await self.records.held(self.name)
        except NotFound:
            return Event("says_over", reason="the session no longer exists")
        except RgpuError as error:
            await asyncio.sleep(READ_AGAIN_SECONDS)
            return Event("unknown", reason=error.message)
        move = held.record.move
        if move is None or move.id != self.move or not held.record.live:
            never = f"the registry did not take the beginning of the move: {self._unwritten}" \
                if self._unwritten and held.record.live else ""
            return Event("says_over", reason=never or held.record.reason)
        self._source, self._destination = move.source, move.destination
        self._epoch = held.record.epoch - (move.state == "committed")
        if move.state in ("committed", "aborted") and held.record.state != "running":
            return Event("says_over", reason=held.record.reason)
        if move.state in ("committed", "aborted"):
            self._why = move.reason
        return Event(f"says_{move.state}")

    async def do_reconcile(self, command: Command) -> Event:
        """Have both sides read the record. A side whose node is lost has nothing left to reconcile."""
        sides = [self._reconcile_one(self._destination), self._reconcile_one(self._source)]
        done = await asyncio.gather(*sides)
        return Event("reconciled" if all(done) else "unreconciled", reason=command.reason)

    async def _reconcile_one(self, host: str) -> bool:
        try:
            if await self.records.node(host) is None:
                return True
            await self.commands.tell(host, "move.settle", {"session": self.name, "move": self.move}, epoch=self._epoch,
                                 timeout=ASK_SECONDS, tries=RECONCILE_TRIES)
        except NotFound:
            pass  # it has nothing of the session, so there is nothing to reconcile
        except RgpuError as error:
            log.warning("did not reconcile a move", host=host, session=self.name, move=self.move, reason=error.message)
            return False
        # The side that serves the session from now on ends the downtime.
        if host == (self._destination if self.role.state == "reconciling" else self._source):
            self._reconciled_at = self.term.clock.monotonic()
        return True

    async def do_write_clear(self, command: Command) -> None:
        """Take the decided move out of the record."""
        epoch = self._epoch + (self.role.state == "committed")
        try:
            await self.term.change(self.name, lambda held: ownership.clear_move(
                held, epoch=epoch, move=self.move, leader=self.term.leader, now=self.term.clock.wall(),
                reason=command.reason))
        except RgpuError as error:  # the next leader, or the next tick, clears it
            log.info("a reconciled move stays on record", session=self.name, move=self.move, reason=error.message)

    # -- helpers --------------------------------------------------------------------
    async def _write(self, decide: Callable[[Held], Decision], why: str = "") -> Event:
        """Write a decision; return the outcome as an event. ``why``: what decided the move, if this decision does."""
        try:
            await self.term.change(self.name, decide)
            self._why = why or self._why
            return Event("written")
        except Conflict as error:
            self._error = self._error or error
            return Event("conflict", reason=error.message)
        except Fenced as error:
            if await self._leads_still():
                return Event("refused", reason=error.message)
            return Event("fenced", reason=error.message)
        except (Refused, NotFound) as error:
            self._error = self._error or error
            return Event("refused", reason=error.message)
        except (UnknownOutcome, PoolUnavailable) as error:
            self._unwritten = error.message
            return Event("unknown", reason=error.message)

    async def _leads_still(self) -> bool:
        """Whether this leader still leads: a decision may be fenced by the session's epoch or by another leader."""
        try:
            return await self.term.leads()
        except RgpuError:
            return True  # not known: the role reads the record, and is fenced there if it must

    async def _command(self, host: str, verb: str, args: dict[str, Any], done: str, timeout: float) -> Event:
        """Send a command to a node; given up when the move is cancelled. Return the outcome as an event."""
        tell = asyncio.ensure_future(self.commands.tell(host, verb, args, epoch=self._epoch, timeout=timeout,
                                                    on_progress=self._progress))
        either: list[asyncio.Future[Any]] = [tell, self._cancelled]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not tell.done():
                return Event("cancel", reason=self._cancelled.result())
            try:
                result = tell.result()
            except RgpuError as error:
                self._error = error
                return Event("failed", reason=f"{verb} on {host}: {error.message}")
        finally:
            tell.cancel()
            await asyncio.gather(tell, return_exceptions=True)
        if verb == "move.receive":
            self._receiver = result
        elif not result.get("verified"):
            return Event("failed", reason=f"{host} does not say that every page was verified")
        else:
            self._statistics = result
        return Event(done)

    def _progress(self, values: dict[str, Any]) -> None:
        self.progress = values
        if self._on_progress is not None:
            self._on_progress({"session": self.name, "move": self.move, **values})

    def _outcome(self) -> dict[str, Any]:
        """Return the statistics, or raise the error for the end that was reached."""
        result = self.statistics()
        if self.role.state == "committed":
            return result
        if self.role.state == "refused":
            raise self._error or Refused(self.role.reason)
        if self.role.state == "fenced":
            raise Fenced(f"another leader was elected and finishes the move of {self.name}", **result)
        raise MoveFailed(f"{self.name} was not moved: {self._why or self.role.reason}", **result)

    def _phases_ms(self) -> dict[str, float]:
        """Return the times of the move's steps in order; those of the two workers below `send.` and `receive.`."""
        inner = {f"{side}.{name}": float(ms) for side, said in (("receive", self._receiver), ("send", self._statistics))
                 for name, ms in (said.get("phases_ms") or {}).items()}
        return {**self._phases.ms(), **inner}

    def _how(self) -> str:
        """Return the mode and a replay's mismatches for the history; empty for a leader that only finishes the move."""
        found = self._statistics
        if found.get("mode") != "replay":
            return f" by {found['mode']}" if found.get("mode") else ""
        if not found.get("mismatched_pages"):
            return " by replay, every page of it right"
        return (f" by replay, {found['mismatched_pages']} of {found.get('pages_total')} pages repaired "
                f"({found.get('repaired_bytes')} bytes)")

    def statistics(self) -> dict[str, Any]:
        """Return the statistics for ``rgpu migrate -o json``; times in ms."""
        committed = self.role.state == "committed"
        found = self._statistics
        downtime = 0.0
        if found:
            downtime = float(found.get("pause_ms", 0.0))
            if self._reconciled_at:
                downtime += max(0.0, self._reconciled_at - self._offered_at) * 1000
        return {
            "session": self.name, "move": self.move, "outcome": self.role.state,
            "reason": self._why or self.role.reason,
            "from": self._source, "to": self._destination, "epoch": self._epoch + committed,
            "mode": str(found.get("mode") or self.options.mode), "why": str(found.get("why") or ""),
            "expected": dict(found.get("expected") or {}),
            "downtime_ms": round(downtime, 3), "brownout_ms": round(float(found.get("brownout_ms", 0.0)), 3),
            "total_ms": round((self.term.clock.monotonic() - self._began) * 1000, 3),
            **{key: int(found.get(key, 0)) for key in STATISTICS}, "verified": bool(found.get("verified", False)),
            "pages_by": str(found.get("pages_by") or "stream"), "pages_why": str(found.get("pages_why") or ""),
            "warm_worker": bool(self._receiver.get("spare")), "spare": bool(self._receiver.get("spare")),
            "phases_ms": self._phases_ms(),
            "page_rounds": list(found.get("page_rounds") or []),
        }
