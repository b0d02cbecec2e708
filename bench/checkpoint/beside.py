#!/usr/bin/env python3
"""What a checkpoint costs a training beside it, and what parts of its work cost that are done by others, without rgpu.

    python bench/checkpoint/beside.py --device cuda:0 [--rounds 5] [--without processors,disk,copies,room]
    python bench/checkpoint/beside.py --device cpu --mib 64 --memory 1GiB \
        -- tests/scenarios/programs/steps.py --steps 400

A session (default: GPT-2 124M training, bench/workloads/gpt2_steps.py) runs undisturbed but for what is done beside it,
one after the other, a few seconds apart:

checkpoint       `rgpu checkpoint`
processors  as many processes as store checkpoints name and compress as many pages, at the same nice value
disk        a process writes as many bytes to a file of the same file system
copies      a process copies as many bytes from the GPU to pinned memory, 16 MiB at a time (cuda)
room        a process takes and maps as many bytes of the GPU's memory, 256 MiB at a time, and gives them back (cuda)
nothing     as long as the first checkpoint took: what it says is how far to trust the others

Row: by how many ms the steps meanwhile were longer, all together, than as many in the three seconds before and
the three behind; and the seconds it took. A part that costs what the checkpoint costs is what the checkpoint costs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.checkpoint.recovery import SLACK, Run  # noqa: E402
from bench.support import apart  # noqa: E402
from rgpu.checkpoint.codec import encoders, encoding  # noqa: E402
from rgpu.checkpoint.codec.chunk import CHUNK_HEADER  # noqa: E402
from rgpu.checkpoint.codec.frames import FRAME_BYTES, FRAME_PAGES, PITCH  # noqa: E402
from rgpu.checkpoint.native import pagehash_native  # noqa: E402
from rgpu.checkpoint.pages import pagehash  # noqa: E402
from rgpu.session.addresses import PAGE  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.pool import LocalPool, Program  # noqa: E402

WORKLOAD = ROOT / "bench" / "workloads" / "gpt2_steps.py"
REST = 3.5  #: seconds between two parts: those before one are what is usual
PIECE, BLOCK = 16 << 20, 256 << 20


# -- the parts, each in a process of its own -----------------------------------------------------


def processors(folder: Path) -> Callable[[int], None]:
    rows = np.zeros((FRAME_PAGES, PITCH), np.uint8)
    pages = np.random.default_rng(os.getpid()).standard_normal((FRAME_PAGES, PAGE // 4)).astype(np.float32)
    rows[:, CHUNK_HEADER:] = pages.view(np.uint8)
    key = bytes(range(32))
    encoding.prepare()
    hashes = pagehash_native.hash_rows(rows.ctypes.data + CHUNK_HEADER, PITCH, FRAME_PAGES, pagehash.expand_key(key))
    os.nice(encoders.NICE)

    def work(size: int) -> None:
        for _ in range(max(1, size // FRAME_BYTES)):
            encoding.encode(rows, hashes, key, key)

    return work


def disk(folder: Path) -> Callable[[int], None]:
    data = np.random.default_rng(1).bytes(PIECE)

    def work(size: int) -> None:
        with open(folder / "beside", "wb") as file:
            for _ in range(max(1, size // PIECE)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        (folder / "beside").unlink()

    return work


def _context(device: str) -> Any:
    """cuda.bindings.driver, with a context of this process. Raises what the checks of the ``cuda`` device raise."""
    from cuda.bindings import driver

    from rgpu.server.device.cuda.errors import check

    check(driver.cuInit(0), "cuInit")
    context = check(driver.cuDevicePrimaryCtxRetain(int(device.partition(":")[2] or 0)), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return driver, check


def copies(folder: Path, device: str) -> Callable[[int], None]:
    driver, check = _context(device)
    host = check(driver.cuMemAllocHost(PIECE), "cuMemAllocHost")
    memory = check(driver.cuMemAlloc(PIECE), "cuMemAlloc")

    def work(size: int) -> None:
        for _ in range(max(1, size // PIECE)):
            check(driver.cuMemcpyDtoH(host, memory, PIECE), "cuMemcpyDtoH")

    return work


def room(folder: Path, device: str) -> Callable[[int], None]:
    _context(device)
    from rgpu.server.device.cuda.memory.staging import Staging

    staging = Staging(int(device.partition(":")[2] or 0))

    def work(size: int) -> None:
        for place in [staging.stage(BLOCK) for _ in range(max(1, size // BLOCK))]:
            staging.unstage(place)

    return work


def serve(part: str, folder: Path, device: str) -> None:
    """For each line with a number of bytes on stdin: the work, then a line on stdout."""
    work = {"processors": processors, "disk": disk}[part](folder) if part in ("processors", "disk") else \
        {"copies": copies, "room": room}[part](folder, device)
    print("ready", flush=True)
    for line in sys.stdin:
        work(int(line))
        print("done", flush=True)


class Part:
    """One of them: its processes, which stand ready."""

    def __init__(self, name: str, folder: Path, device: str) -> None:
        self.name = name
        count = max(1, encoders.wanted()) if name == "processors" else 1
        self.processes = [subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--folder", str(folder), "--device", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        self._answers()

    def __call__(self, size: int) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{size // len(self.processes)}\n")
            process.stdin.flush()
        self._answers()

    def _answers(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"the process for {self.name} ended with {process.wait()}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


# -- the measurement -----------------------------------------------------------------------------


def measure(pool: LocalPool, program: Program, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    names = ["processors", "disk", *(["copies", "room"] if options.device.startswith("cuda") else [])]
    names = [name for name in names if name not in options.without]
    parts = [Part(name, folder, options.device) for name in names]
    rows: list[dict[str, Any]] = []
    size = options.mib << 20
    try:
        for _ in range(options.rounds):
            for name, do in [("image", lambda: pool.rgpu("checkpoint", program.name)),
                             *[(part.name, functools.partial(part, size)) for part in parts],
                             ("nothing", lambda: time.sleep(rows[0]["ended"] - rows[0]["began"]))]:
                time.sleep(REST)
                if program.process.poll() is not None:
                    raise SystemExit("the program ended before the last round: give it more steps")
                began = time.time()
                do()
                rows.append({"part": name, "began": began, "ended": time.time()})
        time.sleep(REST)
    finally:
        for part in parts:
            part.close()
    run = Run.of(list(program.lines))
    return [{"part": row["part"], "seconds": round(row["ended"] - row["began"], 3),
             "excess_ms": run.excess(row["began"], row["ended"] + SLACK)} for row in rows]


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """``error_ms``: the standard error of the mean."""
    found = {}
    for name in dict.fromkeys(row["part"] for row in rows):
        some = [row for row in rows if row["part"] == name and row["excess_ms"] is not None]
        if some:
            cost = [row["excess_ms"] for row in some]
            found[name] = {"mean_excess_ms": round(statistics.mean(cost), 1),
                           "error_ms": round(statistics.stdev(cost) / len(cost) ** 0.5, 1) if len(cost) > 1 else None,
                           "median_excess_ms": round(statistics.median(cost), 1),
                           "median_seconds": round(statistics.median(row["seconds"] for row in some), 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=5000, help="of a checkpoint, for the parts")
    parser.add_argument("--memory", default="24GiB")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], metavar="PART,…",
                        help="parts left out")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="another program and its arguments")
    apart.add_option(parser)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.folder, options.device)
    processors = apart.Processors(options.program_processors)
    command = options.command or [str(WORKLOAD), "--steps", "100000"]
    with tempfile.TemporaryDirectory(prefix="rgpu-beside-") as name, \
            LocalPool(Path(name), nodes=1, device=options.device) as pool:
        with processors.for_a_program():
            program = pool.run(sys.executable, *command, name="beside", options=(
                "--memory", options.memory, "--checkpoint-every", "3600"))
        program.wait_lines(30, 180)
        rows = measure(pool, program, options, Path(name))
    result = {**environment(), "command": " ".join(sys.argv), "summary": summary(rows), "rows": rows}
    print(json.dumps(result["summary"], indent=1))
    path = options.output / f"{time.strftime('%Y-%m-%d')}-beside.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
