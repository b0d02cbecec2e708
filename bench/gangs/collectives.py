#!/usr/bin/env python3
"""What a collective costs between sessions: of one node, which share memory, and of two nodes, which send it.

    python bench/gangs/collectives.py [--device cpu|cuda:0] [--ranks 2] [--mib 32] [--times 8] [--rounds 3]

Prints for each kind, medians of the rounds: milliseconds of one, and milliseconds of a processor that the workers of
all ranks take for one. Both placements in turns, in one pool of two nodes (which share the device).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pools.pool import LocalPool  # noqa: E402
from tests.support.processes import use  # noqa: E402

PROGRAM = ROOT / "bench" / "gangs" / "collective_load.py"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def one(pool: LocalPool, name: str, hosts: tuple[str, ...], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One run of all ranks; what a collective of each kind took."""
    gate = pool.folder / f"{name}-gate"
    gate.mkdir()
    size = options.mib << 20
    programs = [pool.run(sys.executable, str(PROGRAM), str(pool.folder / f"{name}-id"), str(rank), str(len(hosts)),
                         str(size), str(options.times), str(gate), name=f"{name}-{rank}",
                         options=("--host", host, "--memory", f"{4 * options.mib + 512}MiB", "--gpus",
                                  f"{0.9 / len(hosts):.2f}"))
                for rank, host in enumerate(hosts)]
    for program in programs:
        program.wait_lines(1)
    workers = [pool.session(f"{name}-{rank}")["worker_pid"] for rank in range(len(hosts))]
    found = {}
    for number, kind in enumerate(KINDS, 2):
        before = [use(pid) for pid in workers]
        (gate / kind).touch()
        for program in programs:
            program.wait_lines(number)
        share = sum(use(pid).share - was.share for pid, was in zip(workers, before, strict=True))
        seconds = max(float(program.lines[number - 1].split()[1]) for program in programs)
        found[kind] = {"ms": seconds / options.times * 1e3, "processor_ms": share / (options.times + 1) * 1e3}
    for program in programs:
        program.finish()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, dict[str, float]]]] = {"one node": [], "two nodes": []}
    with tempfile.TemporaryDirectory() as folder, LocalPool(Path(folder), 2, 10.0, options.device) as pool:
        pool.environment["RGPU_NCCL"] = "calls"
        for number in range(options.rounds):
            for name, nodes in (("one node", 1), ("two nodes", 2)):
                hosts = tuple(f"node-{'ab'[rank % nodes]}" for rank in range(options.ranks))
                runs[name].append(one(pool, f"r{number}-{nodes}", hosts, options))
    rows: dict[str, Any] = {
        kind: {name: {key: round(statistics.median(run[kind][key] for run in of), 2) for key in ("ms", "processor_ms")}
               for name, of in runs.items()} for kind in KINDS}
    for kind, row in rows.items():
        print(f"{kind} of {options.mib} MiB, {options.ranks} ranks: " + "; ".join(
            f"{name} {cell['ms']} ms, {cell['processor_ms']} ms of a processor" for name, cell in row.items()))
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv), "load": os.getloadavg()[0],
                      **rows}))


if __name__ == "__main__":
    main()
