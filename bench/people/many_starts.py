#!/usr/bin/env python3
"""Many small programs on one node: all started within a minute, all running at once, all ended.

    python bench/people/many_starts.py [--sessions 64] [--within 60] [--device cuda:0]
    python bench/people/many_starts.py --device cpu --sessions 16 --within 30

Each program makes a context, copies 64 bytes there and back, says so, and waits to be ended. *Start*: from `rgpu run`
to its word, natively in turns with every eighth. *Memory*: of a session's worker (its share of pages, Pss), of its
`rgpu run` and agent, and of the GPU. *Left*: processes, descriptors of the daemon, files of the pool's folder but logs,
and memory of the GPU, before the first and after the last. Writes DATE-many-starts.json to --output ($OUT, or
bench/results).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.people.run_start import COPIED  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool  # noqa: E402

PROGRAM = COPIED + """
print("right" if right else f"wrong {codes}", flush=True)
sys.stdin.readline()
"""
SETTLE = 30.0  #: seconds in which what was ended may go


class Started:
    """One program, from its start to its word."""

    def __init__(self, command: list[str], surroundings: dict[str, str]) -> None:
        self._begun = time.monotonic()
        self._process = subprocess.Popen(command, env=surroundings, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.seconds, self.word = 0.0, ""
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        self.word = self._process.stdout.readline().strip()
        self.seconds = time.monotonic() - self._begun

    def up(self, seconds: float) -> None:
        """Raises :class:`SystemExit` with what it said instead."""
        self._thread.join(seconds)
        if self.word != "right":
            self._process.kill()
            raise SystemExit(f"a program did not come up: {self.word!r}\n{self._process.communicate()[1][-2000:]}")

    def end(self) -> float:
        """Seconds from its word to its exit."""
        begun = time.monotonic()
        _, errors = self._process.communicate("end\n", timeout=120)
        if self._process.returncode:
            raise SystemExit(f"a program ended with {self._process.returncode}\n{errors[-2000:]}")
        return time.monotonic() - begun


def share_of_pages(pid: int) -> int:
    """Bytes (Pss) of a process; 0 for one that is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) << 10


def below(pid: int) -> list[int]:
    """A process and all that it started, and so on."""
    found = [pid]
    for child in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split():
        found += below(int(child))
    return found


def used_of_gpu() -> int:
    """MiB in use, by all; 0 without a GPU."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=20).stdout.split()
    except OSError:
        return 0
    return sum(map(int, said))


def left(pool: LocalPool, daemon: int) -> dict[str, int]:
    """What a node holds: to be compared."""
    kept = {"workers", "journal"}  # logs of sessions, for `rgpu logs`
    files = [path for path in pool.folder.rglob("*") if "log" not in path.name and not kept & set(path.parts)]
    return {"workers": len(pool.rgpu("ps")), "processes": len(below(daemon)),
            "descriptors": len(os.listdir(f"/proc/{daemon}/fd")), "files": len(files), "gpu_mib": used_of_gpu()}


def spread(values: list[float]) -> dict[str, float]:
    """Median, 95th of a hundred, longest."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "longest": ordered[-1]}


def measure(pool: LocalPool, options: argparse.Namespace) -> dict[str, Any]:
    """One pass: all up, looked at, all ended."""
    daemon = int(json.loads((pool.folder / "pool" / "nodes" / "node-a" / "server.json").read_bytes())["pid"])
    run = [str(Path(sys.executable).with_name("rgpu")), "run", "-q", "--memory", "64MiB"]
    if not Path(run[0]).exists():
        run[:1] = [sys.executable, "-m", "rgpu.cli.main"]
    before, natively, started = left(pool, daemon), [], []
    begun = time.monotonic()
    for number in range(options.sessions):
        time.sleep(max(0.0, begun + options.within * number / options.sessions - time.monotonic()))
        command = [*run, "--name", f"many-{number}", "--", sys.executable, "-c", PROGRAM]
        started.append(Started(command, pool.environment))
        if options.device != "cpu" and number % 8 == 0:
            native = Started([sys.executable, "-c", PROGRAM], dict(os.environ))
            native.up(60)
            natively.append(native.seconds)
            native.end()
    for program in started:
        program.up(120)
    rows = [row for row in pool.rgpu("ps") if row["session"].startswith("many-")]
    assert len(rows) == options.sessions, f"{len(rows)} of {options.sessions} sessions"
    during = {"gpu_mib": used_of_gpu(), "worker_mib": statistics.median(
        share_of_pages(row["worker_pid"]) for row in rows) / 2**20,
        "client_mib": statistics.median(sum(map(share_of_pages, below(one.pid))) for one in started) / 2**20}
    ends = [program.end() for program in started]
    deadline = time.monotonic() + SETTLE
    while (after := left(pool, daemon))["workers"] and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(3)  # warm workers are made again
    return {"sessions": options.sessions, "within": options.within, "start": spread([one.seconds for one in started]),
            "end": spread(ends), "native": spread(natively) if natively else None, "during": during,
            "before": before, "after": left(pool, daemon) if not after["workers"] else after}


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--within", type=float, default=60.0, help="seconds over which they are started")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rgpu-many-") as folder, \
            LocalPool(Path(folder), nodes=1, lease=10.0, device=options.device) as pool:
        found = measure(pool, options)
    found["environment"] = environment()
    options.output.mkdir(parents=True, exist_ok=True)
    place = options.output / f"{time.strftime('%F')}-many-starts.json"
    place.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "environment"}, indent=1))


if __name__ == "__main__":
    main()
