#!/usr/bin/env python3
"""What a program keeps of its rate beside a kernel of another session that does not end.

    python bench/pool/neighbours.py [--seconds 4] [--sides native,remote] [--mps 60]
    python bench/pool/neighbours.py --device cpu --seconds 2 --turns 100 --sides remote

Neighbours: tiny kernels, each awaited; kernels of a millisecond, queued. Beside a kernel of one block, and of more
blocks than the GPU holds. --mps: also as clients of an MPS server, none with more than that per cent of the GPU (the
remote side by `rgpu server --mps`). A neighbour is started for each row: under MPS it may not outlive the other one.
Writes DATE-neighbours.json to --output ($OUT, or bench/results).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rgpu.server.node.devices.mps_server import MpsServer  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool  # noqa: E402

PROGRAM = str(ROOT / "bench" / "workloads" / "driver" / "neighbour.py")
KERNELS = {"one block": "1", "the whole GPU": "4096"}


class Running:
    """A program, and the lines that it prints."""

    def __init__(self, command: list[str], surroundings: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         stdin=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())

    def wait_lines(self, count: int, seconds: float) -> None:
        """Raises :class:`SystemExit` with what it said."""
        deadline = time.monotonic() + seconds
        while len(self.lines) < count:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.end()
                raise SystemExit(f"a program said only {self.lines[-20:]}")
            time.sleep(0.02)

    def end(self) -> None:
        """End it, in order if it can."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Start = Callable[..., Running]


def rate(program: Running, seconds: int) -> float:
    """What it did a second, in the next few; a slow one may say nothing for long: then less than one."""
    before = len(program.lines)
    deadline = time.monotonic() + 4 * seconds + 10
    while len(program.lines) < before + seconds + 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [float(line) for line in program.lines[before + 1:]]
    return statistics.median(found) if found else 0.0


def measure(start: Start, seconds: int, turns: int) -> list[dict[str, Any]]:
    """Rows of one side."""
    rows = []
    for kind, words in (("tiny", []), ("queue", [str(turns)])):
        for name, blocks in KERNELS.items():
            neighbour = start(f"neighbour-{kind}-{blocks}", kind, *words)
            try:
                neighbour.wait_lines(5, 90)
                alone = rate(neighbour, seconds)
                other = start(f"endless-{kind}-{blocks}", "endless", blocks)
                try:
                    other.wait_lines(1, 90)
                    time.sleep(1)
                    beside = rate(neighbour, seconds)
                finally:
                    other.end()
            finally:
                neighbour.end()
            time.sleep(3)
            rows.append({"neighbour": kind, "beside": name, "alone": alone, "rate": beside,
                         "kept": round(beside / alone, 4) if alone else None})
            print(json.dumps(rows[-1]), flush=True)
    return rows


@contextlib.contextmanager
def mps(folder: Path, share: int) -> Iterator[dict[str, str]]:
    """An MPS server of our own, and what makes processes use it. No setting of the card is changed."""
    server = MpsServer(folder, share)
    server.start()
    try:
        yield server.environment()
    finally:
        server.stop()


def side(name: str, options: argparse.Namespace, more: dict[str, str]) -> list[dict[str, Any]]:
    """Measure natively, or in sessions of a pool of one node. ``more``: variables of the programs, of the node."""
    print(name, "with MPS" if more else "", flush=True)
    if name == "native":
        return measure(lambda _, *words: Running([sys.executable, PROGRAM, *words], {**os.environ, **more}),
                       options.seconds, options.turns)
    os.environ.update(more)
    with tempfile.TemporaryDirectory(prefix="rgpu-neighbours-") as folder, \
            LocalPool(Path(folder), nodes=1, lease=10.0, device=options.device) as pool:
        return measure(lambda session, *words: Running(
            [sys.executable, "-m", "rgpu.cli.main", "run", "-q", "--name", session, "--memory", "256MiB", "--compute",
             "50", "--", sys.executable, PROGRAM, *words],
            {name: value for name, value in pool.environment.items() if name != "CUDA_VISIBLE_DEVICES"}),
            options.seconds, options.turns)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=200_000, help="of the queued kernels' loop (about a millisecond)")
    parser.add_argument("--sides", default="native,remote")
    parser.add_argument("--mps", type=int, default=0, metavar="PERCENT", help="as clients of an MPS server, too")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(), "rows": {}}
    for name in options.sides.split(","):
        found["rows"][name] = side(name, options, {})
        if options.mps and name == "remote":
            found["rows"][f"remote, MPS {options.mps}"] = side(name, options, {"RGPU_MPS": str(options.mps)})
        elif options.mps:
            with tempfile.TemporaryDirectory(prefix="rgpu-mps-") as folder, mps(Path(folder), options.mps) as more:
                found["rows"][f"{name}, MPS {options.mps}"] = side(name, options, more)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{time.strftime('%F')}-neighbours.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
