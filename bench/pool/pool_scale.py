#!/usr/bin/env python3
"""How large a pool one etcd carries: 1,000 node daemons and 10,000 sessions on loopback.

    python bench/pool/pool_scale.py [--nodes N] [--sessions N] [--processes N] [--seconds S] [--lease S]
                               [--rates R,R,…] [--output FILE]

Real: the etcd (one member), the registry's client, the records, and the coordinator that leads. Simulated: the nodes
(bench/pool/pool_nodes.py), of which few processes play many, and the sessions, which are records. At each rate that
many changes of session records a second are asked for (a checkpoint named: record and history in one transaction,
compared with the revision read and with the election, as the coordinator does it), for S seconds; measured are what was
reached, its latency, the lag of every node's watch, and what etcd and coordinator use. Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.pool.pool_nodes import PROBE  # noqa: E402
from rgpu.migrate.leader.coordinator import Coordinator  # noqa: E402
from rgpu.migrate.records import ownership  # noqa: E402
from rgpu.migrate.records.keys import LEADER, session_key  # noqa: E402
from rgpu.migrate.records.ownership import Held, Leader  # noqa: E402
from rgpu.migrate.records.schema import (  # noqa: E402
    CheckpointName,
    LeaderRecord,
    Needs,
    Program,
    SessionRecord,
    encode,
)
from rgpu.migrate.registry.base import Put, absent, txn_certain  # noqa: E402
from rgpu.migrate.registry.etcd.registry import EtcdRegistry  # noqa: E402
from rgpu.session.errors import RgpuError, UnknownOutcome  # noqa: E402
from tests.support.registry.etcd_cluster import EtcdCluster  # noqa: E402

WRITERS = 64  #: changes under way at a time, at most
BATCH = 50  #: session records put in one transaction while the pool is filled
PROBE_SECONDS = 1.0
LEADING_SECONDS = 10.0


def quantile(values: Sequence[float], share: float) -> float | None:
    """Milliseconds; None without a value."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 2) if ordered else None


