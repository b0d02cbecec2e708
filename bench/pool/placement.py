#!/usr/bin/env python3
"""How long one decision about a large pool takes: 1,213 hosts with 6,212 devices, 10,000 sessions.

    python bench/pool/placement.py [--sessions N] [--decisions N] [--slow N] [--output FILE]

No daemon and no registry: records, and the code that the coordinator decides with. The pool is filled by its own
placement; then sessions end and others come, hosts are cordoned, leave and join, and each decision is timed from the
new snapshot to the answer, so that bringing the memory of the pool up to date counts. *line*: as a request is really
answered, sized, checked and served from the queue. *slow*: the same answers worked out from the records alone, as
before. *listing*: 10,000 entries as the registry gives them, of which one changed, to records. *plan*: what
rebalancing needs: the planners' view of the pool, and a plan on it. Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rgpu.migrate.records.decoded import Decoded  # noqa: E402
from rgpu.migrate.records.schema import DeviceRecord, NodeRecord, SessionRecord, Wants, decode, encode  # noqa: E402
from rgpu.migrate.registry.base import Entry as Stored  # noqa: E402
from rgpu.migrate.scheduling.adapter import place_by_fragmentation, view  # noqa: E402
from rgpu.migrate.scheduling.costs import Costs, Limits  # noqa: E402
from rgpu.migrate.scheduling.following.kept import Kept  # noqa: E402
from rgpu.migrate.scheduling.placement import Request, Snapshot, never_fits, sized  # noqa: E402
from rgpu.migrate.scheduling.plans.consolidating import consolidate  # noqa: E402
from rgpu.migrate.scheduling.plans.rebalancing import make_room  # noqa: E402
from rgpu.migrate.scheduling.views import Views  # noqa: E402
from rgpu.migrate.scheduling.waiting import Entry, serve  # noqa: E402
from rgpu.session.errors import Refused  # noqa: E402

T = TypeVar("T")
GIB = 1 << 30
#: Hosts by devices, as in the recorded pool that the simulation uses; the devices' memory in GiB.
HOSTS = ((8, 617, (80, 96)), (4, 54, (32,)), (2, 518, (16, 24)), (1, 24, (24,)))
#: What sessions ask for: per cent of a device's compute, GiB of memory, how often. 10,000 such leave half of the pool
#: free, where most devices come into question, or fill it to nine tenths, where moves are worth something.
ASKED = {"half full": ((10, 4, 20), (16, 6, 15), (25, 8, 20), (32, 12, 15), (47, 14, 20), (65, 16, 5), (100, 16, 5)),
         "nearly full": ((16, 6, 10), (25, 8, 10), (32, 12, 10), (47, 14, 30), (65, 16, 10), (81, 16, 10),
                         (100, 16, 20))}


def hosts(draw: random.Random) -> list[NodeRecord]:
    found: list[NodeRecord] = []
    for devices, count, memory in HOSTS:
        for _ in range(count):
            size = draw.choice(memory) * GIB
            name = f"host-{len(found):04}"
            found.append(NodeRecord(host=name, incarnation=1, control="", data="", devices=[
                DeviceRecord(device=f"cuda:{n}", name="NVIDIA H200", memory=size, compute_capability=(9, 0),
                             driver_version=13000) for n in range(devices)]))
    return found


class Pool:
    """A pool that changes, and whoever decides about it."""

    def __init__(self, sessions: int, asked: Sequence[tuple[int, int, int]]) -> None:
        self.draw, self.asked, self.sessions = random.Random(1), asked, sessions
        self.nodes = hosts(self.draw)
        self.records: dict[str, SessionRecord] = {}
        self.kept, self.made = Kept(), 0
        self.fill()

    def snapshot(self, decider: Kept | None = None) -> Snapshot:
        return Snapshot(tuple(self.nodes), tuple(self.records.values()), decider=decider)

    def request(self) -> Request:
        share, gib, _ = self.draw.choices(self.asked, [often for _, _, often in self.asked])[0]
        self.made += 1
        return Request(f"s{self.made:06}", gib * GIB, compute=share)

    def fill(self, missing: int = 0) -> None:
        """Sessions come until all but so many are there, or ten in a row find no place."""
        refused = 0
        while len(self.records) < self.sessions - missing and refused < 10:
            refused = 0 if self.settle(self.request()) else refused + 1

    def settle(self, request: Request) -> bool:
        try:
            choice = place_by_fragmentation(self.snapshot(self.kept), request)
        except Refused:
            return False
        now = float(self.made)
        self.records[request.session] = SessionRecord(
            name=request.session, state="running", owner=choice.host, incarnation=1, epoch=1, quota=request.quota,
            agent="a" * 40, device=choice.device, wants=Wants(compute=request.compute), created=now, changed=now,
            needs=self.nodes[0].devices[0].needs())
        return True

    def change(self, step: int) -> None:
        """A session ends; now and then a host is cordoned or let in again, leaves, or joins."""
        del self.records[self.draw.choice(list(self.records))]
        at = self.draw.randrange(len(self.nodes))
        node = self.nodes[at]
        if step % 10 == 0:
            self.nodes[at] = node.replace(state="ready" if node.state == "cordoned" else "cordoned")
        elif step % 50 == 25:
            gone = self.nodes.pop(at)
            for name in [name for name, record in self.records.items() if record.owner == gone.host]:
                del self.records[name]
        elif step % 50 == 26:
            self.nodes.insert(at, node.replace(host=f"{node.host}-{step}"))


def timed(into: list[float], function: Callable[..., T], *args: Any) -> T | None:
    """What the function answers; its CPU time is noted, in µs. None: it refused."""
    begun, answer = time.thread_time_ns(), None
    try:
        answer = function(*args)
    except Refused:
        pass
    into.append((time.thread_time_ns() - begun) / 1000)
    return answer


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"count": len(ordered), "median_us": round(ordered[len(ordered) // 2], 1),
            "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))], 1), "most_us": round(ordered[-1], 1)}


def line_of(snapshot: Snapshot, request: Request) -> None:
    """What admission works out for one that comes."""
    wanted = sized(snapshot, request, 0, 0)
    assert never_fits(snapshot, wanted) is None
    serve(snapshot, [Entry(wanted)])


def decisions(pool: Pool, count: int, slow: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {"place": [], "place after a host came or went": [], "line": [], "refuse": [],
                                     "slow": []}
    for step in range(count):
        hosts_then = len(pool.nodes)
        pool.change(step)
        pool.fill(missing=1)
        snapshot, request = pool.snapshot(pool.kept), pool.request()
        which = "place" if len(pool.nodes) == hosts_then else "place after a host came or went"
        choice = timed(times[which], place_by_fragmentation, snapshot, request)
        timed(times["line"], line_of, snapshot, replace(request, session="other"))
        timed(times["refuse"], place_by_fragmentation, snapshot, replace(request, quota=96 * GIB + 1))
        if step < slow:
            plain = timed(times["slow"], place_by_fragmentation, replace(snapshot, decider=None), request)
            assert plain == choice, (plain, choice)
        pool.settle(request)
    return {name: summary(found) for name, found in times.items() if found}


def listing(pool: Pool, rounds: int) -> dict[str, dict[str, float]]:
    entries = [Stored(f"sessions/{name}", encode(record), 1, 1) for name, record in sorted(pool.records.items())]
    decoded: Decoded[SessionRecord] = Decoded("a session's", lambda e: decode(e.value, SessionRecord, e.key))
    first: list[float] = []
    again: list[float] = []
    timed(first, decoded.read, entries)
    for step in range(rounds):
        at = pool.draw.randrange(len(entries))
        entries[at] = replace(entries[at], mod_revision=step + 2)
        timed(again, decoded.read, entries)
    return {"listing, all new": summary(first), "listing, one changed": summary(again)}


def plans(pool: Pool, rounds: int) -> dict[str, dict[str, float]]:
    """Plans on the pool as it became; sessions count as old, so that all may be moved."""
    times: dict[str, list[float]] = {"view, from the records": [], "view, kept": [], "plan against fragmentation": [],
                                     "plan for room": []}
    moves, now, limits, views = [0.0], 1e6, Limits(cooldown=0), Views()
    views.view(pool.snapshot(), {})
    for step in range(rounds):
        pool.change(1 + 2 * step)
        timed(times["view, from the records"], view, pool.snapshot(), {})
        seen = timed(times["view, kept"], views.view, pool.snapshot(), {})
        assert seen is not None
        plan = timed(times["plan against fragmentation"], consolidate, seen.index, seen.sessions, now, Costs(), limits)
        moves.append(float(len(plan.moves)) if plan else 0.0)
        head = seen.wanted(Request("head", 90 * GIB, compute=100))
        timed(times["plan for room"], make_room, seen.index, seen.sessions, head, now, Costs(), limits)
    return {**{name: summary(found) for name, found in times.items() if found}, "moves in a plan": {"most": max(moves)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sessions", type=int, default=10000)
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=20, help="decisions that are worked out from the records, too")
    parser.add_argument("--plans", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "command": " ".join(["python", "bench/pool/placement.py", *sys.argv[1:]]),
        "machine": {"processors": os.cpu_count(), "python": platform.python_version()}, "unit": "µs of CPU time",
        "pools": []}
    for name, asked in ASKED.items():
        begun = time.monotonic()
        pool = Pool(args.sessions, asked)
        held = sum(record.wants.compute for record in pool.records.values()) / 100
        facts = {"pool": name, "hosts": len(pool.nodes), "devices": sum(len(node.devices) for node in pool.nodes),
                 "sessions": len(pool.records), "devices' worth held": round(held)}
        print(", ".join(f"{key}: {value}" for key, value in facts.items()), f"({time.monotonic() - begun:.0f} s)")
        figures = {**decisions(pool, args.decisions, args.slow), **listing(pool, 50), **plans(pool, args.plans)}
        for what, found in figures.items():
            print(f"  {what:34}", "  ".join(f"{key} {value:>10}" for key, value in found.items()))
        report["pools"].append({**facts, "figures": figures})
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
