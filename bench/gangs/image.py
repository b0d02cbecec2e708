#!/usr/bin/env python3
"""How long a job of several ranks stands still for a checkpoint of all, and what its restoring elsewhere takes.

    python bench/gangs/image.py --device cuda:0,cuda:1 --mib 16384        four ranks, two nodes on both GPUs

Two checkpoints (the second of what changed since), then the host of all ranks is killed, and they go on on the other
node from the checkpoint. Writes DATE-gang-image.json to --output ($OUT, or bench/results).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool, Program  # noqa: E402

RANKS = ROOT / "bench" / "gangs" / "image_ranks.py"


def steps(program: Program, rank: int = 0) -> list[float]:
    """Return the seconds of each step of a rank."""
    return [float(words[4]) for line in list(program.lines)
            if (words := line.split())[:3:2] == ["rank", "step"] and int(words[1]) == rank]


def wait_steps(program: Program, count: int, seconds: float) -> None:
    """Wait until rank 0 has made so many. Raises SystemExit."""
    deadline = time.monotonic() + seconds
    while len(steps(program)) < count:
        if program.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{len(steps(program))} steps of {count}: {program.errors[-20:]}")
        time.sleep(0.01)


def kill(pool: LocalPool, host: str) -> None:
    """Kill a node's daemon and all its workers."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ValueError):
            line = path.read_bytes().replace(b"\0", b" ")
            if str(pool.folder).encode() in line and f"/{host}/".encode() in line or f"--host {host} ".encode() in line:
                os.kill(int(path.parent.name), signal.SIGKILL)


def checkpoint(pool: LocalPool, program: Program, name: str) -> dict[str, Any]:
    """Take one of all ranks; how long the job stood still, beyond a step."""
    before = len(steps(program))
    usual = statistics.median(steps(program)[-20:])
    began = time.monotonic()
    done = pool.rgpu("checkpoint", f"{name}.0", timeout=280)
    seconds = time.monotonic() - began
    wait_steps(program, len(steps(program)) + 5, 60)
    return {"sessions": done["together"], "seconds": round(seconds, 2), "step_ms": round(usual * 1e3, 1),
            "longest_step_ms": round(max(steps(program)[max(0, before - 1):]) * 1e3, 1)}


def lost(pool: LocalPool, program: Program, host: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill the host of all ranks; how long no step came, and where they go on."""
    made, began, names = len(steps(program)), time.monotonic(), [f"image.{rank}" for rank in range(options.ranks)]
    kill(pool, host)
    while host in (there := {pool.session(name)["host"] for name in names}) or len(there) != 1:
        if time.monotonic() > began + options.limit:
            raise SystemExit(f"the ranks are on {there}")
        time.sleep(0.1)
    wait_steps(program, len(steps(program)) + 20, options.limit)
    return {"longest_step_s": round(max(steps(program)[made:]), 2), "host": sorted(there)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=16384, help="of each rank")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a step to come")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    gpus = options.device.count(",") + 1
    with tempfile.TemporaryDirectory() as folder, LocalPool(Path(folder), 2, 4.0, options.device) as pool:
        over = Path(folder) / "over"
        lines = [shlex.join(map(str, (sys.executable, RANKS, Path(folder) / "id", rank, options.ranks, options.mib,
                                      over))) for rank in range(options.ranks)]
        whole = "\n".join([*(f"CUDA_VISIBLE_DEVICES={rank} {line} &" for rank, line in enumerate(lines)), "wait"])
        program = pool.run("sh", "-c", whole, name="image", options=(
            "--ranks", str(options.ranks), "--gpus", f"{0.9 * gpus / options.ranks:.2f}", "--memory",
            f"{options.mib + 512}MiB"))
        try:
            wait_steps(program, 30, options.limit)
            hosts = {pool.session(f"image.{rank}")["host"] for rank in range(options.ranks)}
            found["first"] = checkpoint(pool, program, "image")
            wait_steps(program, len(steps(program)) + 20, options.limit)
            found["second"] = checkpoint(pool, program, "image")
            (host,) = hosts
            found["host killed"] = lost(pool, program, host, options)
            over.touch()
            program.process.wait(options.limit)
            program.finish_reading()
            found["memory"] = sorted(line for line in program.lines if line.endswith("same") or "differ" in line)
        except BaseException:
            (options.output / "gang-image-failed.log").write_text(pool.logs())
            raise
    print(json.dumps(found, indent=1))
    path = options.output / f"{time.strftime('%Y-%m-%d')}-gang-image.json"
    path.write_text(json.dumps({**environment(), "command": " ".join(sys.argv), **found}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
