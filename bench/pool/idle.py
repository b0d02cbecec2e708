#!/usr/bin/env python3
"""What an idle session costs: processor time and wake-ups of agent, worker and daemon while its program sleeps.

    python bench/pool/idle.py [--device cpu] [--seconds 60] [--nodes 1] [--output FILE]

One pool, one program that allocates, computes once and then sleeps. Goal: at most 0.1 % of a processor each. The
kernel's own counters are read (/proc/PID/task/*/schedstat), at the beginning and at the end; `wakes` are the times that
a thread of the process began to run again after it had slept. A machine that is busy otherwise makes each wake-up
dearer (cold caches), so the load average stands beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pools.pool import LocalPool  # noqa: E402
from tests.support.processes import Use, use  # noqa: E402

SLEEPER = ROOT / "tests" / "scenarios" / "programs" / "sleeper.py"
SETTLE_SECONDS = 35.0  #: until what a start leaves to be done is done
GOAL = 0.1  #: per cent of a processor


def parts(pool: LocalPool, session: str) -> dict[str, int]:
    """The processes of a pool's node-a and of a session on it, by what they are."""
    described = pool.session(session)
    daemon = json.loads((pool.folder / "pool" / "nodes" / described["host"] / "server.json").read_text())["pid"]
    return {"daemon": daemon, "worker": described["worker_pid"], "agent": pool.programs[0].process.pid}


def measured(pids: dict[str, int], seconds: float) -> dict[str, Use]:
    """What each process uses in so many seconds."""
    before = {name: use(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return {name: use(pid).since(before[name], passed) for name, pid in pids.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rgpu-idle-") as folder, \
            LocalPool(Path(folder), options.nodes, 5.0, options.device) as pool:
        program = pool.run(sys.executable, str(SLEEPER), str(Path(folder) / "end"), name="idle")
        program.wait_lines(1)
        pids = parts(pool, "idle")
        time.sleep(SETTLE_SECONDS)
        found = measured(pids, options.seconds)
        (Path(folder) / "end").touch()
        program.finish()
    rows: dict[str, Any] = {name: {"percent": round(one.share * 100, 4), "wakes_per_s": round(one.wakes, 2)}
                            for name, one in found.items()}
    print(f"idle for {options.seconds:.0f} s, load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    for name, row in rows.items():
        missed = "" if row["percent"] <= GOAL else f"  (goal: {GOAL} %)"
        print(f"  {name:<8}{row['percent']:8.3f} % of a processor{row['wakes_per_s']:8.1f} wake-ups/s{missed}")
    if options.output:
        options.output.write_text(json.dumps({"seconds": options.seconds, "load": os.getloadavg()[0],
                                              "processors": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
