"""Many node daemons' dealings with the registry, in one process: for bench/pool/pool_scale.py.

    python bench/pool/pool_nodes.py ADDRESS FIRST COUNT LEASE

Each is what a daemon does to etcd and no more: a connection of its own, its record under a lease that is renewed as
the lease keeper renews it, its record read every 2 s to see whether its devices changed, and watches on the leader,
the keys and the invitations. A value put at ``keys/probe`` holds the time of its sending (CLOCK_MONOTONIC, ns):
when each node's watch brings it is noted. Prints a line of JSON when all are there, and one with what it counted at
the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rgpu.link.loggers import configure_logging  # noqa: E402
from rgpu.migrate.membership.lease_keeper import renewal_interval  # noqa: E402
from rgpu.migrate.records.keys import INVITATIONS, KEYS, LEADER, node_key
from rgpu.migrate.records.schema import DeviceRecord, NodeRecord, decode, encode
from rgpu.migrate.registry.base import Compacted, Put, absent  # noqa: E402
from rgpu.migrate.registry.etcd.registry import EtcdRegistry  # noqa: E402
from rgpu.session.errors import NotFound, RgpuError  # noqa: E402

PROBE = KEYS + "probe"
LOOK_SECONDS = 2.0  #: as the daemon's: whether its devices' free memory changed
DEVICES = 8


def record(number: int) -> NodeRecord:
    """As large as a real one: eight devices, each with the attributes that a client is told."""
    facts = {"name": "NVIDIA H200", "uuid": bytes(16), "total_memory": 150 << 30, "pci": (0, 1, 0),
             "attributes": {str(attribute): 1024 for attribute in range(1, 120)}, "driver_version": 13000}
    devices = [DeviceRecord(device=f"cuda:{index}", name="NVIDIA H200", uuid=bytes(16), memory=140 << 30,
                            compute_capability=(9, 0), driver_version=13000, facts=facts) for index in range(DEVICES)]
    address = f"10.0.{number >> 8}.{number & 255}"
    return NodeRecord(host=f"node-{number:04d}", incarnation=number + 1, control=f"tcp://{address}:7070",
                      data=f"{address}:7071", public_key="k" * 40, devices=devices, version="0.1.0",
                      started=time.time())


class Nodes:
    """``counts``: what was done; ``lags``: seconds between sending and seeing a probe."""

    def __init__(self, address: str, first: int, count: int, lease: float) -> None:
        self.address, self.lease = address, lease
        self.numbers = range(first, first + count)
        self.counts = {"keepalives": 0, "late_keepalives": 0, "leases_lost": 0, "reads": 0, "errors": 0}
        self.lags: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, number: int) -> None:
        registry = await EtcdRegistry.open(self.address)
        lease = await registry.lease_grant(self.lease)
        key = node_key(f"node-{number:04d}")
        await registry.txn([absent(key)], [Put(key, encode(record(number)), lease)])
        for work in (self._keep(registry, lease), self._look(registry, key),
                     *(self._watch(registry, prefix) for prefix in (LEADER, KEYS, INVITATIONS))):
            self._tasks.append(asyncio.ensure_future(work))

    async def _keep(self, registry: EtcdRegistry, lease: int) -> None:
        interval = renewal_interval(self.lease)
        due = time.monotonic() + interval * random.random()
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.counts["late_keepalives"] += time.monotonic() - due > interval
            due = time.monotonic() + interval
            try:
                await registry.keepalive(lease, 1.0)
                self.counts["keepalives"] += 1
            except NotFound:
                self.counts["leases_lost"] += 1
                return
            except RgpuError:
                self.counts["errors"] += 1
                due = time.monotonic() + 0.1

    async def _look(self, registry: EtcdRegistry, key: str) -> None:
        await asyncio.sleep(LOOK_SECONDS * random.random())
        while True:
            try:
                entry = await registry.get(key)
                if entry is not None:
                    decode(entry.value, NodeRecord, key)
                self.counts["reads"] += 1
            except RgpuError:
                self.counts["errors"] += 1
            await asyncio.sleep(LOOK_SECONDS)

    async def _watch(self, registry: EtcdRegistry, prefix: str) -> None:
        while True:
            try:
                watching: AsyncIterator[Any] = registry.watch(prefix)
                async with aclosing(watching) as changes:  # type: ignore[type-var]
                    async for change in changes:
                        now = time.monotonic_ns()
                        for event in change.events:
                            if event.key == PROBE and event.entry is not None:
                                self.lags.append((now - int(event.entry.value)) / 1e9)
            except (RgpuError, Compacted):
                self.counts["errors"] += 1
                await asyncio.sleep(0.5)

    async def run(self) -> None:
        numbers = list(self.numbers)
        for at in range(0, len(numbers), 16):
            await asyncio.gather(*(self.begin(number) for number in numbers[at:at + 16]))
        say({"ready": len(numbers)})
        loop = asyncio.get_running_loop()
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if line == "count":  # from now on
                self.lags.clear()
                for name in self.counts:
                    self.counts[name] = 0
                say({"counting": True})
            else:
                say({"counts": self.counts, "lags": self.lags})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    configure_logging(level="error")  # to stderr: stdout is what bench/pool/pool_scale.py reads
    asyncio.run(Nodes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])).run())
