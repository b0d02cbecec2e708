"""A source's daemon competes for the record by abort (OWNERSHIP 2): what it tells the worker, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.migrate.records.keys import session_key
from rgpu.migrate.records.schema import MoveRecord, SessionRecord, decode, encode
from rgpu.migrate.registry.base import Put
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.server.node.pool.reconciler import Reconciler
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.pool.trust import RegistryTrust
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.session.errors import PoolUnavailable, UnknownOutcome

KEY = session_key("s")


def moving(state: str, owner: str = "a", epoch: int = 1) -> SessionRecord:
    move = MoveRecord(id="m", source="a", destination="b", destination_incarnation=7, device="cpu:0",
                      state=state)  # type: ignore[arg-type]
    return SessionRecord(name="s", state="moving" if state in ("preparing", "ready") else "running", owner=owner,
                         incarnation=5, epoch=epoch, quota=1, agent="", device="cpu:0", move=move)


class Counting:
    """The real registry; counts what is asked of it, and may break an answer. ``deaf``: what it raises then."""

    def __init__(self, inner: EmbeddedRegistry) -> None:
        self.inner, self.asked, self.deaf = inner, [], None
        self.applied = True  #: of a transaction whose answer is lost

    async def get(self, key: str) -> Any:
        self.asked.append("get")
        return await self.inner.get(key)

    async def txn(self, compares: Any, operations: Any) -> Any:
        self.asked.append("txn")
        if self.deaf is None:
            return await self.inner.txn(compares, operations)
        if self.applied:
            await self.inner.txn(compares, operations)
        raise self.deaf


class Host:
    """Node a, whose worker has offered the session."""

    def __init__(self, inner: EmbeddedRegistry) -> None:
        self.registry = Counting(inner)
        self.told: list[tuple[str, str]] = []
        self.closed, self.session, self.pid = asyncio.Event(), "s", 1
        worker: Any = self
        self.held = HeldSessions("a", running={"s": worker}, epochs={"s": 1}, paused={"s": "m"})
        identity: Any = SimpleNamespace(host="a", incarnation=5)
        records = PoolRecords(lambda record: None)
        records.registry = self.registry  # type: ignore[assignment]
        reports: Any = SimpleNamespace()
        self.reconciler = Reconciler(identity, records, self.held, RegistryTrust(records), reports,
                                     lambda work: work.close())

    async def request(self, do: str, **values: Any) -> None:
        """The worker is told something; it goes when it is forgotten."""
        self.told.append((do, values.get("outcome", "")))
        if do == "forget":
            self.closed.set()

    async def put(self, record: SessionRecord) -> None:
        await self.registry.inner.txn([], [Put(KEY, encode(record))])

    async def record(self) -> SessionRecord:
        entry = await self.registry.inner.get(KEY)
        assert entry is not None
        return decode(entry.value, SessionRecord, KEY)

    async def withdraw(self) -> list[tuple[str, str]]:
        self.told.clear()
        self.registry.asked.clear()
        await self.reconciler.withdraw("s", "m", "no commit came within the promised 0.50 s")
        return list(self.told)


def run(folder: Path, test: Callable[[Host], Awaitable[None]]) -> None:
    async def body() -> None:
        inner = await EmbeddedRegistry.open(folder / "registry.db")
        try:
            await test(Host(inner))
        finally:
            await inner.close()

    asyncio.run(body())


@pytest.mark.parametrize("state", ["preparing", "ready"])
def test_an_abort_before_any_commit_wins(state: str, tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        await host.put(moving(state))
        assert await host.withdraw() == [("withdrawn", "won")] and host.held.paused == {}
        record = await host.record()
        assert (record.state, record.owner, record.epoch) == ("running", "a", 1) and record.move is not None
        assert record.move.state == "aborted" and record.move.reason == "no commit came within the promised 0.50 s"
        assert await host.withdraw() == [("withdrawn", "lost")], "asked again: the record says the rest"

    run(tmp_path, test)


def test_one_round_trip_where_the_record_was_read_before(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        await host.put(moving("ready"))
        await host.reconciler.reconcile(session="s", move="m")
        assert await host.withdraw() == [("withdrawn", "won")] and host.registry.asked == ["txn"]

    run(tmp_path, test)


def test_what_changed_since_is_read_and_compared_again(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        await host.put(moving("preparing"))
        await host.reconciler.reconcile(session="s", move="m")
        await host.put(moving("ready"))
        assert await host.withdraw() == [("withdrawn", "won")] and host.registry.asked == ["txn", "get", "txn"]

    run(tmp_path, test)


def test_a_commit_that_came_first_is_obeyed(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        await host.put(moving("ready"))
        await host.reconciler.reconcile(session="s", move="m")
        await host.put(moving("committed", "b", 2))
        assert await host.withdraw() == [("withdrawn", "lost")] and host.held.paused == {"s": "m"}
        assert (await host.record()).move.state == "committed"  # type: ignore[union-attr]
        host.told.clear()
        await host.reconciler.read_for("s", "m")
        assert host.told == [("forget", "")]

    run(tmp_path, test)


@pytest.mark.parametrize("applied", [True, False])
def test_an_unknown_outcome_is_told_as_such_and_read_back(applied: bool, tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        await host.put(moving("ready"))
        host.registry.deaf, host.registry.applied = UnknownOutcome("no answer"), applied
        assert await host.withdraw() == [("withdrawn", "unknown")] and host.held.paused == {"s": "m"}
        host.registry.deaf = None
        host.told.clear()
        await host.reconciler.read_for("s", "m")
        assert host.told == [("resume" if applied else "undecided", "")]

    run(tmp_path, test)


def test_a_registry_that_is_away_decides_nothing(tmp_path: Path) -> None:
    async def test(host: Host) -> None:
        await host.put(moving("ready"))
        host.registry.deaf, host.registry.applied = PoolUnavailable("away"), False
        assert await host.withdraw() == [("withdrawn", "unknown")]
        assert (await host.record()).move.state == "ready"  # type: ignore[union-attr]

    run(tmp_path, test)
