"""Preconditions of a move: every check runs before anything is changed, and has its own reason."""

from __future__ import annotations

from typing import Any

from rgpu.migrate.leader.nodes import ASK_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records.ownership import FROM, Held, Node
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.placement import mebibytes, request_for
from rgpu.session.errors import NotFound, Refused, RgpuError


class MoveCheck:
    """Checks of one move. After :meth:`run` the move begins with ``held``, ``node``, ``device`` and ``reason``."""

    def __init__(self, records: PoolRecords, commands: FencedCommands, name: str, host: str,
                 device: str | None = None, *, forecast: bool = False, why: str = "") -> None:
        """Make the checks. ``forecast``: also have the source forecast the cost. ``why``: purpose of the move."""
        self.why = why
        self.forecast = forecast
        self.found: dict[str, Any] = {}  #: description of the session by the source
        self.records, self.commands = records, commands
        self.name = name
        self.host = host
        self.wanted = device
        self.held: Held
        self.node: Node
        self.device = ""
        self.reason = ""

    async def run(self) -> None:
        """Run all checks; nothing is changed. Raises :class:`NotFound` (session, host) or :class:`Refused`."""
        self.held = await self.records.held(self.name)
        self._check_state()
        await self._check_destination()
        await self._check_source()

    def _check_state(self) -> None:
        record = self.held.record
        if record.owner == self.host and record.live:
            raise Refused(f"{self.name} is on {self.host} already", session=self.name, host=self.host)
        if record.open_move is not None:
            raise Refused(f"{self.name} is being moved to {record.open_move.destination} already", session=self.name)
        if record.state not in FROM["begin_move"]:
            raise Refused(f"{self.name} is {record.state}, not running: {record.reason}", session=self.name,
                          state=record.state)

    async def still_fits(self) -> None:
        """Check the destination again just before the move is recorded: another session may have been placed there."""
        self.wanted = self.device
        await self._check_destination()

    async def _check_destination(self) -> None:
        """Check that the destination is in the pool, ready, of the right kind, new enough, with enough memory."""
        record = self.held.record
        choice = place(await self.records.snapshot(), request_for(record, host=self.host, device=self.wanted))
        node = await self.records.node(self.host)
        if node is None:
            raise NotFound(f"{self.host} has just left the pool", host=self.host)
        self.node, self.device = node, choice.device
        self.reason = f"{self.why}; {choice.reason}" if self.why else \
            f"asked for: to {choice.device} of {self.host}, where {mebibytes(choice.free)} are free"

    async def _check_source(self) -> None:
        """Check that the source is in the pool, and that nothing pins the session to it."""
        record = self.held.record
        if await self.records.node(record.owner) is None:
            raise Refused(f"{record.owner}, which has {self.name}, is not in the pool at the moment")
        try:
            seen = await self.commands.tell(str(record.owner), "worker.describe",
                                        {"session": self.name, "forecast": self.forecast, "moving": True},
                                        epoch=record.epoch, timeout=ASK_SECONDS * (6 if self.forecast else 1))
        except RgpuError as error:
            raise Refused(f"the worker of {self.name} on {record.owner} does not answer: {error.message}") from error
        self.found = seen
        pins = [str(pin) for pin in seen.get("pins") or []]
        if seen.get("error"):
            raise Refused(f"{self.name} has failed: {seen.get('error_detail') or seen['error']}", session=self.name)
        if pins:
            raise Refused(f"{self.name} cannot move: {'; '.join(pins)}", session=self.name, pins=pins)
