"""A pool for coordinator tests: the real embedded registry, fake nodes that keep the nodes' rules, faults at will."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.leader.nodes import Progress
from rgpu.migrate.membership.election import current_leader
from rgpu.migrate.records import ownership
from rgpu.migrate.records.keys import LEADER, node_key, session_key
from rgpu.migrate.records.ownership import Held, Leader
from rgpu.migrate.records.reconcile import Holding, reconcile
from rgpu.migrate.records.schema import DeviceRecord as Device
from rgpu.migrate.records.schema import HistoryRecord, LeaderRecord, NodeRecord, SessionRecord, decode, encode
from rgpu.migrate.registry.base import Delete, Put, Registry, absent
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.session.errors import Fenced, LimitReached, LinkError, MoveFailed, NotFound, Refused, RgpuError
from tests.support.leader.gates import FakeGates

GIB = 1 << 30


@dataclass
class Worker:
    """A session's GPU side at one node. ``holds``: running, paused, incoming."""

    holds: str
    epoch: int
    position: int = 0
    move: str = ""
    verified: bool = False
    attached: bool = False


@dataclass
class Fault:
    """``when``: before (not done, error), after (done, error), lost (done, LinkError), dead (not done, LinkError)."""

    verb: str
    when: str
    host: str = ""
    error: RgpuError | None = None
    action: Callable[[], Awaitable[None]] | None = None  #: instead of an error


