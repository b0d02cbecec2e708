#!/usr/bin/env python3
"""10,000 training steps: is memory flat, is the loss curve that of a native run?

    python bench/remote/long_run.py [--steps 10000] [--device cuda:0]

Runs the CNN natively, then remotely with recovery on and off; samples the resident memory of program (with the shim),
agent and worker twice a second. Exit status 1 when a digest differs or memory grows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.support.pool import BenchPool  # noqa: E402
from bench.support.workload import Runner, Side, resident  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

WHO = ("program", "agent", "worker")
#: The first part of a run allocates: caches, rings, the journal up to its limit.
WARM = 0.4
#: Growth over the rest that counts as flat: an interpreter's own breathing.
FLAT_BYTES, FLAT_SHARE = 24 << 20, 0.02


@dataclass
class Memory:
    """Resident bytes of one process over time."""

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """First, after warming up, last, highest (MiB); the growth after warming up in KiB per minute."""
        if not self.sizes:
            return {"samples": 0, "flat": False}
        at = int(len(self.sizes) * WARM)
        rest = self.sizes[at:]
        growth = settled(rest[len(rest) // 2:]) - settled(rest[:max(1, len(rest) // 2)])
        return {"samples": len(self.sizes), "first_mib": _mib(self.sizes[0]), "warm_mib": _mib(rest[0]),
                "last_mib": _mib(self.sizes[-1]), "highest_mib": _mib(max(self.sizes)),
                "growth_kib": growth / 1024, "kib_per_minute": slope(self.times[at:], rest) * 60 / 1024,
                "flat": growth <= max(FLAT_BYTES, FLAT_SHARE * rest[0])}


def settled(sizes: Sequence[int]) -> float:
    """The mean."""
    return sum(sizes) / len(sizes)


def slope(times: Sequence[float], sizes: Sequence[int]) -> float:
    """Bytes per second, by least squares."""
    if len(times) < 2:
        return 0.0
    t, s = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((x - t) ** 2 for x in times)
    return sum((x - t) * (y - s) for x, y in zip(times, sizes, strict=True)) / spread if spread else 0.0


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def run(side: Side, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    memory = {who: Memory() for who in WHO}
    pids: dict[str, int | None] = {}

    def watch(runner: Runner) -> None:
        if side.pool is None:
            pids["program"] = runner.process.pid
        elif not pids.get("worker"):
            row = runner.row()
            pids.update(program=row.get("pid"), agent=runner.process.pid, worker=row.get("worker_pid"))
        for who, pid in pids.items():
            size = resident(pid) if pid else None
            if size and time.monotonic() - began > 10:  # imports are over
                memory[who].times.append(time.monotonic() - began)
                memory[who].sizes.append(size)

    began = time.monotonic()
    outcome = Runner(side, "cnn_long", [], folder / f"long-{side.name}.jsonl", options.limit,
                     {"BENCH_STEPS": str(options.steps)}, options.python, watch).run()
    return {"side": side.name, "seconds": time.monotonic() - began, "digest": outcome.digest, "error": outcome.error,
            "memory": {who: memory[who].summary() for who in pids},
            "samples_mib": {who: [_mib(s) for s in memory[who].sizes[::max(1, len(memory[who].sizes) // 60)]]
                            for who in pids}}


def verdict(runs: Sequence[dict[str, Any]]) -> bool:
    """Every digest is there and the same; every remote process's memory is flat."""
    digests = {found["digest"] for found in runs}
    flat = all(row["flat"] for found in runs if found["side"] != "native" for row in found["memory"].values())
    return len(digests) == 1 and "" not in digests and flat


def show(found: dict[str, Any]) -> str:
    lines = [f"{found['side']:12s} {found['seconds']:7.1f} s  digest {found['digest'][:16] or 'NONE'}"]
    if found["error"]:
        lines += [f"    {line}" for line in found["error"].splitlines()[:5]]
    for who, row in found["memory"].items():
        if row["samples"]:
            lines.append(f"    {who:8s} RSS {row['first_mib']:9.1f} MiB at first, {row['warm_mib']:9.1f} warm, "
                         f"{row['last_mib']:9.1f} last, {row['highest_mib']:9.1f} highest; "
                         f"{row['kib_per_minute']:+9.0f} KiB/min  {'flat' if row['flat'] else 'GROWS'}")
        else:
            lines.append(f"    {who:8s} never seen")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Many training steps: memory and loss curve.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--memory", default="16GiB")
    parser.add_argument("--sides", default="native,recover-on,recover-off")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for each run")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    folder: Path = options.output / "bench-logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-long-run.json"
    runs: list[dict[str, Any]] = []
    with BenchPool(Path(tempfile.mkdtemp(prefix="rgpu-long-")), options.device) as pool:
        for name in options.sides.split(","):
            side = Side(name) if name == "native" else Side(
                name, pool, ("--recover", name.removeprefix("recover-"), "--memory", options.memory))
            runs.append(run(side, options, folder))
            print(show(runs[-1]), flush=True)
            path.write_text(json.dumps({**environment(), "steps": options.steps, "runs": runs}, indent=1) + "\n")
        (folder / "long-pool.log").write_text(pool.logs())
    good = verdict(runs)
    print(f"{'loss curves equal, memory flat' if good else 'NOT GOOD: digests differ, a run failed, or memory grows'}; "
          f"written: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
