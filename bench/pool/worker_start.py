#!/usr/bin/env python3
"""Start of a worker, forked from a template and executed, in turns: seconds until it serves, and of processors.

    python bench/pool/worker_start.py [--runs 9] [--device cuda:0]

Workers of a device of one node on this host, in the box that the host allows; no warm workers. Prints medians,
and their ratio. The template's own start is not counted; it is printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rgpu.server.box.walls import Mode  # noqa: E402
from rgpu.server.node.workers import handles  # noqa: E402
from rgpu.server.node.workers.boxes import Boxes  # noqa: E402
from rgpu.server.template import forking  # noqa: E402

WAYS = {"forked": forking.KINDS, "executed": frozenset()}


async def nobody(session: str, event: str, values: dict[str, Any]) -> None:
    """Hear nothing of the worker."""


async def start(boxes: Boxes, device: str, session: str, way: str) -> tuple[float, float]:
    """Start a worker and end it; return the seconds until it is connected to, and what it has used of a processor."""
    forking.KINDS = WAYS[way]
    began = time.monotonic()
    handle = await handles.start(boxes.directory, session, epoch=1, device=device, quota=1 << 20, state="empty",
                                 on_event=nobody, boxes=boxes)
    seconds = time.monotonic() - began
    fields = Path(f"/proc/{handle.pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc(5)
    os.kill(handle.pid, signal.SIGKILL)
    await handle.closed.wait()
    boxes.release(handle.home)
    return seconds, used


async def measure(boxes: Boxes, device: str, runs: int) -> None:
    """Print a row for each way, and the ratio."""
    print(f"first, with the template's start: {(await start(boxes, device, 'first', 'forked'))[0]:.2f} s")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(runs):
        for way in WAYS:
            found[way].append(await start(boxes, device, f"{way}-{number}", way))
    medians = {way: [statistics.median(values) for values in zip(*rows, strict=True)] for way, rows in found.items()}
    for way, (seconds, used) in medians.items():
        print(f"{way:9s} {seconds:.3f} s until it serves, {used:.2f} s of a processor")
    print(f"ratio {medians['forked'][0] / medians['executed'][0]:.2f}")


def main() -> None:
    """Measure, and leave nothing behind."""
    parser = argparse.ArgumentParser(description="Start of a worker, forked and executed.")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", default="cpu:0")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rgpu-bench-") as folder:
        directory = Path(folder) / "pool" / "nodes" / "a"
        directory.mkdir(parents=True)
        asyncio.run(measure(Boxes.of_node(directory, Mode.AUTO), options.device, options.runs))


if __name__ == "__main__":
    main()