@dataclass
class FakeNode:
    pool: FakePool
    record: NodeRecord
    workers: dict[str, Worker] = field(default_factory=dict)
    incoming: dict[str, Worker] = field(default_factory=dict)
    leader: int = 0
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    lease: int = 0
    alive: bool = True
    pins: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)  #: names of keys that it was told to let in no more
    options: list[dict[str, Any]] = field(default_factory=list)  #: of each move sent from here
    replay_fails: bool = False
    store_used_up: bool = False  #: by the users of sessions here, for checkpoints that their quotas bound

    @property
    def host(self) -> str:
        return self.record.host

    async def do(self, verb: str, args: dict[str, Any], leader: int, command_id: str) -> dict[str, Any]:
        if leader < self.leader:
            raise Fenced(f"{self.host} obeys leader {self.leader}; {leader} is over")
        self.leader = leader
        if command_id not in self.results:
            handler = getattr(self, verb.replace(".", "_").replace("-", "_"))
            self.results[command_id] = await handler(**args)
        return self.results[command_id]

    async def keys_forget(self, keys: dict[str, str]) -> dict[str, Any]:
        self.forgotten += keys.values()
        return {}

    async def worker_start(self, session: str, epoch: int, quota: int, device: str, image: str | None,
                           recover: bool) -> dict[str, Any]:
        old = self.workers.get(session)
        if old is not None and old.epoch >= epoch:
            raise Fenced(f"{session} is at epoch {old.epoch} here")
        self.workers[session] = Worker("running", epoch, position=self.pool.checkpoints.get(image or "", 0))
        return {"position": self.workers[session].position, "worker_pid": 1}

    async def worker_describe(self, session: str, forecast: bool = False, moving: bool = False) -> dict[str, Any]:
        worker = self._worker(session)
        return {"state": worker.holds, "epoch": worker.epoch, "position": worker.position, "pins": self.pins,
                "attached": worker.attached, **self.pool.gates.describe(session)}

    async def worker_forget(self, session: str, epoch: int, reason: str) -> dict[str, Any]:
        worker = self.workers.get(session)
        if worker is not None and worker.epoch <= epoch:
            del self.workers[session]
        return {}

    async def move_receive(self, session: str, move: str, epoch: int, quota: int, device: str,
                           source: str) -> dict[str, Any]:
        self.incoming[session] = Worker("incoming", epoch, move=move)
        return {"address": [self.host, 1], "ticket": b"t", "secret": b"s"}

    async def move_send(self, session: str, move: str, address: list[Any], ticket: bytes, secret: bytes,
                        options: dict[str, Any], wishes: dict[str, Any], host: str) -> dict[str, Any]:
        worker = self._worker(session)
        assert options == wishes, "the name of them in 0.1"
        self.options.append(options)
        if self.replay_fails and options["mode"] != "copy":
            raise MoveFailed("the replay was given up: on purpose", replay=True, mismatched=0.75)
        if worker.holds != "running":
            raise Refused(f"{session} is {worker.holds}")
        target = self.pool.nodes[host].incoming.get(session)
        if target is None or target.move != move or not self.pool.nodes[host].alive:
            raise LinkError(f"{host} does not answer")
        worker.holds, worker.move = "paused", move
        target.verified, target.position = True, worker.position
        return {"rounds": 2, "pages_total": 10, "pages_sent": 12, "bytes_sent": 1234, "verified": True,
                "position": worker.position, "pause_ms": 5.0}

    async def move_settle(self, session: str, move: str) -> dict[str, Any]:
        record = await self.pool.find(session)
        done = "nothing"
        for kind in (self.incoming, self.workers):
            worker = kind.get(session)
            if worker is None:
                continue
            decided = reconcile(record, Holding(self.host, self.record.incarnation, worker.holds, worker.epoch,  # type: ignore[arg-type]
                                             worker.move))
            done = decided.action
            if decided.action == "activate":
                assert worker.verified, "activated what was never verified"
                self.workers[session] = Worker("running", decided.epoch, worker.position)
                del self.incoming[session]
                break
            if decided.action in ("forget", "discard"):
                del kind[session]
            elif decided.action == "resume":
                worker.holds = "running"
        return {"done": done}

    async def session_cut(self, session: str, do: str, cut: str, **about: Any) -> dict[str, Any]:
        if do not in ("open", "give_up"):
            self._worker(session)
        return self.pool.gates.told(session, do, cut, **about)

    async def session_image(self, session: str, image: str, limited: bool, cut: str = "") -> dict[str, Any]:
        worker = self._worker(session)
        if limited and self.store_used_up:
            raise LimitReached("alice may have 1 GiB of checkpoints", limit="checkpoints")
        if cut:
            await self.pool.gates.moment(session, cut)
        self.pool.checkpoints[image] = worker.position
        return {"image": image, "position": worker.position, "pages": 3, "bytes": 300,
                **self.pool.gates.result(session)}

    async def session_notice(self, session: str, epoch: int, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        self.pool.notices.append((session, kind, values))
        return {}

    async def session_drop(self, session: str, reason: str) -> dict[str, Any]:
        self.workers.pop(session, None)
        self.incoming.pop(session, None)
        return {}

    def _worker(self, session: str) -> Worker:
        if session not in self.workers:
            raise NotFound(f"session {session} is not on {self.host}")
        return self.workers[session]


class FakePool:
    """NodeCommands over fake nodes. ``faults`` are used up in order."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.nodes: dict[str, FakeNode] = {}
        self.faults: list[Fault] = []
        self.checkpoints: dict[str, int] = {}
        self.gates = FakeGates()
        self.notices: list[tuple[str, str, dict[str, Any]]] = []
        self.said: list[tuple[str, str]] = []
        self.ids: dict[str, int] = {}
        self._incarnations = itertools.count(1000)

    async def add(self, host: str, *, memory: int = 8 * GIB, devices: int = 1, capability: tuple[int, int] = (7, 5),
                  driver: int = 13000, kind: str = "cpu", incarnation: int | None = None) -> FakeNode:
        record = NodeRecord(
            host=host, incarnation=incarnation or next(self._incarnations), control=f"tcp://{host}:1",
            data=f"{host}:2", devices=[Device(device=f"{kind}:{n}", memory=memory, compute_capability=capability,
                                              driver_version=driver) for n in range(devices)])
        old = self.nodes.get(host)
        node = self.nodes[host] = FakeNode(self, record)
        if old is not None and incarnation is not None:
            node.workers, node.incoming = old.workers, old.incoming
        await self.register(node)
        return node

    async def register(self, node: FakeNode) -> None:
        node.lease = await self.registry.lease_grant(600)
        node.alive = True
        await self.registry.put_if(absent(node_key(node.host)), encode(node.record), node.lease)

    async def kill(self, host: str) -> None:
        """kill -9 of the whole node: its workers, its answers, and after a while its lease."""
        node = self.nodes[host]
        node.alive = False
        node.workers.clear()
        node.incoming.clear()
        await self.registry.lease_revoke(node.lease)

    async def cut_off(self, host: str) -> None:
        """The node lives on, but neither registry nor leader reach it."""
        self.nodes[host].alive = False
        await self.registry.lease_revoke(self.nodes[host].lease)

    async def change(self, host: str, **values: Any) -> None:
        node = self.nodes[host]
        node.record = node.record.replace(**values)
        await self.registry.txn([], [Put(node_key(host), encode(node.record), node.lease)])

    async def command(self, host: str, verb: str, args: dict[str, Any], *, leader: int, epoch: int, command_id: str,
                      timeout: float, on_progress: Progress | None = None) -> dict[str, Any]:
        self.said.append((host, verb))
        fault = next((f for f in self.faults if f.verb == verb and f.host in ("", host)), None)
        if fault is not None:
            self.faults.remove(fault)
            if fault.when in ("before", "dead"):
                await self._fail(fault)
        node = self.nodes.get(host)
        if node is None:
            raise NotFound(f"no host {host}")
        if not node.alive:
            raise LinkError(f"{host} does not answer")
        result = await node.do(verb, args, leader, command_id)
        if fault is not None and fault.when in ("after", "lost"):
            await self._fail(fault)
        if on_progress is not None:
            on_progress({"phase": "copying"})
        return result

    @staticmethod
    async def _fail(fault: Fault) -> None:
        if fault.action is not None:
            await fault.action()
        elif fault.when in ("lost", "dead"):
            raise LinkError(f"{fault.verb}: no answer")
        else:
            raise fault.error or RgpuError(f"{fault.verb} failed on purpose")

    # -- looking --------------------------------------------------------------------
    async def find(self, name: str) -> SessionRecord | None:
        entry = await self.registry.get(session_key(name))
        return decode(entry.value, SessionRecord, entry.key) if entry else None

    async def record(self, name: str) -> SessionRecord:
        found = await self.find(name)
        assert found is not None
        return found

    def serving(self, name: str) -> list[tuple[str, int]]:
        """(host, epoch) of every worker that would serve an agent."""
        return sorted((node.host, node.workers[name].epoch) for node in self.nodes.values()
                      if name in node.workers and node.workers[name].holds == "running")

    async def owned_once(self, name: str) -> SessionRecord:
        """Exactly one worker serves the highest epoch, it is the record's owner, and nothing is left over."""
        record = await self.record(name)
        serving = self.serving(name)
        assert record.state == "running", record
        top = [(host, epoch) for host, epoch in serving if epoch == max(e for _, e in serving)]
        assert top == [(record.owner, record.epoch)], f"{serving}; the record says {record.owner} {record.epoch}"
        return record

    async def history(self, name: str) -> list[str]:
        entries = (await self.registry.list(f"history/{name}/@")).entries
        return [decode(entry.value, HistoryRecord, entry.key).decision for entry in entries]


async def elect(registry: Registry, host: str) -> Leader:
    """A leader, in place of the one before."""
    if await registry.get(LEADER) is not None:
        await registry.txn([], [Delete(LEADER)])
    await registry.txn([absent(LEADER)], [Put(LEADER, encode(LeaderRecord(host=host, incarnation=1)))])
    found = await current_leader(registry)
    assert found is not None
    return found[1]


@dataclass
class World:
    """A pool of three nodes with a leader."""

    registry: EmbeddedRegistry
    pool: FakePool
    coordinator: Coordinator

    async def session(self, name: str = "s", host: str = "a", **values: Any) -> SessionRecord:
        values.setdefault("quota", GIB)
        return await self.coordinator.create_session(name, agent="key", host=host, **values)

    async def another_leader(self, host: str = "other", node_ttl: float = 0.05) -> Coordinator:
        leader = await elect(self.registry, host)
        return Coordinator(self.registry, self.pool, leader, node_ttl=node_ttl)

    async def take_over(self) -> None:
        """The next leader finishes what is unfinished."""
        self.coordinator = await self.another_leader()
        await self.coordinator.resume_unfinished()


def run(folder: Path, test: Callable[[World], Awaitable[None]], nodes: str = "abc", **node: Any) -> None:
    """One test in one loop."""
    async def body() -> None:
        registry = await EmbeddedRegistry.open(folder / "registry.db")
        try:
            pool = FakePool(registry)
            for host in nodes:
                await pool.add(host, **node)
            coordinator = Coordinator(registry, pool, await elect(registry, "a"), node_ttl=0.05)
            await asyncio.wait_for(test(World(registry, pool, coordinator)), 60)
        finally:
            await registry.close()

    asyncio.run(body())


def held(record: SessionRecord, revision: int = 10) -> Held:
    """A record as if read."""
    return Held(record, revision)


__all__ = ["GIB", "Device", "FakePool", "Fault", "World", "elect", "held", "ownership", "run"]
