#!/usr/bin/env python3
"""Which threads are busy while a program copies: what bounds copies, and what is left to be had.

    python bench/remote/busy.py [--device cuda:0] [--mib 256] [--seconds 5] [--options "--recover off" …]

For each way and kind of memory, and each set of options of `rgpu run`: the rate, and of the program, its agent and the
worker every thread that takes more than a tenth of a processor, with its share of one, and of that the share in the
kernel. A thread near 1.0 is what bounds; where there is none, they wait for each other. Names of Python's threads come
from py-spy where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
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

PROGRAM = ROOT / "bench" / "workloads" / "copy_loop.py"
TICKS = os.sysconf("SC_CLK_TCK")
LEAST = 0.1  #: of a processor

Ticks = dict[int, tuple[str, int, int]]


def threads(pid: int) -> Ticks:
    """Thread → (name, ticks in user mode, in the kernel)."""
    found: Ticks = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            head, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has ended
        fields = rest.split()
        found[int(folder.name)] = head.partition("(")[2], int(fields[11]), int(fields[12])
    return found


def python_names(pid: int) -> dict[int, str]:
    if shutil.which("py-spy") is None:
        return {}
    text = subprocess.run(["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True).stdout
    return {int(number): name for number, name in re.findall(r'^Thread (\d+) .*?"([^"]*)"', text, re.MULTILINE)}


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()]


def measure(pool: LocalPool, name: str, words: list[str], seconds: float, options: list[str]) -> dict[str, Any]:
    program = pool.run(sys.executable, str(PROGRAM), *words, str(seconds), name=name, options=tuple(options))
    program.wait_lines(1)
    agent = program.process.pid
    pids = {"agent": agent, "worker": int(pool.session(name)["worker_pid"])}
    for child in children(agent):
        if "copy_loop" in Path(f"/proc/{child}/cmdline").read_text():
            pids["program"] = child
    time.sleep(seconds * 0.2)
    before, began = {who: threads(pid) for who, pid in pids.items()}, time.monotonic()
    time.sleep(seconds * 0.6)
    after, wall = {who: threads(pid) for who, pid in pids.items()}, time.monotonic() - began
    names = {who: python_names(pid) for who, pid in pids.items()}
    if (code := program.process.wait(60)) != 0:
        raise SystemExit(f"the program ended with {code}: {program.errors[-10:]}")
    time.sleep(0.3)  # its last line is on its way
    rate = float(next(line.split()[1] for line in program.lines if line.startswith("rate ")))
    rows = []
    for who, found in after.items():
        for number, (comm, user, kernel) in found.items():
            _, user_before, kernel_before = before[who].get(number, (comm, 0, 0))
            share, inside = (user + kernel - user_before - kernel_before) / TICKS / wall, (kernel - kernel_before)
            if share >= LEAST:
                rows.append({"process": who, "thread": names[who].get(number, comm), "share": round(share, 2),
                             "kernel": round(inside / TICKS / wall, 2)})
    return {"copy": " ".join(words[:2]), "options": " ".join(options), "gb_per_s": rate,
            "threads": sorted(rows, key=lambda row: -row["share"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--copies", default="to pinned,to pageable,from pinned,from pageable")
    parser.add_argument("--options", action="append", help="of `rgpu run`, one set each time it is given")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rgpu-busy-") as folder, \
            LocalPool(Path(folder), nodes=1, device=args.device) as pool:
        for options in args.options or ["--same-host off", "--same-host off --recover off"]:
            for copy in args.copies.split(","):
                rows.append(measure(pool, f"busy{len(rows)}", [*copy.split(), str(args.mib)], args.seconds,
                                    options.split()))
                print(f"{rows[-1]['copy']:14s} {rows[-1]['options']}: {rows[-1]['gb_per_s']:.2f} GB/s", flush=True)
                for row in rows[-1]["threads"]:
                    print(f"    {row['process']:8s} {row['thread']:24s} {row['share']:.2f}, of it in the kernel "
                          f"{row['kernel']:.2f}", flush=True)
    path = args.output / f"{time.strftime('%Y-%m-%d')}-busy.json"
    path.write_text(json.dumps({**environment(), "command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
