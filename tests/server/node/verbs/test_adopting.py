"""`rgpu pool adopt` carried out over nodes that are objects: order, refusals, being broken off and done again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.link.control import Request
from rgpu.link.keys import Endpoint, PoolFiles
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.records.keys import NODES, member_key, node_key, session_key
from rgpu.migrate.records.schema import NodeRecord, SessionRecord, decode, encode
from rgpu.migrate.registry.base import Put
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.server.node.commands.adopting import AdoptCommands
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.identity import Identity
from rgpu.server.node.pool import memory
from rgpu.server.node.pool.memory import RecordMemory
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.pool.trust import RegistryTrust, pause
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.verbs import registry_repair
from rgpu.server.node.verbs.registry_repair import RegistryRepair
from rgpu.session.errors import PoolUnavailable, Refused

WENT_BACK = "the registry went back from revision 90 to 50"


class Registry:
    """The embedded one, as a node sees it that does not believe it."""

    def __init__(self, inner: EmbeddedRegistry) -> None:
        self.inner, self.mistrust = inner, WENT_BACK

    async def revision(self) -> int:
        if self.mistrust:
            raise PoolUnavailable(self.mistrust)
        return await self.inner.revision()

    def believe(self, cluster: str, revision: int) -> None:
        assert cluster == self.inner.cluster_id and revision > 0
        self.mistrust = ""

    def distrust(self, reason: str) -> None:
        self.mistrust = reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Worker:
    """The handle of one."""

    def __init__(self, session: str, refresh: Any, request: Any) -> None:
        self.session, self.pid, self.refresh, self.request, self.closed = session, 1, refresh, request, asyncio.Event()


class Host:
    """A node, and the repair that it is asked for. ``told``: what it did, in order, with all others'."""

    def __init__(self, name: str, number: int, files: PoolFiles, inner: EmbeddedRegistry, told: list[str]) -> None:
        self.host, self.files, self.told = name, files, told
        self.directory = files.root / "nodes" / name
        self.registry = Registry(inner)
        self.others: dict[str, Host] = {}
        self.silent = False
        self.held = HeldSessions(name)
        self.memory = RecordMemory(name, self.directory, self.held.here)
        self.records = PoolRecords(self.memory.remember)
        self.records.registry = self.registry  # type: ignore[assignment]
        self.trust = RegistryTrust(self.records)
        self.fence = LeaderFence(name, self.records.leader)
        self.fence.begin(("a", 900))
        keys: Any = SimpleNamespace(public=f"{name:k<40s}")
        self.adopting = AdoptCommands(Identity(name, number, keys, self.directory), self.held, self.memory, self.trust,
                                      self.fence, self._believed, self.trust.mending)
        self.number, self.peers = number, SimpleNamespace(at=self.peer)
        self.repair = RegistryRepair(name, files.registry_address(), self.adopting, self.peers,  # type: ignore[arg-type]
                                     self.records.endpoints, files)

    def hold(self, record: SessionRecord, epoch: int | None = None) -> None:
        view = {"epoch": record.epoch, "state": "running", "attached": True, "position": 7}

        async def refresh() -> dict[str, Any]:
            return view

        async def request(do: str, **values: Any) -> dict[str, Any]:
            """The worker is told something."""
            if do == "adopt":
                self.told.append(f"{self.host} raises {record.name} to {values['epoch']}")
            else:
                self.told.append(f"{self.host} {do}s {record.name}")
                worker.closed.set()
            return {}

        worker: Any = Worker(record.name, refresh, request)
        self.held.running[record.name] = worker
        self.held.epochs[record.name] = record.epoch if epoch is None else epoch
        self.memory.remember(record)

    async def _believed(self) -> tuple[str, int]:
        """A node that believes again registers itself; who leads then has a lower revision."""
        assert not self.registry.mistrust
        record = NodeRecord(host=self.host, incarnation=self.number, control="tcp://x", data="x:1")
        await self.registry.inner.txn([], [Put(node_key(self.host), encode(record))])
        self.told.append(f"{self.host} believes")
        return "b", 12

    def peer(self, endpoint: Endpoint) -> Any:
        other = self.others[endpoint.host]

        async def call(verb: str, args: dict[str, Any], timeout: float) -> Any:
            assert verb == "node.command" and timeout > 0
            if other.silent:
                raise PoolUnavailable(f"{other.host} does not answer")
            return await {"node.holdings": other.adopting.holdings, "node.adopt": other.adopting.adopt}[
                args["verb"]](**args["args"])

        return SimpleNamespace(call=call)

    async def ask(self, **args: Any) -> dict[str, Any]:
        async def nothing(values: dict[str, Any]) -> None: ...

        request = Request("pool.adopt", args, "operator", "operator", "key", 0, 0, "", nothing)
        return await self.repair.adopt(request)


