#!/usr/bin/env python3
"""What the order of issue costs a replay (SEMANTICS 20): recorded programs, replayed with it and without.

    python bench/checkpoint/catch_up.py --device cuda:0 --out catch_up.json
    python bench/checkpoint/catch_up.py --device cpu:0 -- tests/scenarios/programs/prefetch.py 200 0

Each program runs once under `rgpu run --record`; then its calls are replayed, by the worker's own code and as fast as
they go, in fresh processes that take turns: RGPU_CATCH_UP=ordered and =overlap. The first half of the calls (loads and
warming up) is not counted. Rows: calls and seconds of the second half, calls a second, the ratio of the medians, how
often a replay stalled, and how long the program itself took for those calls. Programs: a training step of GPT-2 124M
and of a CNN, and eight busy streams.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rgpu.session.journal.record import pack_record  # noqa: E402
from rgpu.session.journal.recording import Recording  # noqa: E402
from tests.support.pools.pool import LocalPool  # noqa: E402

WORKLOADS = ROOT / "bench" / "workloads"
PROGRAMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "gpt2": ([str(WORKLOADS / "gpt2_steps.py"), "--steps", "60"], {}),
    "cnn": ([str(WORKLOADS / "cnn_long.py")], {"BENCH_STEPS": "300"}),
    "streams8": ([str(WORKLOADS / "streams8.py"), "--rounds", "400"], {}),
}
MODES = ("ordered", "overlap")
PIECE = 1 << 20


def record(device: str, memory: str, name: str, command: list[str], variables: dict[str, str], folder: Path) -> Path:
    """Run a program once; where its recording lies."""
    os.environ.update(variables)
    target = folder / name
    with LocalPool(folder / f"pool-{name}", nodes=1, lease=10.0, device=device) as pool:
        program = pool.run(sys.executable, *command, name=name,
                           options=("--memory", memory, "--recover", "off", "--record", str(target)))
        code = program.process.wait(900)
        if code:
            raise SystemExit(f"{name} ended with {code}: {program.errors[-20:]}\n{pool.logs()}")
    return target


def replay(path: Path, device: str, memory: int) -> dict[str, Any]:
    """In a process of its own: apply all calls, and count the second half."""
    from rgpu.server.device.spec import make_device
    from rgpu.server.worker.apply.runtime import SessionRuntime

    made = make_device(device, memory, own_stdout=True)
    recording = Recording(path)
    last = recording.verify().last_seq
    runtime = SessionRuntime(recording.session, 1, made)
    runtime.replay()
    feed, half = runtime.open_stream(), last // 2
    began, piece = 0.0, bytearray()
    for call in recording:
        piece += pack_record(call)
        if len(piece) >= PIECE or call.seq in (half, last):
            feed(bytes(piece))
            piece.clear()
        if call.seq == half:
            made.drain(600)
            began = time.perf_counter()
    if not made.drain(600):
        raise SystemExit("the replay's work does not end")
    seconds = time.perf_counter() - began
    return {"calls": last - half, "seconds": seconds, "error": runtime.executor.error, **runtime.order.describe()}


def measure(path: Path, device: str, memory: int, mode: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--replay", str(path), "--device", device, "--bytes", str(memory)],
                          env={**os.environ, "RGPU_CATCH_UP": mode}, capture_output=True, text=True, timeout=1200)
    lines = [line for line in done.stderr.splitlines() if line.startswith("replayed ")]
    if done.returncode or not lines:
        raise SystemExit(f"the replay of {path} ended with {done.returncode}: {done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("replayed "))
    if found["error"]:
        raise SystemExit(f"the replay of {path} ended with CUresult {found['error']}")
    return found


def compare(name: str, path: Path, device: str, memory: int, turns: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for turn in range(turns):
        for mode in MODES if turn % 2 == 0 else reversed(MODES):
            found[mode].append(measure(path, device, memory, mode))
    row: dict[str, Any] = {"program": name, "calls": found["ordered"][0]["calls"]}
    for mode, runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        row[mode] = {"seconds": round(seconds, 4), "each": [round(run["seconds"], 4) for run in runs],
                     "calls_per_s": round(row["calls"] / seconds), "stalls": sum(run["stalls"] for run in runs),
                     "state": runs[0]["state"]}
    row["ordered_by_overlap"] = round(row["ordered"]["seconds"] / row["overlap"]["seconds"], 3)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--memory", default="")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", action="append", choices=sorted(PROGRAMS), help="Some of the programs.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="A program of your own instead.")
    options = parser.parse_args()
    if options.replay:
        _without_randomisation()
        found = replay(options.replay, options.device, options.bytes)
        print("replayed", json.dumps(found), file=sys.stderr, flush=True)
        os._exit(0)  # a device that is busy ending needs no patience
    memory = options.memory or ("256MiB" if options.device.startswith("cpu") else "16GiB")
    programs = {"own": (options.command, dict[str, str]())} if options.command else \
        {name: PROGRAMS[name] for name in options.only or PROGRAMS}
    rows = []
    with tempfile.TemporaryDirectory(prefix="rgpu-catch-up-") as folder:
        for name, (command, variables) in programs.items():
            path = record(options.device, memory, name, command, variables, Path(folder))
            rows.append(compare(name, path, options.device, 16 << 30, options.turns))
    result = {"device": options.device, "turns": options.turns, "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _without_randomisation() -> None:
    """Modules land where the recording has them (SEMANTICS 12)."""
    import ctypes

    libc = ctypes.CDLL(None)
    persona = libc.personality(0xFFFFFFFF)
    if not persona & 0x0040000 and libc.personality(persona | 0x0040000) != -1:
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
