#!/usr/bin/env python3
"""What `rgpu run` adds to a program that ends at once: without a resident, and with one, in turns.

    python bench/people/run_start.py [--rounds 22] [--pause 3] [--device cpu]

Programs: ``true``, with and without ``--lazy``; a C program's worth of CUDA by ctypes: a context, one copy there and
back. Wall time is from start to end; processor time that of `rgpu run` and its agent, without node and worker. Pauses
let a warm worker stand ready, as on a machine that is not asked for runs back to back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pools.pool import LocalPool  # noqa: E402

COPIED = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, there = ctypes.c_void_p(), ctypes.c_uint64()
data, back = ctypes.create_string_buffer(bytes(range(64)), 64), ctypes.create_string_buffer(64)
codes = [cuda.cuInit(0), cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0), cuda.cuMemAlloc_v2(ctypes.byref(there), 64),
         cuda.cuMemcpyHtoD_v2(there, data, 64), cuda.cuMemcpyDtoH_v2(back, there, 64)]
right = not any(codes) and back.raw == data.raw
"""
COPIES = COPIED + "sys.exit(not right)\n"
#: Writes what a process used into a file when it ends: an agent of a resident is waited for by nobody.
COUNTS = """
import atexit, os, time
ends = os._exit
def tell():
    with open(os.environ.get("USED") or os.devnull, "a") as file:
        file.write(f"{time.process_time()}\\n")
def end(code):
    tell(); ends(code)
os._exit = end
"""


def used(path: Path) -> float:
    """Processor seconds of the processes that ended; taken away."""
    time.sleep(0.1)  # an agent ends a moment after `rgpu run`
    found = sum(map(float, path.read_text().split())) if path.exists() else 0.0
    path.unlink(missing_ok=True)
    return found


def once(command: list[str], environment: dict[str, str], counted: Path) -> tuple[float, float]:
    """(wall, processor) seconds of one run."""
    used(counted)
    begun = time.monotonic()
    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL)
    return time.monotonic() - begun, used(counted)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two runs")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rgpu-start-"))
    (scratch / "counts").mkdir()
    (scratch / "counts" / "sitecustomize.py").write_text(COUNTS)
    os.environ["RGPU_SPARES"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    counted = scratch / "used"
    run = [str(Path(sys.executable).with_name("rgpu")), "run", "-q"]
    copies = [sys.executable, "-c", COPIES]
    rows = {"true": ["--", "true"], "true, --lazy": ["--lazy", "--", "true"],
            "a copy": ["--memory", "64MiB", "--", *copies]}
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with LocalPool(scratch / "pool", nodes=1, device=chosen.device) as pool:
        python = f"{scratch / 'counts'}{os.pathsep}{pool.environment['PYTHONPATH']}"
        for number in range(-2, chosen.rounds):
            took.setdefault(("true", "native"), []).append(once(["true"], dict(os.environ), counted))
            for row, words in rows.items():
                for kind, value in (("without", "off"), ("resident", "on")):
                    environment = {**pool.environment, "PYTHONPATH": python, "RGPU_RESIDENT": value,
                                   "USED": str(counted)}
                    time.sleep(chosen.pause)
                    found = once([*run, *words], environment, counted)
                    if number >= 0:
                        took.setdefault((row, kind), []).append(found)
    print(f"{chosen.rounds} rounds, {chosen.device}, load {os.getloadavg()[0]:.1f}; medians (shortest)")
    for (row, kind), found in took.items():
        walls, processors = zip(*found, strict=True)
        print(f"{row:14} {kind:10} wall {statistics.median(walls):.3f} s ({min(walls):.3f})   "
              f"processor {statistics.median(processors):.3f} s ({min(processors):.3f})")
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
