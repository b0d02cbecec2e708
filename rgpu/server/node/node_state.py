"""A daemon's state as metrics, read at each scrape (:mod:`.metrics` has the table and serves it)."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable

from rgpu import __version__
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.records.gangs import GangRecord
from rgpu.migrate.records.keys import GANGS, QUEUE
from rgpu.migrate.records.schema import QueueRecord, decode
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.devices.slots import DeviceSlots
from rgpu.server.node.metrics import SPECS, Samples
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.sessions.held import HeldSessions


class NodeState:
    """``in_time``: whether this node may begin anything now. ``ports``: port → (reachable, waiting, turned away)."""

    def __init__(self, held: HeldSessions, devices: DeviceSlots, fence: LeaderFence, in_time: Callable[[], bool],
                 local: LocalLeader, records: PoolRecords, ports: Callable[[], dict[str, tuple[float, int, int]]]
                 ) -> None:
        self._held, self._devices, self._fence, self._in_time = held, devices, fence, in_time
        self._local, self._records, self._ports = local, records, ports

    async def read(self) -> dict[str, Samples]:
        """The daemon's state, by metric; for use in its loop."""
        held, devices = self._held, self._devices
        leading = self._local.coordinator is not None
        found: dict[str, Samples] = {
            "rgpu_node_info": {(held.host, __version__): 1},
            "rgpu_node_in_time": {(): float(self._in_time())},
            "rgpu_leader": {(): float(leading)},
            "rgpu_leader_revision": {(): self._fence.highest},
            "rgpu_sessions": {("running",): len(held.running) - len(held.paused), ("paused",): len(held.paused),
                              ("incoming",): len(held.incoming)},
            "rgpu_device_memory_bytes": {(spec,): slot.memory for spec, slot in devices.slots.items()},
            "rgpu_device_promised_bytes": {(spec,): slot.memory - devices.free(spec)
                                           for spec, slot in devices.slots.items()},
            "rgpu_device_healthy": {(spec,): float(slot.healthy) for spec, slot in devices.slots.items()}}
        for place, name in enumerate(("rgpu_port_reachable", "rgpu_port_waiting", "rgpu_port_turned_away_total")):
            found[name] = {(port,): float(figures[place]) for port, figures in self._ports().items()}
        found.update(await self._sessions())
        if leading:
            found.update(await self._pool())
        return found

    async def _sessions(self) -> dict[str, Samples]:
        handles = list(self._held.running.items())
        views = await asyncio.gather(*(handle.refresh() for _, handle in handles))
        found: dict[str, Samples] = {name: {} for name in SPECS if name.startswith("rgpu_session_")}
        for (session, _), view in zip(handles, views, strict=True):
            stats, gpu = dict(view.get("stats") or {}), dict(view.get("gpu") or {})
            values = {"gpu_seconds_total": gpu.get("busy_s"), "held_seconds_total": gpu.get("held_s"),
                      "memory_bytes": view.get("memory_bytes"), "calls_total": stats.get("calls", view.get("position")),
                      "managed_faults_total": stats.get("managed_faults"),
                      "awaited_calls_total": stats.get("awaited_calls"), "journal_bytes": stats.get("journal_bytes"),
                      **{f"{key}_total": (view.get("catch_up") or {}).get(name)
                         for key, name in (("catch_ups", "catch_ups"), ("catch_up_stalls", "stalls"))}}
            for name, value in values.items():
                if isinstance(value, int | float):  # an agent's figures are untrusted
                    found[f"rgpu_session_{name}"][session,] = float(value)
        return found

    async def _pool(self) -> dict[str, Samples]:
        nodes = Tally(node.state for node in (await self._records.nodes()).values())
        sessions = Tally(record.state for record in await self._records.sessions())
        registry = self._records.registry
        requests = [decode(entry.value, QueueRecord, entry.key) for entry in (await registry.list(QUEUE)).entries]
        gangs = [decode(entry.value, GangRecord, entry.key) for entry in (await registry.list(GANGS)).entries]
        running = {gang.name: float(gang.generation) for gang in gangs if gang.state == "running"}
        queued = {one.gang.name for one in requests if one.gang is not None}
        return {"rgpu_pool_nodes": {(state,): count for state, count in nodes.items()},
                "rgpu_pool_sessions": {(state,): count for state, count in sessions.items()},
                "rgpu_pool_gangs": {("running",): len(running), ("queued",): len(queued)},
                "rgpu_gang_generation": {(name,): generation for name, generation in running.items()},
                "rgpu_pool_queue": {("request",): len(requests), ("parked",): sessions.get("parked", 0)},
                "rgpu_pool_paused": {(): float((await pool_record(self._records.registry)).paused)}}