class Process:
    """What the kernel says of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._cpu, self._at = self.cpu(), time.monotonic()

    def cpu(self) -> float:
        """Seconds used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def share(self) -> float:
        """Of a processor, since the last time."""
        cpu, now = self.cpu(), time.monotonic()
        share = (cpu - self._cpu) / max(now - self._at, 1e-3)
        self._cpu, self._at = cpu, now
        return round(share, 3)

    def memory(self) -> float:
        """MiB resident."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


class NodeProcess:
    """One process that plays many nodes."""

    def __init__(self, address: str, first: int, count: int, lease: float) -> None:
        nodes = str(Path(__file__).with_name("pool_nodes.py"))
        self._process = subprocess.Popen(
            [sys.executable, nodes, address, str(first), str(count), str(lease)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of nodes ended with {self._process.wait()}")
        return dict(json.loads(line))

    def ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class NoCommands:
    """The coordinator has nothing to command here; being asked would be a finding."""

    def __init__(self) -> None:
        self.asked = 0

    async def command(self, host: str, verb: str, args: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.asked += 1
        raise RgpuError(f"{verb} on {host}: simulated nodes do nothing")


def session(number: int, nodes: int) -> SessionRecord:
    host = number % nodes
    return SessionRecord(
        name=f"session-{number:05d}", state="running", owner=f"node-{host:04d}", incarnation=host + 1, epoch=3,
        quota=8 << 30, agent="k" * 40, device=f"cuda:{number // nodes % 8}",
        needs=Needs(kind="cuda", compute_capability=(9, 0), driver_version=13000),
        checkpoint=CheckpointName(name=f"session-{number:05d}-e3-p1-1", position=1, epoch=3, created=time.time(),
                                  bytes=1 << 30),
        program=Program(pid=4711, command="python train.py --epochs 10", host="client.example.org"),
        created=time.time(), changed=time.time(), running_since=time.time(), reason="started on a simulated node")


class Bench:
    """One pool. ``figures`` is what comes of it."""

    def __init__(self, options: argparse.Namespace, cluster: EtcdCluster) -> None:
        self.options, self.cluster = options, cluster
        self.address = cluster.address("scale", timeout=10)
        process = cluster.members[0].process
        assert process is not None
        self.etcd = Process(process.pid)
        self.mine = Process(os.getpid())
        self.nodes: list[NodeProcess] = []
        self.held: list[Held] = []
        self.figures: dict[str, Any] = {"nodes": options.nodes, "sessions": options.sessions, "lease_s": options.lease,
                                        "watches": 3 * options.nodes, "processors": len(os.sched_getaffinity(0))}

    async def run(self) -> dict[str, Any]:
        registry = await EtcdRegistry.open(self.address)
        try:
            await self._fill(registry)
            began = time.monotonic()
            self._start_nodes()
            self.figures["nodes_there_s"] = round(time.monotonic() - began, 2)
            leader = await self._elect(registry)
            self.figures["steady"] = [await self._at_rate(registry, leader, rate) for rate in self.options.rates]
            self.figures["leading"] = await self._lead(registry, leader)
            status = self.cluster.status(self.cluster.members[0])
            self.figures["etcd"] = {"version": status.version, "memory_mib": self.etcd.memory(),
                                    "database_mib": round(status.dbSize / 2**20, 1)}
        finally:
            for process in self.nodes:
                process.close()
            await registry.close()
        return self.figures

    async def _fill(self, registry: EtcdRegistry) -> None:
        records = [session(number, self.options.nodes) for number in range(self.options.sessions)]
        began = time.monotonic()
        for at in range(0, len(records), BATCH):
            batch = records[at:at + BATCH]
            done = await registry.txn([], [Put(session_key(record.name), encode(record)) for record in batch])
            self.held += [Held(record, done.revision) for record in batch]
        self.figures["filled_s"] = round(time.monotonic() - began, 2)
        self.figures["session_bytes"] = len(encode(records[0]))

    def _start_nodes(self) -> None:
        share = -(-self.options.nodes // self.options.processes)
        for first in range(0, self.options.nodes, share):
            self.nodes.append(NodeProcess(self.address, first, min(share, self.options.nodes - first),
                                          self.options.lease))
        for process in self.nodes:
            process.hear()

    async def _elect(self, registry: EtcdRegistry) -> Leader:
        await registry.txn([absent(LEADER)], [Put(LEADER, encode(LeaderRecord(host="bench", incarnation=1)))])
        entry = await registry.get(LEADER)
        assert entry is not None
        return Leader("bench", entry.create_revision)

    # -- changes at a rate -----------------------------------------------------------------
    async def _at_rate(self, registry: EtcdRegistry, leader: Leader, rate: float) -> dict[str, Any]:
        for process in self.nodes:
            process.ask("count")
        self.etcd.share()
        before, latencies = await registry.revision(), list[float]()
        probing = asyncio.ensure_future(self._probe(registry))
        began = time.monotonic()
        done = await self._write(registry, leader, rate, latencies)
        seconds = time.monotonic() - began
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        await asyncio.sleep(1.0)
        share, revision = self.etcd.share(), await registry.revision()
        answers = [process.ask("tell") for process in self.nodes]
        counts = {name: sum(answer["counts"][name] for answer in answers) for name in answers[0]["counts"]}
        lags = [lag for answer in answers for lag in answer["lags"]]
        return {"asked_per_s": rate, "changes_per_s": round(done / seconds, 1),
                "change_p50_ms": quantile(latencies, 0.5), "change_p99_ms": quantile(latencies, 0.99),
                "watch_lag_p50_ms": quantile(lags, 0.5),
                "watch_lag_p99_ms": quantile(lags, 0.99), "watch_lag_max_ms": quantile(lags, 1.0), "seen": len(lags),
                "revisions_per_s": round((revision - before) / seconds, 1),
                "keepalives_per_s": round(counts["keepalives"] / seconds, 1),
                "reads_per_s": round(counts["reads"] / seconds, 1), "late_keepalives": counts["late_keepalives"],
                "leases_lost": counts["leases_lost"], "errors": counts["errors"], "etcd_processors": share,
                "etcd_memory_mib": self.etcd.memory()}

    async def _probe(self, registry: EtcdRegistry) -> None:
        while True:
            await registry.txn([], [Put(PROBE, b"%d" % time.monotonic_ns())])
            await asyncio.sleep(PROBE_SECONDS)

    async def _write(self, registry: EtcdRegistry, leader: Leader, rate: float, latencies: list[float]) -> int:
        """Changes asked for at even distances; where WRITERS are under way the next one waits."""
        room, done, began, tasks = asyncio.Semaphore(WRITERS), 0, time.monotonic(), set[asyncio.Task[None]]()
        chance, busy = random.Random(1), set[int]()

        async def change(index: int) -> None:
            nonlocal done
            try:
                started = time.monotonic()
                await self._publish(registry, leader, index)
                latencies.append(time.monotonic() - started)
                done += 1
            finally:
                busy.discard(index)
                room.release()

        asked = 0
        while rate and time.monotonic() - began < self.options.seconds:
            await asyncio.sleep(max(0.0, began + asked / rate - time.monotonic()))
            await room.acquire()
            asked += 1
            while (index := chance.randrange(len(self.held))) in busy:
                pass
            busy.add(index)
            task = asyncio.ensure_future(change(index))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if not rate:
            await asyncio.sleep(self.options.seconds)
        await asyncio.gather(*tasks)
        return done

    async def _publish(self, registry: EtcdRegistry, leader: Leader, index: int) -> None:
        held = self.held[index]
        position = held.record.checkpoint.position + 1 if held.record.checkpoint else 1
        checkpoint = CheckpointName(name=f"{held.record.name}-e3-p{position}", position=position, epoch=3,
                                    created=time.time(),
                          bytes=1 << 30)
        decision = ownership.publish_checkpoint(held, owner=str(held.record.owner), epoch=3, checkpoint=checkpoint,
                                                leader=leader,
                                           now=time.time(), reason=f"checkpoint {checkpoint.name} at position "
                                                                   f"{position}")
        try:
            result = await txn_certain(registry, decision.compares, decision.operations)
        except UnknownOutcome:
            return
        if result.succeeded:
            self.held[index] = Held(decision.record, result.revision)

    # -- the coordinator ---------------------------------------------------------------------
    async def _lead(self, registry: EtcdRegistry, leader: Leader) -> dict[str, Any]:
        """The real one leads for a while: it reads all sessions now and then, and watches the nodes."""
        commands, looks = NoCommands(), list[float]()
        coordinator = Coordinator(registry, commands, leader, node_ttl=self.options.lease)
        records, sessions = coordinator.records, coordinator.records.sessions

        async def timed() -> list[Held]:
            began = time.monotonic()
            found = await sessions()
            looks.append(time.monotonic() - began)
            return found

        records.sessions = timed  # type: ignore[method-assign]
        self.mine.share()
        term = asyncio.ensure_future(coordinator.run())
        await asyncio.wait([term], timeout=max(LEADING_SECONDS, self.options.seconds / 2))
        share = self.mine.share()
        failed = repr(term.exception()) if term.done() and not term.cancelled() else ""
        term.cancel()
        await asyncio.gather(term, return_exceptions=True)
        return {"looks": len(looks), "look_p50_ms": quantile(looks, 0.5), "look_max_ms": quantile(looks, 1.0),
                "processors": share, "memory_mib": self.mine.memory(), "commands": commands.asked, "failed": failed}


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['nodes']} nodes, {figures['sessions']} sessions of {figures['session_bytes']} bytes, "
          f"{figures['watches']} watches, {figures['processors']} processors; filled in {figures['filled_s']} s, nodes "
          f"there in {figures['nodes_there_s']} s")
    columns = ("asked_per_s", "changes_per_s", "change_p50_ms", "change_p99_ms", "watch_lag_p50_ms",
               "watch_lag_p99_ms", "keepalives_per_s", "reads_per_s", "late_keepalives", "leases_lost",
               "etcd_processors", "etcd_memory_mib")
    print("  ".join(f"{name:>16s}" for name in columns))
    for row in figures["steady"]:
        print("  ".join(f"{row[name] if row[name] is not None else '-':>16}" for name in columns))
    leading = figures["leading"]
    print(f"coordinator: {leading['looks']} looks at all sessions, {leading['look_p50_ms']} ms each (max "
          f"{leading['look_max_ms']}), {leading['processors']} processors, {leading['memory_mib']} MiB; etcd "
          f"{figures['etcd']['version']}: {figures['etcd']['memory_mib']} MiB, database "
          f"{figures['etcd']['database_mib']} MiB")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=10000)
    parser.add_argument("--processes", type=int, default=8, help="that play the nodes")
    parser.add_argument("--seconds", type=float, default=20.0, help="at each rate")
    parser.add_argument("--lease", type=float, default=10.0)
    parser.add_argument("--rates", default="0,50,200,1000", help="changes of sessions a second, one after the other")
    parser.add_argument("--output", type=Path, help="default: bench/results/DATE-pool-scale.json")
    options = parser.parse_args(arguments)
    options.rates = [float(rate) for rate in str(options.rates).split(",")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="rgpu-scale-") as folder, \
            EtcdCluster(Path(folder), fsync=True, arguments=(
                "--auto-compaction-mode=revision", "--auto-compaction-retention=10000")) as cluster:
        figures = asyncio.run(Bench(options, cluster).run())
    show(figures)
    output = options.output or ROOT / "bench" / "results" / f"{time.strftime('%Y-%m-%d')}-pool-scale.json"
    output.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


if __name__ == "__main__":
    main()
