#!/usr/bin/env python3
"""GPT-2 under torch.profiler, native and remote in turns: the same kernels, as often, for as long? What does it cost?

    python bench/remote/profiles.py                    on cuda:0
    python bench/remote/profiles.py --rounds 3 --picture docs/users/pictures/profile.svg

A round is a whole program on each side (bench/workloads/profiled_gpt2.py). Writes DATE-profiles.json to --output ($OUT,
or bench/results): counts and sums of kernels by side, differences, seconds a step without and with the profiler. The
picture has the last profiled step of the remote side's Chrome trace.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.support.pool import DIRECT, BenchPool  # noqa: E402
from bench.support.workload import Side, command_of  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

NATIVE, REMOTE = "native", "loopback"
WIDTH, LEFT, ROW, FONT = 1200, 190, 22, 12  #: of the picture, pixels
PIXELS = 2.0  #: width below which boxes cannot be told apart, and have no name
COLOURS = {"GPU": "#4c8c4a", "CUDA": "#b5651d", "operators": "#35609c"}


def differences(native: Mapping[str, Sequence[float]], remote: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of kernels by name, [count, microseconds]: which counts differ, and the ratio of all time, remote to native."""
    counts = {name: [native.get(name, (0, 0))[0], remote.get(name, (0, 0))[0]] for name in {*native, *remote}}
    times = [sum(spent for _, spent in side.values()) for side in (native, remote)]
    return {"kernels": len(native), "launches": [sum(count for count, _ in side.values()) for side in (native, remote)],
            "differing": {name: both for name, both in sorted(counts.items()) if both[0] != both[1]},
            "device_us": times, "ratio": times[1] / times[0] if times[0] else None}


def drawn(events: Sequence[tuple[str, str, float, float]], scale: float) -> list[tuple[str, float, float]]:
    """A row's boxes (name, begin, microseconds), without narrow ones where the last narrow one already is: a step has
    thousands.
    """
    boxes, edge = [], -1.0
    for _, name, begin, spent in sorted(events, key=lambda event: event[2]):
        narrow = spent * scale < PIXELS
        if not narrow or begin * scale >= edge:
            boxes.append((name, begin, spent))
            edge = begin * scale + PIXELS if narrow else edge
    return boxes


def picture(events: Sequence[tuple[str, str, float, float]], title: str) -> str:
    """An SVG of a trace: a line for each row, a box for each event (row, name, begin, microseconds)."""
    rows = sorted({row for row, *_ in events}, key=lambda row: (row.startswith("GPU"), row))
    end = max((begin + spent for _, _, begin, spent in events), default=1.0)
    scale = (WIDTH - LEFT - 10) / end
    height = 2 * ROW + len(rows) * (ROW + 6) + ROW
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
             f'font-size="{FONT}"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
             f'<text x="10" y="{ROW - 5}">{html.escape(title)}</text>']
    for number, row in enumerate(rows):
        y = 2 * ROW + number * (ROW + 6)
        colour = next((shade for begin, shade in COLOURS.items() if row.startswith(begin)), "#777777")
        parts.append(f'<text x="10" y="{y + ROW - 7}">{html.escape(row)}</text>'
                     f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y + ROW + 2}" y2="{y + ROW + 2}" stroke="#dddddd"/>')
        for name, begin, spent in drawn([event for event in events if event[0] == row], scale):
            said = f"<title>{html.escape(name[:120])}: {spent:.1f} us</title>" if spent * scale >= PIXELS else ""
            parts.append(f'<rect x="{LEFT + begin * scale:.1f}" y="{y}" width="{max(0.4, spent * scale):.1f}" '
                         f'height="{ROW}" fill="{colour}" fill-opacity="0.75">{said}</rect>')
    y = height - ROW
    for tick in range(6):
        x = LEFT + tick * (WIDTH - LEFT - 10) / 5
        parts.append(f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{"end" if tick == 5 else "middle"}">'
                     f'{end * tick / 5000:.1f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def run_once(side: Side, name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One program; what it wrote. Raises SystemExit with what it said where it failed."""
    out = folder / f"{name}.json"
    command, environ = command_of(side, "profiled_gpt2", [str(out), *(["--small"] if options.small else [])], name)
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=options.limit)
    if done.returncode:
        raise SystemExit(f"{side.name}: exit {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the rounds of both sides say together."""
    steps = {side: {when: statistics.median(run["step_s"][when] for run in runs) for when in runs[0]["step_s"]}
             for side, runs in found.items()}
    return {"rounds": [differences(native["kernels"], remote["kernels"])
                       for native, remote in zip(found[NATIVE], found[REMOTE], strict=True)],
            "step_s": steps, "losses": {side: [run["loss"] for run in runs] for side, runs in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", default="16GiB")
    parser.add_argument("--small", action="store_true", help="a model of some thousand parameters")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for a program")
    parser.add_argument("--picture", type=Path, help="where to draw the trace, as SVG")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {NATIVE: [], REMOTE: []}
    with tempfile.TemporaryDirectory() as name, BenchPool(Path(name), options.device) as pool:
        sides = [Side(NATIVE), Side(REMOTE, pool, ("--memory", options.memory, "--host", DIRECT, "-q"))]
        for number in range(options.rounds):
            for side in sides[::1 if number % 2 == 0 else -1]:
                found[side.name].append(run_once(side, f"{side.name}-{number}", options, Path(name)))
    told = summary(found)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-profiles.json"
    path.write_text(json.dumps({**environment(), "command": " ".join(sys.argv), **told}, indent=1) + "\n")
    for one in told["rounds"]:
        print(f"{one['kernels']} kernels, {one['launches'][0]} and {one['launches'][1]} launches, "
              f"{len(one['differing'])} counts differ, device time remote to native {one['ratio']:.3f}")
        for kernel, both in one["differing"].items():
            print(f"  {both[0]:6} {both[1]:6}  {kernel[:120]}")
    for side, steps in told["step_s"].items():
        print(f"{side:9} ms a step: " + ", ".join(f"{when} {spent * 1e3:.1f}" for when, spent in steps.items()))
    print(f"losses {told['losses']}\nwritten: {path}")
    if options.picture:
        last = found[REMOTE][-1]
        options.picture.write_text(picture([tuple(event) for event in last["trace"]],
                                           f"One training step of GPT-2 124M through rgpu, torch {last['torch']}"))


if __name__ == "__main__":
    main()
