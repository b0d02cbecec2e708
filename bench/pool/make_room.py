#!/usr/bin/env python3
"""A full pool lets a whole-GPU request in: the transcript of a real run, digests compared.

    python bench/pool/make_room.py [--device cpu --device cpu] [--share 0.5] [--output FILE] [-- PROGRAM ARGUMENT…]

Two nodes with a device each (`--device cuda:0 --device cuda:1`) have one session of that share. A
request for a whole device is refused, although as much is free in total; with `--queue` it waits,
and with `rgpu rebalance --auto on` it gets in after the moves that `rgpu rebalance` had printed.
PROGRAM must print a line `digest HEX` (default: examples/heat.py) and run long enough to be moved;
on GPUs with PyTorch, for example:

    python bench/pool/make_room.py --device cuda:0 --device cuda:1 -- bench/workloads/training.py --steps 20000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pools.pool import LocalPool, Program  # noqa: E402

HEAT = [str(ROOT / "examples" / "heat.py"), "--n", "192", "--steps", "40000", "--report", "2000"]


class Transcript:
    """What a person would see, as it happens, with the seconds since the beginning."""

    def __init__(self, pool: LocalPool, file: TextIO | None) -> None:
        self.pool, self.file, self.began = pool, file, time.monotonic()

    def say(self, line: str) -> None:
        for out in filter(None, (sys.stdout, self.file)):
            print(line, file=out, flush=True)

    def verb(self, *words: str) -> str:
        """Run a verb as people do; what it printed."""
        self.say(f"\n[{time.monotonic() - self.began:5.1f} s] $ rgpu {' '.join(words)}")
        done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", *words], env={
            **self.pool.environment, "COLUMNS": "160"}, cwd=ROOT, capture_output=True, text=True, timeout=120)
        for line in (done.stdout + done.stderr).rstrip().splitlines():
            self.say(line.rstrip())
        return done.stdout + done.stderr

    def start(self, name: str, command: list[str], *options: str) -> Program:
        shown = " ".join(["rgpu run --name", name, *options, "--", *(Path(part).name for part in command)])
        self.say(f"\n[{time.monotonic() - self.began:5.1f} s] $ {shown} &")
        return self.pool.run(sys.executable, *command, name=name, options=options)


def play(show: Transcript, command: list[str], share: str) -> bool:
    """Whether everything came as it should."""
    pool = show.pool
    hosts = [row["host"] for row in pool.living()]
    programs = []
    for name, host in zip(("first", "second"), hosts, strict=False):
        programs.append(show.start(name, command, "--gpus", share, "--host", host))
        pool.wait_state(name, "running", 120)
        programs[-1].wait_lines(1, 120)
    show.verb("nodes")
    refused = show.start("too-much", command, "--gpus", "1")
    refused.process.wait(120)
    for line in [line for line in refused.errors if "no session" in line]:
        show.say(line)
    whole = show.start("whole", command, "--gpus", "1", "--queue")
    _until(lambda: any("waits" in line for line in whole.errors))
    for line in [line for line in whole.errors if "waits" in line]:
        show.say(line)
    show.verb("ps")
    show.verb("rebalance")
    predicted = {move["session"] for move in pool.rgpu("rebalance")["moves"]}
    show.verb("rebalance", "--auto", "on")
    pool.wait_state("whole", "running", 120)
    show.verb("ps")
    moved = {row["session"] for row in pool.rgpu("ps") if row["epoch"] > 1}
    show.verb("history", "whole")
    for name in sorted(moved):
        show.verb("history", name)
    digests = {program.name: program.finish(900) for program in [*programs, whole]}
    alone = pool.run(sys.executable, *command, name="alone", options=("--gpus", "1")).finish(900)
    show.say("")
    for name, digest in {**digests, "nobody beside it, never moved": alone}.items():
        show.say(f"digest {digest[:16]}…  {name}")
    good = moved == predicted and set(digests.values()) == {alone}
    show.say(f"moved: {', '.join(sorted(moved))}; predicted: {', '.join(sorted(predicted))}; "
             f"{'all as it should be' if good else 'WRONG'}")
    return good


def _until(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("the queue said nothing")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="append", help="of each of the two nodes (default: cpu)")
    parser.add_argument("--share", default="0.5", help="of the two sessions that are there first")
    parser.add_argument("--output", type=Path, help="keep the transcript there, too")
    parser.add_argument("command", nargs="*", help="a Python program and its arguments")
    options = parser.parse_args()
    devices = options.device or ["cpu", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        pool = LocalPool(Path(folder), nodes=2, lease=5.0, devices=tuple(devices))
        with pool, open(options.output or "/dev/null", "w") as file:
            return 0 if play(Transcript(pool, file if options.output else None), options.command or HEAT,
                             options.share) else 1


if __name__ == "__main__":
    sys.exit(main())
