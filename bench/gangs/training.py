#!/usr/bin/env python3
"""A job of several ranks by torchrun, natively and remotely: the same parameters? What cost a step, a move, a loss?

    python bench/gangs/training.py                                two ranks, DDP and FSDP2 of GPT-2, on cuda:0
    python bench/gangs/training.py --ranks 4 --kinds ddp --steps 60
    python bench/gangs/training.py --kinds copies --runs remote   without PyTorch's kernels

Runs: native; remote and undisturbed; remote, rank 1 moved to the other node and back; remote, the worker of the last
rank killed. Two nodes share the device. Natively the ranks share one GPU by NCCL_HOSTID, over sockets (its sums of more
than two ranks have another order). Writes DATE-gangs.json to --output ($OUT, or bench/results), and
of a run that failed the pool's logs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool, VerbError  # noqa: E402

WORKLOAD = ROOT / "bench" / "gangs" / "gpt2_ranks.py"
FIRST = 4  #: steps that are not counted: what is loaded, autotuned, allocated


class Job:
    """One run of all ranks. ``steps``: rank 0's seconds of each step. ``lines`` come while it runs."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], limit: float) -> None:
        self.process = subprocess.Popen(command, env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        self.steps: list[float] = []
        self.digests: dict[int, str] = {}
        self.other: list[str] = []
        self._limit = time.monotonic() + limit
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if words[:1] != ["rank"] or len(words) < 4:
                self.other.append(line.rstrip())
            elif words[2] == "digest":
                self.digests[int(words[1])] = words[3]
            elif words[1] == "0":
                self.steps.append(float(words[4]))

    def until(self, steps: int) -> None:
        """Wait until rank 0 has made so many. Raises SystemExit where the job ended, or takes too long."""
        while len(self.steps) < steps:
            if self.process.poll() is not None or time.monotonic() > self._limit:
                self.stop(f"it made {len(self.steps)} steps of {steps}")
            time.sleep(0.01)

    def finish(self) -> dict[str, Any]:
        """Wait for the end; what it printed. Raises SystemExit where it failed."""
        try:
            code = self.process.wait(max(1.0, self._limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stop("it took too long")
        self._reader.join()
        if code or len(set(self.digests.values())) != 1:
            self.stop(f"exit {code}, digests {self.digests}")
        counted = self.steps[FIRST:]
        return {"digest": next(iter(self.digests.values())), "steps": len(self.steps),
                "step_ms": round(statistics.median(counted) * 1e3, 2), "longest_ms": round(max(counted) * 1e3, 1)}

    def stop(self, why: str) -> None:
        """End it. Raises SystemExit."""
        self.process.kill()
        tail = "\n".join(self.other[-60:])
        raise SystemExit(f"{' '.join(map(str, self.process.args))}: {why}\n{tail}")  # type: ignore[arg-type]


def moved(pool: LocalPool, name: str, job: Job, steps: int) -> list[dict[str, Any]]:
    """Rank 1 to the other node and back."""
    found = []
    for part in (3, 2):
        job.until(steps // part)
        here = pool.session(f"{name}.1")["host"]
        there = next(host["host"] for host in pool.living() if host["host"] != here)
        began = time.monotonic()
        try:
            pool.rgpu("migrate", f"{name}.1", there)
            found.append({"to": there, "seconds": round(time.monotonic() - began, 2)})
        except VerbError as error:
            found.append({"to": there, "refused": error.text.strip()})
    return found


def killed(pool: LocalPool, name: str, job: Job, steps: int, ranks: int) -> list[dict[str, Any]]:
    """The worker of the last rank, once."""
    job.until(steps // 2)
    worker = pool.session(f"{name}.{ranks - 1}")["worker_pid"]
    os.kill(worker, signal.SIGKILL)
    return [{"killed": worker}]


def remote(pool: LocalPool, name: str, line: Sequence[str], options: argparse.Namespace,
           disturb: Callable[[Job], list[dict[str, Any]]] = lambda job: []) -> dict[str, Any]:
    """One run on the pool."""
    environ = dict(pool.environment)
    environ.pop("CUDA_VISIBLE_DEVICES", None)  # of this machine's GPUs, not of a session's
    job = Job([sys.executable, "-m", "rgpu.cli.main", "run", "-q", "--name", name, "--ranks", str(options.ranks),
               "--gpus", f"{0.9 / options.ranks:.2f}", "--memory", options.memory, "--", *line], environ,
              options.limit)
    events = disturb(job)
    return {**job.finish(), "events": events}


def of_kind(pool: LocalPool, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """All runs of one kind of training; a failed one has the reason."""
    line = [options.torchrun, "--nproc-per-node", str(options.ranks), str(WORKLOAD), "--kind", kind, "--steps",
            str(options.steps)]
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "native": lambda: Job(line, {**os.environ, "ONE_GPU": "1"}, options.limit).finish(),
        "remote": lambda: remote(pool, f"{kind}-plain", line, options),
        "moved": lambda: remote(pool, f"{kind}-moved", line, options,
                                lambda job: moved(pool, f"{kind}-moved", job, options.steps)),
        "killed": lambda: remote(pool, f"{kind}-killed", line, options,
                                 lambda job: killed(pool, f"{kind}-killed", job, options.steps, options.ranks))}
    rows: dict[str, Any] = {}
    for name, run in runs.items():
        if name not in options.runs.split(","):
            continue
        try:
            rows[name] = row = run()
        except SystemExit as failure:
            rows[name] = {"failed": str(failure)}
            (options.output / f"gangs-{kind}-{name}.log").write_text(f"{failure}\n{pool.logs()}")
            print(f"{kind} {name}: FAILED {failure}", flush=True)
            continue
        if options.logs:
            (options.output / f"gangs-{kind}-{name}.log").write_text(pool.logs(1 << 20))
        same = row["digest"] == next(iter(rows.values())).get("digest")
        print(f"{kind} {name}: {'SAME' if same else 'OTHER'} {row['digest'][:16]} step {row['step_ms']} ms, "
              f"longest {row['longest_ms']} ms {row.get('events') or ''}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", default="ddp,fsdp")
    parser.add_argument("--memory", default="16GiB")
    parser.add_argument("--torchrun", default=shutil.which("torchrun") or "torchrun")
    parser.add_argument("--runs", default="native,remote,moved,killed")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a run")
    parser.add_argument("--logs", action="store_true", help="keep the logs of every run")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalPool(Path(folder), 2, 10.0, options.device) as pool:
        found = {kind: of_kind(pool, kind, options) for kind in options.kinds.split(",")}
    path = options.output / f"{time.strftime('%Y-%m-%d')}-gangs.json"
    path.write_text(json.dumps({**environment(), "command": " ".join(sys.argv), "ranks": options.ranks, **found},
                               indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
