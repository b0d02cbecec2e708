#!/usr/bin/env python3
"""What two sessions that want a whole device get of it, with shares of 25 and 75 %, held to them and not.

    python bench/pool/shares.py [--device cuda:0] [--seconds 10]
    python bench/pool/shares.py --device cpu -- tests/scenarios/programs/steps.py --steps 100000

The same program twice (default: GPT-2 124M training, bench/workloads/gpt2_steps.py), on one node. For each policy of
`rgpu server --enforce-compute`: the steps a second of the first one alone, then of both, by that; what the workers
counted (`gpu_share`), and for how long each session was held.
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

from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool, Program  # noqa: E402

WORKLOAD = ROOT / "bench" / "workloads" / "gpt2_steps.py"
SHARES = {"quarter": 25, "rest": 75}
WARM = 20  #: steps
SETTLE = 3.0  #: seconds, until shares were told and the first ones earned


def rates(programs: list[Program], seconds: float) -> list[float]:
    """Steps a second of each."""
    before, began = [len(program.lines) for program in programs], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return [(len(program.lines) - count) / took for program, count in zip(programs, before, strict=True)]


def measure(policy: str, options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rgpu-shares-") as folder, \
            LocalPool(Path(folder), nodes=1, device=options.device) as pool:

        def start(name: str) -> Program:
            program = pool.run(sys.executable, *command, name=name, options=(
                "--memory", options.memory, "--compute", str(SHARES[name])))
            program.wait_lines(WARM, 180)
            return program

        first = start("quarter")
        (alone,) = rates([first], options.seconds)
        both = [first, start("rest")]
        time.sleep(SETTLE)
        held = {name: pool.session(name)["held_seconds"] for name in SHARES}
        found = rates(both, options.seconds)
        rows = {name: pool.session(name) for name in SHARES}
    return {"policy": policy, "alone_steps_per_s": round(alone, 2), "sum": round(sum(found) / alone, 3), **{
        name: {"of_alone": round(rate / alone, 3), "gpu_share": rows[name]["gpu_share"],
               "limit": rows[name]["compute_limit"],
               "held": round((rows[name]["held_seconds"] - held[name]) / options.seconds, 3)}
        for name, rate in zip(SHARES, found, strict=True)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    parser.add_argument("command", nargs="*", help="another program and its arguments")
    options = parser.parse_args()
    command = options.command or [str(WORKLOAD), "--steps", "100000"]
    rows = []
    for policy in ("never", "shared"):
        os.environ["RGPU_ENFORCE_COMPUTE"] = policy  # the pool's daemons have it from here
        rows.append(measure(policy, options, command))
        print(json.dumps(rows[-1]), flush=True)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-shares.json"
    path.write_text(json.dumps({**environment(), "command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
