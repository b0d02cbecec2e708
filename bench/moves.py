#!/usr/bin/env python3
"""What a move costs: downtime, brownout, total and bytes, beside the driver's own checkpoint and restore.

    python bench/moves.py --device cpu --sizes-mib 16
    python bench/moves.py --device cuda:0,cuda:1 --sizes-mib 1024,16384 --budget 900

The program is bench/move_load.py: `weights` (1 % changes a second), `train`
(everything at each step), `atomics` (as train, and not deterministic); memory
is touched before anything is timed. Each row starts it anew on one node, lets
it run, moves it, and lets it end; a deterministic one is run unmoved for as
many steps, and its digest has to be the same. Links: `loopback`; `10g`, `25g`:
shaped by bench/shaper.py; `peer`: skipped while nothing of ours pulls over
NVLink. The driver's own figure is that of the same program run natively in the
same run: lock, checkpoint, restore, unlock (cuCheckpointProcess*).

Rows: name, size_gib, mode, link, downtime_ms, brownout_ms, total_ms,
bytes_sent, driver_ms. brownout_ms: what the program lost while the move went
on, apart from the stop, in milliseconds of its own speed before.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.pool import BenchPool  # noqa: E402
from bench.shaper import Shaper  # noqa: E402

LOAD = ROOT / "bench" / "move_load.py"
LINKS = {"loopback": 0.0, "10g": 10.0, "25g": 25.0}
KINDS = ("weights", "train", "atomics")
BEFORE = 2.0  #: seconds of running that the speed before the move is taken from


def brownout_ms(steps: Sequence[float], began: float, ended: float, downtime: float) -> float | None:
    """Lost time while [began, ended] lasted, apart from the stop. ``steps``: when each step ended, seconds. Pure."""
    before = [at for at in steps if began - BEFORE <= at < began]
    during = [at for at in steps if began <= at <= ended]
    if len(before) < 3:
        return None
    step = (before[-1] - before[0]) / (len(before) - 1)
    return max(0.0, (ended - began - downtime - len(during) * step) * 1000)


class MovesPool(BenchPool):
    """A node to start on, and for each link one to move to; a shaped link's stands behind a shaper."""

    def __init__(self, folder: Path, devices: Sequence[str], links: Sequence[str]) -> None:
        super().__init__(folder, devices[0])
        self.nodes = 1 + len(links)
        self._devices, self._links = devices, links
        self._shapers: list[Shaper] = []

    def __enter__(self) -> MovesPool:
        self.rgpu("keys", "init")
        try:
            self._start("origin")
            self.device = self._devices[-1]
            for link in self._links:
                self._start(f"to-{link}", *self._shaped(LINKS[link]))
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _shaped(self, gigabits: float) -> tuple[str, ...]:
        if not gigabits:
            return ()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shaper = Shaper(("127.0.0.1", port), gigabits)
        self._shapers.append(shaper)
        return "--data-port", str(port), "--advertise-data", f"127.0.0.1:{shaper.address[1]}"


def load(kind: str, mib: int, steps: int = 0, until: Path = Path("/nonexistent")) -> list[str]:
    return [sys.executable, str(LOAD), "--kind", kind, "--mib", str(mib), "--steps", str(steps), "--until", str(until)]


def times(lines: Sequence[str]) -> list[float]:
    return [float(line.split()[2]) for line in lines if line.startswith("step ")]


