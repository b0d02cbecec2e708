"""What other processes do in the conformance tests: ``python -m tests.support.registry.child ADDRESS ACTION ARGS``."""

from __future__ import annotations

import asyncio
import sys

from rgpu.migrate.registry.base import Put, Registry, unchanged
from rgpu.migrate.registry.open import open_registry


async def count(registry: Registry, key: str, times: int) -> None:
    """Add one to a number, ``times`` times, by compare-and-swap; print how often it lost a race."""
    lost = 0
    for _ in range(times):
        while True:
            entry = await registry.get(key)
            number, revision = (int(entry.value), entry.mod_revision) if entry else (0, 0)
            if (await registry.txn([unchanged(key, revision)], [Put(key, b"%d" % (number + 1))])).succeeded:
                break
            lost += 1
    print(lost, flush=True)


async def pairs(registry: Registry, prefix: str) -> None:
    """Write both halves of a pair in one transaction, for ever; the test kills us somewhere."""
    number = 0
    while True:
        number += 1
        await registry.txn([], [Put(f"{prefix}left", b"%d" % number), Put(f"{prefix}right", b"%d" % number)])
        if number == 1:
            print("ready", flush=True)


async def lease(registry: Registry, key: str, ttl: float) -> None:
    """Put a key under a lease and stay, without renewing it."""
    granted = await registry.lease_grant(ttl)
    await registry.txn([], [Put(key, b"here", granted)])
    print("ready", flush=True)
    await asyncio.sleep(60)


async def main() -> None:
    address, action, *arguments = sys.argv[1:]
    registry = await open_registry(address)
    match action, arguments:
        case "count", [key, times]:
            await count(registry, key, int(times))
        case "pairs", [prefix]:
            await pairs(registry, prefix)
        case "lease", [key, ttl]:
            await lease(registry, key, float(ttl))


asyncio.run(main())
