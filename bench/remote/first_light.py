#!/usr/bin/env python3
"""First light on a device: the examples natively and remotely, moved and killed, digests compared.

    python bench/remote/first_light.py --device cuda:0 [--no-native] [--output FILE]

Needs the package importable and its client library built (`make setup`, or
RGPU_SHIM_DIR). Prints a table and writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pools.pool import LocalPool  # noqa: E402

EXAMPLES = {
    "heat": ["heat.py", "--n", "512", "--steps", "{steps}", "--report", "200"],
    "cudart_saxpy": ["cudart_saxpy.py", "--n", "1048576", "--rounds", "{steps}"],
    "numba_life": ["numba_life.py", "--n", "512", "--steps", "400"],
}
DIGEST = re.compile(r"^digest ([0-9a-f]{64})$", re.MULTILINE)


def native(command: list[str]) -> dict[str, Any]:
    """The example on this machine's own driver."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, str(ROOT / "examples" / command[0]), *command[1:]], capture_output=True,
                          text=True, timeout=300)
    found = DIGEST.search(done.stdout)
    return {"digest": found.group(1) if found else None, "seconds": time.monotonic() - began,
            "error": "" if found else done.stderr[-800:]}


def remote(pool: LocalPool, name: str, command: list[str], disturb: str) -> dict[str, Any]:
    """The example on a session; ``disturb``: nothing, move, or kill."""
    began = time.monotonic()
    program = pool.run(sys.executable, ROOT / "examples" / command[0], *command[1:], name=f"{name}-{disturb}")
    result: dict[str, Any] = {}
    try:
        if disturb != "nothing":
            program.wait_lines(1)
            row = pool.wait_state(program.name, "running")
            if disturb == "move":
                target = next(n["host"] for n in pool.living() if n["host"] != row["host"])
                result["move"] = pool.rgpu("migrate", program.name, target)
            else:
                os.kill(row["worker_pid"], signal.SIGKILL)
        result["digest"] = program.finish(200)
        row = pool.session(program.name)
        result.update(calls=row["calls"], awaited_calls=row["awaited_calls"], epoch=row["epoch"])
    except Exception as error:  # noqa: BLE001 - the table shows it
        result.update(digest=None, error=f"{type(error).__name__}: {error}"[:1500])
        program.stop()
    result["stderr"] = [line for line in program.errors if "Warning" not in line][-5:]
    return {**result, "seconds": time.monotonic() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--examples", default="heat,cudart_saxpy")
    parser.add_argument("--steps", type=int, default=1_000_000,
                        help="time steps or launches: enough to be moved and killed meanwhile; fewer on the cpu device")
    parser.add_argument("--no-native", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows, good = [], True
    with LocalPool(Path(tempfile.mkdtemp(prefix="rgpu-bench-")), nodes=2, device=options.device) as pool:
        for name in options.examples.split(","):
            command = [part.format(steps=options.steps) for part in EXAMPLES[name]]
            results = {} if options.no_native else {"native": native(command)}
            for disturb in ("nothing", "move", "kill"):
                results[f"remote, {disturb}"] = remote(pool, name, command, disturb)
            digests = {value["digest"] for value in results.values()}
            equal = len(digests) == 1 and None not in digests
            good = good and equal
            rows.append({"example": " ".join(command), "equal": equal, "runs": results})
            for kind, value in results.items():
                extra = f"  downtime {value['move']['downtime_ms']:.1f} ms" if "move" in value else ""
                print(f"{name:14s} {kind:16s} {str(value['digest'])[:16]:16s} {value['seconds']:7.2f} s{extra}"
                      f"{'  ' + value['error'] if value.get('error') else ''}", flush=True)
        if not good:
            print(pool.logs()[-12000:])
    report = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine(),
              "device": options.device,
              "command": " ".join(["python", "bench/remote/first_light.py", *sys.argv[1:]]),
              "equal": good, "examples": rows}
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    print("all digests equal" if good else "DIGESTS DIFFER or runs failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