def driver_ms(kind: str, mib: int) -> tuple[float | None, str]:
    """(milliseconds of the driver's own stop, or None and why not)."""
    try:
        from cuda.bindings import driver
        if not hasattr(driver, "cuCheckpointProcessCheckpoint"):
            return None, "these cuda-bindings have no cuCheckpointProcess*"
        if int(driver.cuInit(0)[0]):
            return None, "no GPU and driver here"
    except (ImportError, RuntimeError) as error:
        return None, str(error).splitlines()[0]
    program = subprocess.Popen(load(kind, mib), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    try:
        for _ in range(5):
            program.stdout.readline()
        began = time.monotonic()
        for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
            result = getattr(driver, f"cuCheckpointProcess{name}")(program.pid, None)
            if int(result[0]):
                return None, f"cuCheckpointProcess{name}: {int(result[0])}"
        return (time.monotonic() - began) * 1000, ""
    finally:
        program.kill()
        program.wait()


def measure(pool: MovesPool, kind: str, mib: int, link: str, timeout: float) -> dict[str, Any]:
    """One program, one move. Raises what failed."""
    name = f"{kind}-{mib}-{link}"
    until = pool.folder / f"{name}.stop"
    program = pool.run(*load(kind, mib, until=until), name=name,
                       options=("--host", "origin", "--memory", f"{mib + 64}MiB"))
    program.wait_lines(3, timeout)
    time.sleep(BEFORE)
    began = time.time()
    moved = pool.rgpu("migrate", name, f"to-{link}", timeout=timeout)
    ended = time.time()
    time.sleep(0.5)
    until.touch()
    digest = program.finish(timeout)
    # The verb's own start is no part of the move: what the move took is what it says, before the verb's end.
    took = float(moved["total_ms"]) / 1000
    at = times(program.lines)
    stop = float(moved["downtime_ms"]) / 1000
    return {"name": kind, "size_gib": mib / 1024, "mode": moved.get("mode", "copy"), "link": link,
            "downtime_ms": moved["downtime_ms"], "brownout_ms": brownout_ms(at, max(began, ended - took), ended, stop),
            "total_ms": moved["total_ms"], "bytes_sent": moved["bytes_sent"], "driver_ms": None,
            "digest": digest, "steps": len(at),
            "longest_gap_ms": max((b - a for a, b in zip(at, at[1:], strict=False)), default=0.0) * 1000}


def unmoved(pool: MovesPool, kind: str, mib: int, steps: int, timeout: float) -> str:
    program = pool.run(*load(kind, mib, steps), name=f"{kind}-{mib}-still-{steps}",
                       options=("--host", "origin", "--memory", f"{mib + 64}MiB"))
    return program.finish(timeout)


def table(rows: Sequence[dict[str, Any]]) -> str:
    columns = ("name", "size_gib", "mode", "link", "downtime_ms", "brownout_ms", "total_ms", "bytes_sent", "driver_ms")
    lines = ["  ".join(f"{column:>12s}" for column in columns)]
    for row in rows:
        lines.append("  ".join(f"{_text(row[column]):>12s}" for column in columns) + f"  {row.get('error', '')}"[:120])
    return "\n".join(lines)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="of the first node[, of the others]")
    parser.add_argument("--sizes-mib", default="16")
    parser.add_argument("--loads", default=",".join(KINDS))
    parser.add_argument("--links", default=",".join((*LINKS, "peer")))
    parser.add_argument("--budget", type=float, default=900, help="seconds after which no further row begins")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    began, rows, skipped = time.monotonic(), [], []
    links = [link for link in options.links.split(",") if link in LINKS]
    if "peer" in options.links:
        skipped.append("peer: pulls between GPUs of one host are not built yet")
    with MovesPool(Path(tempfile.mkdtemp(prefix="rgpu-moves-")), options.device.split(","), links) as pool:
        for mib in map(int, options.sizes_mib.split(",")):
            for kind in options.loads.split(","):
                own, why = driver_ms(kind, mib) if time.monotonic() - began < options.budget else (None, "budget")
                if own is None:
                    skipped.append(f"driver's own, {kind} {mib} MiB: {why}")
                for link in links:
                    left = options.budget - (time.monotonic() - began)
                    if left < 10:
                        skipped.append(f"{kind} {mib} MiB over {link}: the budget of {options.budget:.0f} s is used up")
                        continue
                    try:
                        row = measure(pool, kind, mib, link, left)
                        if kind != "atomics":
                            row["equal"] = row["digest"] == unmoved(pool, kind, mib, row["steps"], left)
                    except Exception as error:  # noqa: BLE001 - one row's failure is a line of the table
                        row = dict.fromkeys(("mode", "downtime_ms", "brownout_ms", "total_ms", "bytes_sent"))
                        row |= {"name": kind, "size_gib": mib / 1024, "link": link, "error": str(error)[:300]}
                    rows.append(row | {"driver_ms": own})
                    print(table(rows[-1:]).splitlines()[1], flush=True)
    bad = [row for row in rows if row.get("error") or row.get("equal") is False]
    print("\n" + table(rows), *(f"skipped  {line}" for line in skipped), sep="\n")
    downtimes = [row["downtime_ms"] for row in rows if row["downtime_ms"] is not None]
    if downtimes:
        print(f"median downtime {statistics.median(downtimes):.1f} ms of {len(downtimes)} moves; {len(bad)} rows "
              "failed or differ from the unmoved run")
    output = options.output or ROOT / "bench" / "results" / f"{time.strftime('%Y-%m-%d')}-moves.json"
    output.write_text(json.dumps({"command": " ".join(["python", *sys.argv]), "device": options.device,
                                  "processors": os.cpu_count(), "rows": rows, "skipped": skipped}, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
