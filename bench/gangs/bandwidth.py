#!/usr/bin/env python3
"""Bandwidth of collectives between ranks of one host, natively and remotely in turns.

    python bench/gangs/bandwidth.py                           two ranks on cuda:0; natively NCCL over sockets
    python bench/gangs/bandwidth.py --device cuda:0,cuda:1    a rank on each; natively NCCL's own way, NVLink
    python bench/gangs/bandwidth.py --apart                   each rank on a node of its own, which share cuda:0

Prints, for each kind and size, the median rates of both and their ratio; writes DATE-bandwidth.json to --output ($OUT,
or bench/results).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool  # noqa: E402

WORKLOAD = ROOT / "bench" / "gangs" / "bandwidth_ranks.py"


def one(line: list[str], environ: dict[str, str], limit: float) -> dict[str, float]:
    """One run of all ranks: GB/s by kind and size. Raises SystemExit where it failed."""
    try:
        done = subprocess.run(line, env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=limit)
    except subprocess.TimeoutExpired as late:
        raise SystemExit(f"{' '.join(line)}: not through in {limit:.0f} s\n{late.stdout}") from None
    rows = [words for text in done.stdout.splitlines() if len(words := text.split()) == 3 and words[0].count("_") == 1
            and words[2].replace(".", "").isdigit()]
    if done.returncode or not rows:
        raise SystemExit(f"{' '.join(line)}: exit {done.returncode}\n{done.stdout[-4000:]}")
    return {f"{kind} {mib}": float(found) for kind, mib, found in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", default="0.25,25,256")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in turns")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--torchrun", default=shutil.which("torchrun") or "torchrun")
    parser.add_argument("--no-native", dest="native", action="store_false")
    parser.add_argument("--apart", action="store_true", help="a node for each rank")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a run")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    line = [options.torchrun, "--nproc-per-node", str(options.ranks), str(WORKLOAD), "--mib", options.mib, "--times",
            str(options.times)]
    gpus = options.device.count(",") + 1
    runs: dict[str, list[dict[str, float]]] = {"native": [], "remote": []}
    with tempfile.TemporaryDirectory() as folder, LocalPool(
            Path(folder), options.ranks if options.apart else 1, 10.0, options.device) as pool:
        environ = dict(pool.environment)
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        own = {"ONE_GPU": "1"} if gpus == 1 else {}
        share = [f"{0.9 / options.ranks:.2f}" if gpus == 1 and not options.apart else "1"]
        for number in range(options.rounds):
            if options.native:
                runs["native"].append(one(line, {**os.environ, **own}, options.limit))
            try:
                runs["remote"].append(one(
                    [sys.executable, "-m", "rgpu.cli.main", "run", "-q", "--name", f"bandwidth-{number}", "--ranks",
                     str(options.ranks), "--gpus", *share, "--memory", options.memory, "--", *line], environ,
                    options.limit))
            except SystemExit as failure:
                (options.output / "bandwidth-failed.log").write_text(f"{failure}\n{pool.logs()}")
                raise
            print(f"round {number}", {name: of[-1] for name, of in runs.items() if of}, flush=True)
    rows: dict[str, Any] = {}
    for key in runs["remote"][0]:
        rows[key] = row = {name: round(statistics.median(run[key] for run in of), 3)
                           for name, of in runs.items() if of}
        if options.native:
            row["ratio"] = round(row["remote"] / row["native"], 3)
        print(f"{key} MiB:", row)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-bandwidth.json"
    path.write_text(json.dumps({**environment(), "command": " ".join(sys.argv), "ranks": options.ranks,
                                "gb_per_second": rows, "runs": runs}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