def session(name: str, owner: str, incarnation: int, epoch: int, state: str = "running") -> SessionRecord:
    return SessionRecord(name=name, state=state, owner=owner, incarnation=incarnation, epoch=epoch, quota=1 << 20,  # type: ignore[arg-type]
                         agent="agent", device="cpu:0")


class Pool:
    def __init__(self, files: PoolFiles, inner: EmbeddedRegistry) -> None:
        self.inner, self.told = inner, list[str]()
        self.hosts = {name: Host(name, number, files, inner, self.told)
                      for number, name in enumerate(("node-a", "node-b"), 1)}
        self.a, self.b = self.hosts.values()
        for host in self.hosts.values():
            host.others = self.hosts

    async def put(self, record: SessionRecord) -> None:
        await self.inner.txn([], [Put(session_key(record.name), encode(record))])

    async def get(self, name: str) -> SessionRecord:
        entry = await self.inner.get(session_key(name))
        assert entry is not None
        return decode(entry.value, SessionRecord, entry.key)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Pool], Awaitable[None]]], None]:
    files = PoolFiles(tmp_path / "pool")
    description = files.create()
    description.endpoints = [Endpoint("tcp://x", "k" * 40, name) for name in ("node-a", "node-b")]
    files.write_description(description)
    monkeypatch.setattr(registry_repair, "RETURN_SECONDS", 3.0)

    def go(test: Callable[[Pool], Awaitable[None]]) -> None:
        async def body() -> None:
            inner = await EmbeddedRegistry.open(files.root / "registry.db")
            try:
                await test(Pool(files, inner))
            finally:
                await inner.close()

        asyncio.run(body())

    return go


def test_workers_first_then_records_then_belief(run: Any) -> None:
    async def test(pool: Pool) -> None:
        await pool.put(session("moved", "node-a", 1, 3))
        await pool.put(session("stays", "node-a", 1, 2))
        pool.b.hold(session("moved", "node-b", 2, 4))
        pool.b.hold(session("new", "node-b", 2, 1))
        pool.a.hold(session("stays", "node-a", 1, 2))
        before = await pool.inner.revision()
        shown = await pool.a.ask()
        assert shown["done"] is False and WENT_BACK in shown["went_back"] and shown["problems"] == []
        assert {step["session"]: (step["action"], step["host"], step["epoch"]) for step in shown["steps"]} == {
            "moved": ("own", "node-b", 5), "new": ("own", "node-b", 2), "stays": ("keep", "node-a", 2)}
        assert await pool.inner.revision() == before and pool.told == [], "a dry run changes nothing"

        done = await pool.a.ask(yes=True)
        assert done["done"] and done["away"] == [] and done["paused"] is False
        assert sorted(pool.told[:2]) == ["node-b raises moved to 5", "node-b raises new to 2"]
        assert {"node-a believes", "node-b believes"} == set(pool.told[2:])
        assert all((host.fence.leader, host.fence.highest) == ("b", 12) for host in pool.hosts.values())
        for name, epoch in (("moved", 5), ("new", 2)):
            record = await pool.get(name)
            assert (record.owner, record.incarnation, record.epoch, record.state) == ("node-b", 2, epoch, "running")
        assert await pool.get("stays") == session("stays", "node-a", 1, 2)
        assert (await pool_record(pool.inner)).paused is False
        assert await pool.inner.get(member_key("node-node-b")) is not None, "let in again"
        assert (await pool.b.ask(yes=True))["went_back"] == ""

    run(test)


def test_nothing_is_done_while_something_is_to_be_decided(run: Any) -> None:
    async def test(pool: Pool) -> None:
        pool.a.hold(session("s", "node-a", 1, 3))
        pool.b.hold(session("s", "node-b", 2, 4))
        before = await pool.inner.revision()
        with pytest.raises(Refused, match="claimed twice"):
            await pool.a.ask(yes=True)
        assert pool.told == [] and await pool.inner.revision() == before
        done = await pool.a.ask(yes=True, keep={"s": "node-b"})
        assert done["done"] and pool.told[:2] == ["node-a forgets s", "node-b raises s to 5"]
        assert (await pool.get("s")).owner == "node-b"

    run(test)


