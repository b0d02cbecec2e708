#!/usr/bin/env python3
"""Native and remote in one run: what does it cost to compute over there?

    python bench/remote/remote.py                       everything (about 25 minutes on an H200)
    python bench/remote/remote.py --quick               one round, loopback and shared (about three minutes)
    python bench/remote/remote.py --only gpt2 --conditions loopback,rtt-1
    python bench/remote/remote.py --skip copies --budget 540

Conditions: loopback (client and node on this machine, sealed TCP, --recover on), recover-off, shared (bulk through
shared memory, --recover off), shared-recover, and rtt-MS: a round trip of MS milliseconds added by a proxy. Native
and remote runs alternate; each figure is the median over the rounds of the medians within a run. Prints a table and
writes DATE-remote.json to --output ($OUT, or bench/results) after every workload.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.support.pool import UNBOXED, BenchPool, host_of  # noqa: E402
from bench.support.tables import Table  # noqa: E402
from bench.support.workload import Outcome, Runner, Side  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

WORKLOADS = ("launches", "cnn", "gpt2", "gemm", "copies", "first_call")
CONDITIONS = ("loopback", "recover-off", "shared", "shared-recover", "rtt-0.2", "rtt-1", "rtt-10", UNBOXED)
#: Behind a slow link only what the link can change: a copy's rate over 10 ms says nothing new.
DELAYED = ("launches", "cnn", "gpt2")
SHARED = ("shared", "shared-recover")


def side(condition: str, pool: BenchPool, memory: str, extra: tuple[str, ...]) -> Side:
    """``rgpu run``'s options for a condition."""
    trip = float(condition[4:]) if condition.startswith("rtt-") else 0.0
    recover = "off" if condition in ("recover-off", "shared") else "on"
    same_host = "auto" if condition in SHARED else "off"
    host = UNBOXED if condition == UNBOXED else host_of(trip)
    return Side(condition, pool, ("--host", host, "--recover", recover, "--same-host", same_host,
                                  "--memory", memory, *extra))


class Bench:
    """The runs, in the order native, condition, condition …, once for each round."""

    def __init__(self, options: argparse.Namespace, pool: BenchPool, table: Table, folder: Path) -> None:
        self.options, self.pool, self.table, self.folder = options, pool, table, folder
        self.deadline = time.monotonic() + options.budget
        self.environment = {"BENCH_QUICK": "1"} if options.quick else {}

    def run(self) -> None:
        for workload in self.options.workloads:
            for number in range(self.options.rounds):
                if time.monotonic() > self.deadline:
                    print(f"time is up: {workload} and what follows is left out", flush=True)
                    return
                self._round(workload, number)
            print(self.table.text(self.table.of[workload]), flush=True)

    def _round(self, workload: str, number: int) -> None:
        self._one(workload, Side("native"), number)
        for condition in self.options.conditions:
            if condition.startswith("rtt-") and (workload not in DELAYED or number > 0):
                continue
            chosen = side(condition, self.pool, self.options.memory, tuple(self.options.run_option))
            self._one(workload, chosen, number)

    def _one(self, workload: str, where: Side, number: int) -> None:
        log = self.folder / f"{workload}-{where.name}-{number}.jsonl"
        outcome: Outcome = Runner(where, workload, self.options.rows, log, self.options.limit, self.environment,
                                  self.options.python).run()
        self.table.add(workload, where.name, outcome)
        if outcome.error:
            print(f"{workload}, {where.name}: " + outcome.error.replace("\n", "\n    "), flush=True)
        self.table.save()


def main() -> int:
    options = _arguments()
    folder: Path = options.output / "bench-logs"
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {**environment(), "command": " ".join(["python", "bench/remote/remote.py", *sys.argv[1:]]),
                             "load_before": os.getloadavg()[0], "cpus": os.cpu_count(), "rounds": options.rounds}
    trips = [float(c[4:]) for c in options.conditions if c.startswith("rtt-")]
    with BenchPool(Path(tempfile.mkdtemp(prefix="rgpu-bench-")), options.device, trips) as pool:
        about["proxies"] = pool.measured
        table = Table(options.output / f"{time.strftime('%Y-%m-%d')}-remote.json", about)
        try:
            Bench(options, pool, table, folder).run()
        finally:
            (folder / "pool.log").write_text(pool.logs())
            table.save()
    for proxy in pool.measured:
        print(f"proxy of {proxy['asked_ms']:g} ms: adds {proxy['added_ms']:.3f} ms to a round trip, passes "
              f"{proxy['gb_per_s']:.1f} GB/s (bare loopback {proxy['bare_gb_per_s']:.1f})")
    print(table.text())
    print(table.verdicts())
    print(f"written: {table.path}")
    return 1 if table.errors else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Native and remote in one run.")
    parser.add_argument("--quick", action="store_true", help="one round, fewer repetitions, loopback and shared only")
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--skip", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--rows", nargs="*", default=[], metavar="NAME", help="only rows that begin so")
    parser.add_argument("--conditions", help=f"of {','.join(CONDITIONS)}; any rtt-MS")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--memory", default="32GiB", help="device memory of a session")
    parser.add_argument("--run-option", action="append", default=[], help="a further word for `rgpu run`")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one run of one workload")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no further round begins")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the workloads")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.conditions = (options.conditions.split(",") if options.conditions else
                          ["loopback", "shared"] if options.quick else list(CONDITIONS[:-1]))
    options.workloads = [w for w in WORKLOADS
                         if (not options.only or any(fnmatch.fnmatch(w, p) for p in options.only))
                         and not any(fnmatch.fnmatch(w, p) for p in options.skip)]
    return options


if __name__ == "__main__":
    sys.exit(main())
