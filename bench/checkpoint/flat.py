#!/usr/bin/env python3
"""Do journal and checkpoints stay as small over many calls as they are at first?

    python bench/checkpoint/flat.py [--calls 200000] [--device cpu]

A program makes, uses and destroys objects all the time. At each tenth of its calls a checkpoint is taken, and what is
kept is looked at: the journal (the most in that tenth), the checkpoint's manifest, what it wrote, the store, agent and
worker. Between two checkpoints the journal grows with the calls; from one tenth to the next nothing may.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.support.workload import resident  # noqa: E402
from tests.support.pools.pool import LocalPool, Program  # noqa: E402

PARTS = 10
#: What must be flat, and by how much the later half may exceed the earlier (without the first tenth): bytes, share.
FLAT = {"journal_bytes": (1 << 20, 0.10), "manifest_bytes": (4096, 0.05), "image_bytes": (256 << 10, 0.10),
        "store_bytes": (1 << 20, 0.25), "worker_rss": (16 << 20, 0.03), "agent_rss": (16 << 20, 0.03)}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Run:
    """One program under watch."""

    def __init__(self, pool: LocalPool, folder: Path, calls: int) -> None:
        self.pool, self.folder, self.calls = pool, folder, calls
        self.rows: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def part(self, number: int, program: Program) -> None:
        """Until that tenth of the calls was made; then a checkpoint."""
        journal, goal = 0, self.calls * number // PARTS
        while True:
            row = self.pool.session("flat")
            journal = max(journal, int(row.get("journal_bytes") or 0))
            if int(row.get("calls") or 0) >= goal:
                break
            if program.process.poll() is not None:
                raise SystemExit(f"the program ended: {program.errors[-5:]}")
            time.sleep(0.2)
        checkpoint = self.pool.rgpu("checkpoint", "flat")
        listed = {one["image"]: one for one in self.pool.rgpu("image", "ls")}[checkpoint["image"]]
        self.rows.append({
            "calls": checkpoint["position"], "seconds": round(time.monotonic() - self.began, 1),
                          "journal_bytes": journal,
            "manifest_bytes": listed["manifest_bytes"], "image_pages": checkpoint["pages"],
                          "image_bytes": checkpoint["bytes"],
            "store_bytes": size_of(self.folder / "pool" / "images"), "pause_ms": checkpoint["pause_ms"],
            "worker_rss": resident(int(row["worker_pid"])) or 0, "agent_rss": resident(program.process.pid) or 0})
        print(line(self.rows[-1]), flush=True)


def line(row: dict[str, Any]) -> str:
    kib = {name: f"{row[name] / 1024:.0f} KiB" for name in ("journal_bytes", "image_bytes", "store_bytes")}
    return (f"{row['calls']:>9,} calls {row['seconds']:6.1f} s  journal ≤ {kib['journal_bytes']:>9s}  manifest "
            f"{row['manifest_bytes']:6,} B  checkpoint {row['image_pages']:3} pages, {kib['image_bytes']:>8s}  store "
            f"{kib['store_bytes']:>9s}  RSS worker {row['worker_rss'] >> 20} MiB, agent {row['agent_rss'] >> 20} MiB  "
            f"pause {row['pause_ms']:.1f} ms")


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean of the later half beside that of the earlier, the first row apart."""
    found = {}
    for name, (margin, share) in FLAT.items():
        values = [row[name] for row in rows[1:]]
        half = len(values) // 2
        before, after = sum(values[:half]) / max(1, half), sum(values[half:]) / max(1, len(values) - half)
        found[name] = {"before": round(before), "after": round(after),
                       "flat": after <= before + max(margin, share * before)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Journal and checkpoint size over many calls.")
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--journal-limit", default="16MiB")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rgpu-flat-"))
    released = folder / "released"
    with LocalPool(folder, nodes=1, device=options.device) as pool:
        load = Path(__file__).with_name("flat_load.py")
        program = pool.run(sys.executable, str(load), str(released), name="flat",
                           options=("--journal-limit", options.journal_limit))
        program.wait_lines(0)
        pool.wait_state("flat", "running", 60)
        run = Run(pool, folder, options.calls)
        for number in range(1, PARTS + 1):
            run.part(number, program)
        released.touch()
        right = program.process.wait(60) == 0
    found = growth(run.rows)
    for name, one in found.items():
        print(f"{name:15s} {one['before']:>12,} → {one['after']:>12,}  {'flat' if one['flat'] else 'GROWS'}")
    good = right and all(one["flat"] for one in found.values())
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-flat.json"
    path.write_text(json.dumps({"device": options.device, "calls": options.calls, "cpus": os.cpu_count(),
                                "rows": run.rows, "growth": found, "good": good}, indent=1) + "\n")
    print(f"{'flat' if good else 'NOT GOOD: something grows, or the program ended badly'}; written: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
