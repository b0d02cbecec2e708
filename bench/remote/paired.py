#!/usr/bin/env python3
"""Native and remote in turns: what is a step's ratio, on a machine whose speed drifts?

    python bench/remote/paired.py                                 GPT-2, CNN and launches, native and loopback
    python bench/remote/paired.py --only gpt2 --rows GPT-2 --sides loopback,shared,rtt-1 --rounds 20
    python bench/remote/paired.py --sides loopback,loopback:RGPU_SPIN_US=0
    python bench/remote/paired.py --sides loopback,unboxed        what a worker's box costs

A workload runs on all sides at once, and each waits for its turn: a round is one sample of each side, beginning with
another one each time, a second or two in all. A round's ratios compare what lies next to each other; printed are their
median and quartiles. ``bench/remote/remote.py`` runs one side after the other, minutes apart, and says how a program
does on a machine of its own: here sessions stand by, idle. A side is one of its conditions, with what else is to be set
for the program and its agent behind colons. Writes DATE-paired.json to --output ($OUT, or bench/results).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.remote.remote import CONDITIONS, side  # noqa: E402
from bench.support.player import Player, PlayerLost  # noqa: E402
from bench.support.pool import UNBOXED, BenchPool  # noqa: E402
from bench.support.workload import Side  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

WORKLOADS = ("gpt2", "cnn", "launches", "gemm", "copies", "memory_kinds")
NATIVE = "native"
T = TypeVar("T")


def condition_of(name: str) -> tuple[str, dict[str, str]]:
    """``loopback:A=1:B=2`` as condition and environment. Raises ValueError."""
    condition, *words = name.split(":")
    if condition not in CONDITIONS and not re.fullmatch(r"rtt-\d+(\.\d+)?", condition):
        raise ValueError(f"{condition} is no condition; there are {', '.join(CONDITIONS)}, and any rtt-MILLISECONDS")
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word!r} in {name!r} is not NAME=VALUE")
    return condition, dict(word.split("=", 1) for word in words)


def summary(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """For each side but the native one: median, and the ratio to the native sample of the same round (quartiles)."""
    native = samples[NATIVE]
    found = {}
    for name, values in samples.items():
        ratios = [value / base for value, base in zip(values, native, strict=False)]
        if name == NATIVE or not ratios:
            continue
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        found[name] = {"native": statistics.median(native), "remote": statistics.median(values), "ratio": middle,
                       "ratio_low": low, "ratio_high": high, "rounds": len(ratios)}
    return found


class Paired:
    """Plays workloads on several sides in turns, and keeps the samples."""

    def __init__(self, rounds: int, deadline: float, say: Any = print) -> None:
        self.rounds, self.deadline, self._say = rounds, deadline, say
        self.rows: list[dict[str, Any]] = []
        self.errors: list[str] = []

    def play(self, workload: str, players: Sequence[Player]) -> None:
        """All rows of one workload; a side that fails drops out, and so does the workload with its native side."""
        playing = list(players)
        while True:
            turns: dict[str, tuple[str, str]] = {}
            for player in list(playing):
                if (turn := self._try(playing, player, player.next_row)) is not None:
                    turns[player.name] = turn
            rows = {turn for turn in turns.values() if turn != ("", "")}
            if not any(player.name == NATIVE for player in playing) or not rows:
                return
            if len(rows) > 1:
                self._lost(f"{workload}: left out from here on, the sides are at different rows: {turns}")
                return
            self._row(workload, *rows.pop(), playing)

    def _row(self, workload: str, row: str, unit: str, playing: list[Player]) -> None:
        samples: dict[str, list[float]] = {player.name: [] for player in playing}
        for number in range(self.rounds):
            if time.monotonic() > self.deadline and number:
                break
            at = number % len(playing)
            for player in playing[at:] + playing[:at]:
                if (value := self._try(playing, player, player.sample)) is not None:
                    samples[player.name].append(value)
            if not any(player.name == NATIVE for player in playing):
                return
        for player in list(playing):
            self._try(playing, player, player.leave_row)
        for name, found in summary(samples).items():
            self.rows.append({"name": row, "unit": unit, "condition": name, **found, "workload": workload,
                              "samples": samples[name], "native_samples": samples[NATIVE]})
            self._say(line(self.rows[-1]), flush=True)

    def _try(self, playing: list[Player], player: Player, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except PlayerLost as error:
            self._lost(str(error))
            playing.remove(player)
            return None

    def _lost(self, what: str) -> None:
        self.errors.append(what)
        self._say(f"LOST {what}", flush=True)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (f"{row['name']:32s} {row['condition']:28s} {row['unit']:8s} {row['native']:10.4g} {row['remote']:10.4g} "
            f"{row['ratio']:7.3f}  ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}, {row['rounds']} rounds)")


def players(workload: str, rows: Sequence[str], sides: Sequence[str], pool: BenchPool, folder: Path,
            options: argparse.Namespace) -> list[Player]:
    """The native side and the others, started at once."""
    found = [Player(NATIVE, Side(NATIVE), workload, rows, folder / f"{workload}-native.err", options.limit)]
    for number, name in enumerate(sides):
        condition, settings = condition_of(name)
        found.append(Player(name, side(condition, pool, options.memory, ()), workload, rows,
                            folder / f"{workload}-{number}.err", options.limit, settings))
    return found


def main() -> int:
    options = _arguments()
    folder: Path = options.output / "bench-logs"
    folder.mkdir(parents=True, exist_ok=True)
    trips = {float(condition_of(name)[0][4:]) for name in options.sides if name.startswith("rtt-")}
    paired = Paired(options.rounds, time.monotonic() + options.budget)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-paired.json"
    about = {**environment(), "command": " ".join(["python", "bench/remote/paired.py", *sys.argv[1:]]),
             "cpus": os.cpu_count()}
    unboxed = any(condition_of(name)[0] == UNBOXED for name in options.sides)
    with BenchPool(Path(tempfile.mkdtemp(prefix="rgpu-paired-")), options.device, sorted(trips), unboxed) as pool:
        try:
            for workload in options.workloads:
                if time.monotonic() > paired.deadline:
                    print(f"time is up: {workload} and what follows is left out", flush=True)
                    break
                started = players(workload, options.rows, options.sides, pool, folder, options)
                try:
                    paired.play(workload, started)
                finally:
                    for player in started:
                        player.close()
                path.write_text(json.dumps({**about, "rows": paired.rows, "errors": paired.errors}, indent=1) + "\n")
        finally:
            (folder / "pool.log").write_text(pool.logs())
    print(f"written: {path}")
    return 1 if paired.errors or not paired.rows else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Native and remote in turns.")
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rows", nargs="*", default=[], metavar="NAME", help="only rows that begin so")
    parser.add_argument("--sides", default="loopback", help=f"of {','.join(CONDITIONS)}; with :NAME=VALUE settings")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--memory", default="16GiB", help="device memory of each session")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to wait for a side")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds after which no further workload begins")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    options.sides = options.sides.split(",")
    for name in options.sides:
        try:
            condition_of(name)
        except ValueError as error:
            parser.error(str(error))
    options.workloads = [w for w in WORKLOADS if (w in ("gpt2", "cnn", "launches") if not options.only else
                                                  any(fnmatch.fnmatch(w, p) for p in options.only))]
    return options


if __name__ == "__main__":
    sys.exit(main())