def test_a_silent_host(run: Any) -> None:
    async def test(pool: Pool) -> None:
        await pool.put(session("s", "node-b", 2, 3))
        pool.b.silent = True
        with pytest.raises(Refused, match="node-b does not answer"):
            await pool.a.ask(yes=True)
        done = await pool.a.ask(yes=True, without=["node-b"])
        assert done["done"] and (await pool.get("s")).state == "recovering"

    run(test)


def test_broken_off_it_is_done_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker was raised and no record written: the next run goes above that, and resumes automation."""
    async def test(pool: Pool) -> None:
        await pool.put(session("s", "node-a", 1, 3))
        pool.b.hold(session("s", "node-b", 2, 4))
        write = registry_repair.Mending._write

        async def broken(self: Any, step: Any) -> None:
            raise PoolUnavailable("etcd went away")

        monkeypatch.setattr(registry_repair.Mending, "_write", broken)
        with pytest.raises(PoolUnavailable):
            await pool.a.ask(yes=True)
        assert (await pool_record(pool.inner)).paused is True and pool.b.registry.mistrust
        monkeypatch.setattr(registry_repair.Mending, "_write", write)
        assert (await pool.a.ask(yes=True))["paused"] is False
        assert pool.b.held.epochs["s"] == 6 == (await pool.get("s")).epoch
        assert (await pool_record(pool.inner)).paused is False

    run(test)


def test_what_was_paused_stays_so_and_who_is_not_back_is_named(run: Any) -> None:
    async def test(pool: Pool) -> None:
        await pause(pool.inner, True, "by hand")
        pool.b.hold(session("s", "node-b", 2, 4))
        assert (await pool.a.ask(yes=True))["paused"] is True
        assert (await pool_record(pool.inner)).reason == "by hand"
        for host in pool.hosts.values():
            host.registry.mistrust = WENT_BACK
        await pool.inner.txn([], [])
        listed = await pool.inner.list(NODES)
        assert len(listed.entries) == 2

    run(test)


def test_a_record_is_remembered_over_a_restart(run: Any) -> None:
    async def test(pool: Pool) -> None:
        folder = pool.b.directory / "workers" / "s@2"
        folder.mkdir(parents=True)
        pool.b.hold(session("s/2", "node-b", 2, 4))
        pool.b.memory.remember(session("s/2", "node-b", 2, 3))  # an older one changes nothing
        again = Host("node-b", 9, pool.b.files, pool.inner, pool.told)
        again.held.running.update(pool.b.held.running)
        again.held.epochs.update(pool.b.held.epochs)
        (held,) = (await again.adopting.holdings())["holdings"]
        assert held["epoch"] == 4 and held["record"]["owner"] == "node-b" and held["attached"] is True
        (folder / "record").write_bytes(b"\xc1")
        third = Host("node-b", 9, pool.b.files, pool.inner, pool.told)
        third.held.running.update(pool.b.held.running)
        third.held.epochs.update(pool.b.held.epochs)
        assert (await third.adopting.holdings())["holdings"][0]["record"] is None

    run(test)


def test_an_epoch_above_the_registry_s_own_pauses_automation(run: Any) -> None:
    async def test(pool: Pool) -> None:
        pool.a.registry.mistrust = ""
        assert await pool.a.trust.doubt("node-a holds s at epoch 4, and the registry says 3")
        record = await pool_record(pool.inner)
        assert record.paused and "rgpu pool adopt" in record.reason and pool.a.registry.mistrust
        pool.a.records.registry = pool.inner
        assert not await pool.a.trust.doubt("the embedded one"), "is never doubted"

    run(test)


def test_agents_words_are_bounded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pool: Pool) -> None:
        monkeypatch.setattr(memory, "SEEN_LIMIT", 3)
        for epoch in (4, 9, 6, True, "7", None, -1, 2**63, 2**41):
            pool.a.memory.saw("s", "agent", epoch)
        for number in range(5):
            pool.a.memory.saw(f"other-{number}", "agent", 1)
        pool.a.memory.saw("s", "agent", 2)
        seen = (await pool.a.adopting.holdings())["seen"]
        assert len(seen) == 3 and ["s", "agent", 2] in [list(row) for row in seen]

    run(test)
