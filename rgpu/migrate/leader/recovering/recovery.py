"""Bringing a session back: another worker at epoch + 1, from the named checkpoint (DESIGN decision 10, OWNERSHIP 9)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import structlog

from rgpu.link.faults import fault
from rgpu.migrate.leader.nodes import ASK_SECONDS, CHECKPOINT_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import losses, ownership
from rgpu.migrate.records.ownership import Decision, Held, Node
from rgpu.migrate.records.schema import MAX_TEXT, CheckpointName, Failure
from rgpu.migrate.scheduling.adapter import place_by_fragmentation as place
from rgpu.migrate.scheduling.placement import Choice, Place, Request, request_for
from rgpu.session.devices import parts
from rgpu.session.errors import (
    Conflict,
    Corrupt,
    DeviceError,
    Fenced,
    LinkError,
    NotFound,
    RecoveryFailed,
    Refused,
    RgpuError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnreachable,
    TimedOut,
)

log = structlog.get_logger(__name__)

#: Tries in a row to start a session after one loss; then it waits for the next tick, or is given up.
START_TRIES = 4
#: Errors of a start that are caused by the restored data, not by the place.
CONTENT_ERRORS = (Corrupt, StoreError, DeviceError, RecoveryFailed)


@dataclass
class Attempt:
    """State of one recovery. ``failure``: the loss that caused it; None once it is on record."""

    why: str
    failure: Failure | None = None
    host: str | None = None
    device: str | None = None  #: device of ``host``, where one was chosen
    checkpoint: CheckpointName | None = None
    failed_hosts: set[str] = field(default_factory=set)


class Recovery:
    """Recovery of sessions, one at a time; the caller holds the session's lock."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands) -> None:
        self.term, self.records, self.commands = term, records, commands

    async def run(self, name: str, why: str, failure: Failure | None = None, *, host: str | None = None,
                  device: str | None = None, checkpoint: CheckpointName | None = None,
                  asked: bool = False) -> Held | None:
        """Bring a session back; return it, or None: it waits for a place or was given up, with the reason on record.

        A parked session is brought back in the same way; while there is no place it stays parked.
        ``asked``: a client waits for it; otherwise it is automation, which an operator may have paused.

        Raises :class:`Fenced`, :class:`PoolUnavailable`, :class:`UnknownOutcome`.
        """
        attempt = Attempt(why, failure, host, device, checkpoint)
        for _ in range(START_TRIES):
            held = await self.records.held(name)
            if not held.record.live and held.record.parked is None:
                return None
            if attempt.failure is not None and losses.on_record(held.record, attempt.failure):
                attempt.failure = None
            if not held.record.recover:
                await self._give_up(held, f"{why}; it runs with --recover off, so nothing was kept")
                return None
            if held.record.shares:
                await self._give_up(held, f"{why}; it {ownership.why_shared(held.record)}")
                return None
            if attempt.failure is not None and losses.next_place(held.record, attempt.failure) == "none":
                await self._give_up(held, losses.why_not(held.record, attempt.failure))
                return None
            try:
                if not asked and (pause := await self.records.paused()) is not None:
                    await self._wait(held, attempt, f"{why}; {pause}")
                    return None
                placed = await self._place(held, attempt)
            except Conflict:
                continue  # another change was first: read again
            if placed is None:
                return None
            running = await self._start(*placed, attempt)
            if running is not None:
                return running
        held = await self.records.held(name)
        if held.record.parked is None:
            await self._wait(held, attempt, f"{why}; no node could start it")
        return None

    async def returned(self, name: str) -> Held | None:
        """Return the session, if its owner is back and still has it (it was only unreachable); else None."""
        held = await self.records.held(name)
        node = await self.records.node(held.record.owner)
        record = held.record
        if record.state not in ownership.FROM["started"] or node is None \
                or node.record.incarnation != record.incarnation:
            return None
        try:
            seen = await self.commands.tell(node.record.host, "worker.describe", {"session": name}, epoch=record.epoch,
                                        timeout=ASK_SECONDS)
        except Fenced:
            raise
        except RgpuError:
            return None
        if int(seen.get("epoch", 0)) != record.epoch or seen.get("state") not in ("running", "paused"):
            return None
        now = self.term.clock.wall()
        held = await self.term.change(name, lambda h: ownership.started(
            h, epoch=record.epoch, node=node, leader=self.term.leader, now=now,
            reason=f"{node.record.host} is back and still has it"))
        if held.record.move is not None or seen.get("state") == "paused":
            move = held.record.move.id if held.record.move else ""
            await self.commands.suggest(node.record.host, "move.settle", {"session": name, "move": move},
                                    epoch=record.epoch)
        return held

    async def go_on(self, held: Held) -> None:
        """Finish an interrupted start or recovery; its owner may have completed it meanwhile."""
        name, record = held.record.name, held.record
        if await self.returned(name) is None:
            # The reason of the loss, not of the wait: each attempt records that anew.
            why = record.failures[-1].reason if record.failures else "its start was interrupted"
            await self.run(name, why, asked=record.state == "starting")

    # -- one start ----------------------------------------------------------------
    async def _place(self, held: Held, attempt: Attempt) -> tuple[Held, Node, Choice] | None:
        """Write another owner at epoch + 1 into the record and return it; None: the session waits."""
        old = held.record
        async with self.records.placing:
            try:
                choice = await self._choose(held, attempt)
                node = await self.records.node(choice.host)
                if node is None:
                    raise Refused(f"{choice.host} has just left the pool")
                fault("recovery.place")
                held = await self.term.apply(self._decide(held, node, choice, attempt))
            except Fenced:
                raise
            except (Refused, NotFound) as error:
                if old.parked is not None:
                    return None  # it stays parked: the queue tries again
                await self._wait(held, attempt, f"{attempt.why}; {error.message}")
                return None
        fault("recovery.place.done")
        attempt.failure = None  # it is on record now
        before = old.parked.host if old.parked else old.owner
        if before not in (None, choice.host):
            await self.commands.suggest(before, "worker.forget", {"session": old.name, "epoch": old.epoch,
                                    "reason": attempt.why}, epoch=held.record.epoch, timeout=2.0)
        return held, node, choice

    def _decide(self, held: Held, node: Node, choice: Choice, attempt: Attempt) -> Decision:
        leader, now, reason = self.term.leader, self.term.clock.wall(), f"{attempt.why}; {choice.reason}"
        if held.record.parked is not None:
            return ownership.resume(held, epoch=held.record.epoch, node=node, device=choice.device, leader=leader,
                                    now=now, reason=reason)
        return ownership.recover(held, epoch=held.record.epoch, node=node, device=choice.device,
                                 failure=attempt.failure, leader=leader, now=now, checkpoint=attempt.checkpoint,
                                 reason=reason)

    async def _choose(self, held: Held, attempt: Attempt) -> Choice:
        """Choose the same device again if that is allowed and possible, else the best one."""
        record, snapshot = held.record, await self.records.snapshot()
        failures = losses.count_failure(record, attempt.failure) if attempt.failure else record.failures
        forbidden = losses.barred(record, failures)
        avoid: set[Place] = {(forbidden[0], one) for one in parts(forbidden[1])} if forbidden else set()

        def request(host: str | None, device: str | None) -> Request:
            return request_for(record, host=host, device=device, avoid=avoid, avoid_hosts=attempt.failed_hosts)

        if attempt.host is not None:
            return place(snapshot, request(attempt.host, attempt.device))
        if attempt.failure is not None:
            try:
                return place(snapshot, request(record.owner, record.device))
            except (Refused, NotFound):
                pass
        try:
            return place(snapshot, request(None, None))
        except (Refused, NotFound):
            if not avoid or not losses.only_avoided(record, failures):
                raise
        avoid.clear()
        return place(snapshot, request(None, None))

    async def _start(self, held: Held, node: Node, choice: Choice, attempt: Attempt) -> Held | None:
        record = held.record
        args = {"session": record.name, "epoch": record.epoch, "quota": record.quota, "device": choice.device,
                "image": record.checkpoint.name if record.checkpoint else None, "recover": record.recover}
        fault("recovery.start")
        try:
            result = await self.commands.tell(choice.host, "worker.start", args, epoch=record.epoch,
                                              timeout=CHECKPOINT_SECONDS, tries=2)
        except Fenced as error:
            if await self._over(record.name, record.epoch):
                return None
            raise error
        except (StoreUnreachable, StoreDenied, StoreFull) as error:  # only that host's store fails: no data are lost
            log.warning("a start failed", session=record.name, host=choice.host, reason=error.message)
            attempt.failed_hosts.add(choice.host)
        except CONTENT_ERRORS as error:
            attempt.failure = Failure(host=choice.host, device=choice.device, when=self.term.clock.wall(),
                                      reason=f"its start failed: {error.message}"[:MAX_TEXT], epoch=record.epoch)
        except (LinkError, TimedOut, RgpuError) as error:
            log.warning("a start failed", session=record.name, host=choice.host, reason=error.message)
            attempt.failed_hosts.add(choice.host)
        else:
            fault("recovery.start.done")
            return await self.term.change(record.name, lambda h: ownership.started(
                h, epoch=record.epoch, node=node, leader=self.term.leader, now=self.term.clock.wall(),
                reason=f"{attempt.why}; on {choice.host} from position {result.get('position', 0)}{_warned(result)}"))
        attempt.why = f"{attempt.why}; {choice.host} could not start it"
        return None

    async def _over(self, name: str, epoch: int) -> bool:
        """Whether a node refused only because the session's record has changed."""
        held = await self.records.find(name)
        return held is None or held.record.epoch != epoch

    # -- no start -------------------------------------------------------------------
    async def _wait(self, held: Held, attempt: Attempt, why: str) -> None:
        """Have the session wait. Its epoch stays, so that a returning owner can continue."""
        if held.record.state == "recovering" and attempt.failure is None and held.record.reason == why:
            return
        await self.term.change(held.record.name, lambda h: ownership.lost(
            h, epoch=held.record.epoch, failure=attempt.failure, leader=self.term.leader,
            now=self.term.clock.wall(), reason=why))
        attempt.failure = None

    async def _give_up(self, held: Held, why: str) -> None:
        log.error("given up", session=held.record.name, why=why)
        owner, epoch = held.record.owner, held.record.epoch
        await self.term.change(held.record.name, lambda h: ownership.fail(
            h, epoch=epoch, leader=self.term.leader, now=self.term.clock.wall(), reason=why))
        await self.commands.suggest(owner, "session.drop", {"session": held.record.name, "reason": why}, epoch=epoch)


def _warned(result: dict[str, Any]) -> str:
    """Return a start's warnings about checkpoints that it could not use."""
    return "".join(f"; {text}" for text in result.get("warnings") or [])[:2000]
