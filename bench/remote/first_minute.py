#!/usr/bin/env python3
"""The first minute of a user, native and remote in turns: starts, first use of kernels, small calls, copies.

    python bench/remote/first_minute.py                           all rows on cuda:0 (PyTorch's where it is there)
    python bench/remote/first_minute.py --device cpu --rounds 2   without a GPU; nothing native but starts
    python bench/remote/first_minute.py --link 10g,0.2ms          a link of 10 Gb/s, 0.2 ms round trip (root, tc)

Sides: native, loopback (TCP, recovery on) and shared (bulk through shared memory, recovery on). Each round runs every
side once, beginning with another one; the table has medians over the rounds and the ratio to native. With a fresh pool
the first round of a side is what the very first program on a node costs (row names end in "first round"). Of remote
programs the JSON has what loads of modules cost (`modules` of `rgpu ps`). Writes DATE-first-minute.json to --output
($OUT, or bench/results) after each round. --link shapes the loopback device of this machine, every connection on it,
until the run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.support.pool import DIRECT, BenchPool  # noqa: E402
from bench.support.workload import Side, command_of  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

NATIVE = "native"
REMOTE = {"loopback": ("--recover", "on", "--same-host", "off"), "shared": ("--recover", "on", "--same-host", "auto")}
HIGHER = frozenset({"GB/s", "TFLOP/s"})
_LINK = re.compile(r"(\d+(?:\.\d+)?)g,(\d+(?:\.\d+)?)ms")


def link_of(text: str) -> tuple[float, float]:
    """``10g,0.2ms`` as Gb/s and ms of round trip. Raises ValueError."""
    found = _LINK.fullmatch(text)
    if not found or not float(found[1]):
        raise ValueError(f"{text!r} is no link: say 10g,0.2ms")
    return float(found[1]), float(found[2])


@contextlib.contextmanager
def shaped(link: tuple[float, float] | None) -> Iterator[str]:
    """The loopback device as a link of that rate and round trip; gives why it is none, empty where it is."""
    if link is None:
        yield ""
        return
    gigabits, trip = link
    try:
        done = subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "limit", "200000", "delay",
                               f"{trip * 500:g}us", "rate", f"{gigabits * 1000:g}mbit"], capture_output=True, text=True)
        why = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        why = f"tc: {error.strerror}"
    try:
        yield why
    finally:
        if not why:
            subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False)


def summary(samples: dict[str, dict[str, list[float]]], units: dict[str, str]) -> list[dict[str, Any]]:
    """Rows (name, unit, medians by side, ratio to native: above 1 is slower) of samples by row and side."""
    rows = []
    for name, sides in samples.items():
        medians = {side: statistics.median(values) for side, values in sides.items() if values}
        native = medians.get(NATIVE)
        ratios = {side: (native / value if units[name] in HIGHER else value / native)
                  for side, value in medians.items() if side != NATIVE and native and value}
        rows.append({"row": name, "unit": units[name], "medians": medians, "ratios": ratios, "samples": sides})
    return rows


def text(rows: Sequence[dict[str, Any]], sides: Sequence[str]) -> str:
    """The rows as a table."""
    lines = [f"{'':44} {'unit':8} " + " ".join(f"{side:>16}" for side in sides)]
    for row in rows:
        cells = []
        for side in sides:
            value, ratio = row["medians"].get(side), row["ratios"].get(side)
            cells.append(f"{'' if value is None else f'{value:.4g}'}{'' if ratio is None else f' ({ratio:.2f}x)':>9}")
        lines.append(f"{row['row']:44} {row['unit']:8} " + " ".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


class FirstMinute:
    """Runs the rounds; ``samples`` by row and side."""

    def __init__(self, options: argparse.Namespace, pool: BenchPool, about: dict[str, Any], folder: Path) -> None:
        self.options, self.pool, self.about, self.folder = options, pool, about, folder
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.units: dict[str, str] = {}
        self.errors: list[str] = []
        self.modules: list[dict[str, Any]] = []
        self.path = options.output / f"{time.strftime('%Y-%m-%d')}-first-minute.json"

    def run(self) -> None:
        """All rounds."""
        sides = [Side(NATIVE), *(Side(name, self.pool, (*self._given(), "--host", DIRECT, "-q", *REMOTE[name]))
                                 for name in self.options.sides)]
        for number in range(self.options.rounds):
            for side in sides[number % len(sides):] + sides[:number % len(sides)]:
                self._starts(side, number)
                for program in self.options.programs:
                    if side.pool is not None or self.options.device.startswith("cuda"):
                        self._program(program, side, number)
            self.save()
            print(f"round {number + 1} of {self.options.rounds}", flush=True)

    def _given(self) -> tuple[str, ...]:
        return ("--memory", self.options.memory) if self.options.memory else ()

    # -- starts -------------------------------------------------------------------------
    def _starts(self, side: Side, number: int) -> None:
        self._add("run true", "s", side, number, self._together(side, number, 1))
        several = self._together(side, number, self.options.together)
        self._add(f"run true, {self.options.together} at once", "s", side, number, several)

    def _together(self, side: Side, number: int, count: int) -> float | None:
        """Seconds until the last of so many that start at once has ended."""
        began, running = time.perf_counter(), []
        # Together they share one GPU: each alone would be given all of it.
        share = ("--memory", "2GiB") if count > 1 and not self.options.memory else ()
        for one in range(count):
            command, environ = ["true"], dict(os.environ)
            if side.pool is not None:
                name = f"t{number}-{count}-{one}-{side.name}"
                command = [sys.executable, "-m", "rgpu.cli.main", "run", "--name", name, *side.options, *share, "--",
                           "true"]
                environ = dict(side.pool.environment)
                environ.pop("CUDA_VISIBLE_DEVICES", None)  # of this machine's GPUs, not of a session's
            running.append(subprocess.Popen(command, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL,
                                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for process in running:
            _, said = process.communicate(timeout=self.options.limit)
            if process.returncode:
                self._failed("run true", side, said)
                return None
        return time.perf_counter() - began

    # -- programs -----------------------------------------------------------------------
    def _program(self, program: str, side: Side, number: int) -> None:
        name = f"{program.rpartition('_')[2]}-{side.name}-{number}"
        command, environ = command_of(side, program, [str(self.options.large_mib)], name)
        if not self.options.device.startswith("cuda"):
            environ["BENCH_DEVICE"] = "cpu"
        log, began = self.folder / f"{name}.err", time.perf_counter()
        with open(log, "w") as errors:
            process = subprocess.Popen(command, env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=errors, text=True)
            limit = _after(self.options.limit, process)
            try:
                assert process.stdin is not None and process.stdout is not None
                rows = list(_rows(process))
                if side.pool is not None and process.poll() is None:
                    time.sleep(1.4)  # figures come every second
                    began += 1.4
                    self.modules.append({"program": program, "side": side.name, "round": number,
                                         "modules": side.pool.session(name).get("modules")})
                process.stdin.close()
                status = process.wait()
            finally:
                limit.cancel()
                process.kill()
                process.wait()
        if status:
            self._failed(program, side, log.read_text()[-600:])
            return
        label = program.rpartition("_")[2]
        for row in rows:
            self._add(f"{label}: {row['row']}", row["unit"], side, number, row["value"])
        self._add(f"{label}: whole program", "s", side, number, time.perf_counter() - began)

    # -- results ------------------------------------------------------------------------
    def _add(self, name: str, unit: str, side: Side, number: int, value: float | None) -> None:
        if value is None:
            return
        if number == 0 and unit in ("s", "ms"):  # caches of node and driver are cold
            name += ", first round"
        self.units[name] = unit
        self.samples.setdefault(name, {}).setdefault(side.name, []).append(value)

    def _failed(self, what: str, side: Side, said: str) -> None:
        last = " / ".join(line for line in said.splitlines() if line.strip())[-300:]
        self.errors.append(f"{what}, {side.name}: {last}")
        print(f"failed: {self.errors[-1]}", flush=True)

    def rows(self) -> list[dict[str, Any]]:
        """See :func:`summary`."""
        return summary(self.samples, self.units)

    def save(self) -> None:
        """Write what there is."""
        self.path.write_text(json.dumps({**self.about, "load_after": os.getloadavg()[0], "errors": self.errors,
                                         "rows": self.rows(), "modules": self.modules}, indent=1) + "\n")


def _rows(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if found.get("end"):
                return
            if "row" in found:
                yield found


def _after(seconds: float, process: subprocess.Popen[str]) -> Any:

    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def main() -> int:
    options = _arguments()
    folder = options.output / "bench-logs"
    folder.mkdir(parents=True, exist_ok=True)
    about = {**environment(), "command": " ".join(["python", "bench/remote/first_minute.py", *sys.argv[1:]]),
             "load_before": os.getloadavg()[0], "cpus": os.cpu_count(), "rounds": options.rounds, "link": options.link}
    with BenchPool(Path(tempfile.mkdtemp(prefix="rgpu-bench-")), options.device) as pool, shaped(options.link) as why:
        if why:
            print(f"no link is shaped: {why}", file=sys.stderr)
            return 2
        bench = FirstMinute(options, pool, about, folder)
        try:
            bench.run()
        finally:
            (folder / "first-minute-pool.log").write_text(pool.logs())
            bench.save()
    print(text(bench.rows(), [NATIVE, *options.sides]))
    print(f"written: {bench.path}")
    return 1 if bench.errors else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The first minute of a user, native and remote in turns.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=4, help="the first is with cold caches and stands by itself")
    parser.add_argument("--sides", default=",".join(REMOTE), help=f"of {','.join(REMOTE)}")
    parser.add_argument("--programs", default="", help="of driver,torch (default: both where PyTorch is installed)")
    parser.add_argument("--together", type=int, default=8, help="programs that start at once")
    parser.add_argument("--memory", default="", help="of a session (default: the pool's)")
    parser.add_argument("--large-mib", type=int, default=0, help="a large copy (default: 256; 16 on the cpu device)")
    parser.add_argument("--link", type=link_of, metavar="10g,0.2ms", help="shape the loopback device (root, tc)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one program")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    real = options.device.startswith("cuda")
    options.sides = [side for side in options.sides.split(",") if side]
    if unknown := set(options.sides) - set(REMOTE):
        parser.error(f"--sides: no {', '.join(sorted(unknown))}; there are {', '.join(REMOTE)}")
    usual = ["driver", *(["torch"] if real and importlib.util.find_spec("torch") else [])]
    programs = [word for word in options.programs.split(",") if word] or usual
    if unknown := set(programs) - {"driver", "torch"}:
        parser.error(f"--programs: no {', '.join(sorted(unknown))}; there are driver, torch")
    options.programs = [f"first_minute_{word}" for word in programs]
    options.large_mib = options.large_mib or (256 if real else 16)
    options.output.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
