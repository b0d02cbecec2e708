#!/usr/bin/env python3
"""What the death of a worker, then of its whole node, costs a training with automatic checkpoints.

    python bench/checkpoint/recovery.py --device cuda:0 --device cuda:1 [--steps 1500] [--every 10] [--lease 2]
    python bench/checkpoint/recovery.py --device cpu --device cpu -- tests/scenarios/programs/steps.py --steps 300

One program (default: GPT-2 124M, bf16, bench/workloads/gpt2_steps.py) runs four times: without recovery, undisturbed
with a checkpoint each --every seconds, without recovery again, and disturbed: the worker is killed some time after the
first checkpoint, and when that is survived and another checkpoint taken, the whole node (worker and daemon). Losses are
compared bit by bit.

Rows: `worker` and `node`: seconds from the kill to the next step's loss, of which
detect (until the pool has decided on a recovery), start (until a worker stands with the checkpoint restored) and
replay (attach, replay of the journal, the step itself); steps_replayed and image_age: the work since the checkpoint.
`steady`: the mean step of the run with checkpoints by that of the runs without recovery before and after it, by its own
median, and by the mean of its steps while no checkpoint was written (`over_between`: what checkpoints cost, in one run,
whatever the machine does meanwhile); `images_ms`: of each checkpoint how much longer the steps took while it was made
than as many around it, all together, and `over_around`, the mean of that by the time from one checkpoint to the next;
with the steps around each checkpoint, and what each checkpoint says of its pause. `--part steady` leaves the disturbed
run out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.support import apart  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool, Program  # noqa: E402

WORKLOAD = ROOT / "bench" / "workloads" / "gpt2_steps.py"
WARM = 20  #: steps at the beginning that no mean counts
SLACK = 0.3  #: seconds behind a checkpoint and before the next one whose steps count as beside it


@dataclass
class Run:
    """The steps of one run: (wall time in s, the loss as printed), and the digest at the end."""

    times: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    digest: str = ""

    @staticmethod
    def of(lines: list[str]) -> Run:
        run = Run()
        for line in lines:
            kind, *rest = line.split()
            if kind == "step":
                run.times.append(float(rest[1]))
                run.losses.append(rest[2])
            elif kind == "digest":
                run.digest = rest[0]
        return run

    def steps(self) -> list[float]:
        """Seconds of each step after the warm ones."""
        return [b - a for a, b in zip(self.times[WARM:], self.times[WARM + 1:], strict=False)]

    def around(self, checkpoint: float, before: float = 6.0, after: float = 1.0) -> list[tuple[float, float]]:
        """(seconds from a checkpoint's publication to the step's end, ms of the step), of the steps beside it."""
        return [(round(b - checkpoint, 3), round((b - a) * 1e3, 1))
                for a, b in zip(self.times[WARM:], self.times[WARM + 1:], strict=False)
                if checkpoint - before < b < checkpoint + after]

    def excess(self, began: float, ended: float, beside: float = 3.0) -> float | None:
        """By how many ms the steps of that time were longer, all together, than as many of the seconds around it.

        Those of before and of behind it count alike, as their means: these machines drift, and a step's time is skewed,
        so that a median would call the undisturbed ones longer than usual.
        """
        steps = list(zip(self.times[WARM:], self.times[WARM + 1:], strict=False))
        during = [b - a for a, b in steps if b > began and a < ended]
        usual = [statistics.mean(some) for some in (
            [b - a for a, b in steps if began - beside < a and b < began],
            [b - a for a, b in steps if ended < a and b < ended + beside]) if some]
        return (sum(during) - statistics.mean(usual) * len(during)) * 1e3 if usual and during else None

    def between(self, checkpoints: list[float], every: float) -> list[float]:
        """Of these, the steps while no checkpoint was written: the next is asked for so long after the last one."""
        return [b - a for a, b in zip(self.times[WARM:], self.times[WARM + 1:], strict=False)
                if any(checkpoint + SLACK < a and b < checkpoint + every - SLACK for checkpoint in checkpoints)]


class Bench:
    """One pool, and what is asked of it."""

    def __init__(self, pool: LocalPool, command: list[str], options: argparse.Namespace,
                 processors: apart.Processors) -> None:
        self.pool, self.command, self.options, self.processors = pool, command, options, processors

    def start(self, name: str, *options: str) -> Program:
        with self.processors.for_a_program():
            return self.pool.run(sys.executable, *self.command, name=name,
                                 options=("--memory", self.options.memory, "--host", "node-a", *options))

    def end(self, program: Program, seconds: float) -> Run:
        code = program.process.wait(seconds)
        for thread in program._threads:
            thread.join(5)
        if code:
            raise SystemExit(f"{program.name} ended with {code}: {program.errors[-20:]}\n{self.pool.logs()}")
        return Run.of(program.lines)

    def checkpoints(self, name: str) -> list[dict[str, Any]]:
        """The checkpoints that are on record, oldest first."""
        return [e for e in self.history(name) if e["decision"] == "publish_image"]

    def history(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.pool.rgpu("history", name, "--limit", "500")
        return found

    def statistics(self, name: str) -> list[dict[str, Any]]:
        """What taking each checkpoint that is still there cost: its pause and the parts of it, oldest first."""
        rows = sorted(self.pool.rgpu("image", "ls", name), key=lambda row: row["created"])
        return [{"begun": row["created"], **self.pool.rgpu("image", "show", row["image"])["statistics"]}
                for row in rows]

    def wait_checkpoint(self, name: str, count: int, seconds: float = 120) -> int:
        """Until so many checkpoints are on record; how many are."""
        deadline = time.monotonic() + seconds
        while (found := len(self.checkpoints(name))) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} has {found} checkpoints, {count} were expected\n{self.pool.logs()}")
            time.sleep(0.5)
        return found

    def lose(self, program: Program, whole: bool) -> dict[str, Any]:
        """Kill the worker, or worker and daemon; what it cost."""
        row = self.pool.session(program.name)
        victims = [int(row["worker_pid"])]
        if whole:
            victims.append(int(self.pool.node(row["host"])["pid"]))
        checkpoint = self.checkpoints(program.name)[-1]["when"]
        before = len(program.lines)
        killed = time.time()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while not (later := [t for t in Run.of(program.lines[before:]).times if t > killed + 0.2]):
            if time.monotonic() > deadline:
                raise SystemExit(f"no step for 120 s after the kill\n{self.pool.logs()}")
            time.sleep(0.01)
        after = self.pool.session(program.name)
        moments = {e["decision"]: e["when"] for e in reversed(self.history(program.name)) if e["when"] > killed}
        decided, started = moments["recover"], moments["started"]
        steps = [t for t in Run.of(program.lines).times if checkpoint < t <= killed]
        return {"name": "node" if whole else "worker", "to_next_step_s": later[0] - killed,
                "detect_s": decided - killed, "start_s": started - decided, "replay_s": later[0] - started,
                "steps_replayed": len(steps), "image_age_s": killed - checkpoint, "epoch": after["epoch"],
                "from": row["host"], "to": after["host"]}


def measure(bench: Bench) -> dict[str, Any]:
    options = bench.options
    limit = 300.0
    bare = bench.end(bench.start("bare", "--recover", "off"), limit)
    every = ("--checkpoint-every", str(options.every))
    calm_program = bench.start("calm", *every)
    calm = bench.end(calm_program, limit)
    taken, statistics_of = [e["when"] for e in bench.checkpoints("calm")], bench.statistics("calm")
    again = bench.end(bench.start("bare-again", "--recover", "off"), limit)
    rows, after = disturb(bench, every, limit) if options.part == "all" else ([], calm)
    return {
        "rows": rows,
        "identical": {"losses": after.losses == calm.losses == bare.losses, "digest": after.digest == calm.digest ==
                      bare.digest, "steps": len(after.losses)},
        "steady": steady(calm, bare.steps() + again.steps(), taken, statistics_of, options.every),
    }


def disturb(bench: Bench, every: tuple[str, str], limit: float) -> tuple[list[dict[str, Any]], Run]:
    """The run in which the worker is killed, and after another checkpoint its node."""
    program = bench.start("disturbed", *every)
    rows: list[dict[str, Any]] = []
    count = 0
    for whole in (False, True):
        count = bench.wait_checkpoint("disturbed", count + 1)
        time.sleep(bench.options.every / 2)
        rows.append(bench.lose(program, whole))
    return rows, bench.end(program, limit)


def steady(calm: Run, bare_steps: list[float], taken: list[float], checkpoints: list[dict[str, Any]],
           every: float) -> dict[str, Any]:
    """``taken``: when each checkpoint was published; ``checkpoints``: what each says of itself."""
    calm_steps, between = calm.steps(), calm.between(taken, every)
    costs = [(excess, checkpoint["seconds"]) for when, checkpoint in zip(taken, checkpoints, strict=False)
             if (excess := calm.excess(when - checkpoint["seconds"] - SLACK, when + SLACK)) is not None]
    return {
        "images": len(taken), "mean_ms": statistics.mean(calm_steps) * 1e3,
        "median_ms": statistics.median(calm_steps) * 1e3, "longest_ms": max(calm_steps) * 1e3,
        "bare_mean_ms": statistics.mean(bare_steps) * 1e3, "bare_median_ms": statistics.median(bare_steps) * 1e3,
        "over_bare": statistics.mean(calm_steps) / statistics.mean(bare_steps),
        "mean_over_median": statistics.mean(calm_steps) / statistics.median(calm_steps), "between": len(between),
        "images_ms": [round(excess) for excess, _ in costs],
        "over_around": 1 + statistics.mean(excess / 1e3 / (every + seconds) for excess, seconds in costs)
        if costs else None,
        "around": [calm.around(checkpoint) for checkpoint in taken], "statistics": checkpoints,
        "over_between": statistics.mean(calm_steps) / statistics.mean(between) if between else None}


def keep_logs(folder: Path, into: Path) -> None:
    """Whole, as NODE-…-NAME.log: what happened between a kill and the next step stands there with its times."""
    into.mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*.log"):
        shutil.copy(path, into / "-".join(path.relative_to(folder).parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="append", help="of each of the two nodes (default: cpu)")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between automatic checkpoints")
    parser.add_argument("--part", choices=("all", "steady"), default="all")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"),
                        help="folder for the figures")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of the pool's daemons and workers")
    parser.add_argument("command", nargs="*", help="another program and its arguments")
    apart.add_option(parser)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)  # a folder; what is in its way is found out now
    processors = apart.Processors(options.program_processors)
    command = options.command or [str(WORKLOAD), "--steps", str(options.steps)]
    devices = tuple(options.device or ("cpu", "cpu"))
    with tempfile.TemporaryDirectory(prefix="rgpu-recovery-") as folder, \
            LocalPool(Path(folder), nodes=2, lease=options.lease, devices=devices) as pool:
        try:
            found = measure(Bench(pool, command, options, processors))
        finally:
            if options.logs is not None:
                keep_logs(Path(folder), options.logs)
    result = {**environment(), "command": " ".join(sys.argv), "lease_s": options.lease, "every_s": options.every,
              **found}
    shown = {**found, "steady": {name: value for name, value in found["steady"].items()
                                 if name not in ("around", "statistics")}}
    print(json.dumps(shown, indent=1))
    path = options.output / f"{time.strftime('%Y-%m-%d')}-recovery.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")
    if not all(found["identical"].values()):
        raise SystemExit("the losses differ from the undisturbed run's")


if __name__ == "__main__":
    main()
