"""A node's daemon, as far as membership goes, in a process of its own.

usage: python -m tests.support.leader.member PATH TTL
"""

from __future__ import annotations

import asyncio
import sys

from rgpu.migrate.membership.leases import LeaseKeeper
from rgpu.migrate.membership.registration import Membership
from rgpu.migrate.records.schema import NodeRecord
from rgpu.migrate.registry.embedded import EmbeddedRegistry


async def main() -> None:
    path, ttl = sys.argv[1], float(sys.argv[2])
    registry = await EmbeddedRegistry.open(path)
    keeper = LeaseKeeper(f"embedded:{path}", patience=ttl)
    record = NodeRecord(host="child", incarnation=1, control="", data="")
    await Membership(registry, keeper, record, ttl=ttl).start()
    print(f"ready {keeper.pid}", flush=True)
    await asyncio.sleep(60)


asyncio.run(main())
