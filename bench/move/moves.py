#!/usr/bin/env python3
"""What a move costs by copy, by replay, and by what `auto` takes, beside the driver's own checkpoint and restore.

    python bench/move/moves.py --device cpu --sizes-mib 16 --link-gbit 0.5
    python bench/move/moves.py --device cuda:0 --sizes-mib 10240 --link-gbit 10 --modes copy,replay,auto --budget 500
    python bench/move/moves.py --device cuda:0,cuda:1 --sizes-mib 1024,16384,65536 --links loopback --modes copy \
        --loads weights,train --budget 540

The program is bench/move/move_load.py; its memory is touched before anything is
timed. Each row starts it anew on one node, lets it run, moves it, and lets it
end (where one device has to run and to replay it, it rests 70 % of its time:
--share). Of a deterministic one the digest has to be what so many steps give,
computed without a device. Links: `loopback`, or a rate as `10g`, shaped by
bench/support/shaper.py; `--link-gbit 10` is `--links 10g`. Between the workers of one host
pages are pulled out of device memory (pages_by: peer), unless the link is shaped
or --pages says `stream`; `--pages auto,stream` measures both. The driver's own figure is
that of the same program run natively in the same run: lock, checkpoint,
restore, unlock (cuCheckpointProcess*).

Rows: name, size_gib, link, asked (the mode), mode (it was in the end; another
one fell back), downtime_ms, brownout_ms (what the program lost while the move
went on, apart from the stop, in milliseconds of its own speed before), lost_ms
(both together), total_ms, bytes_sent, mismatched_pages and repaired_bytes (of a
replay), steps_before and steps_during (a second), slowdown (the share lost while
pages were copied), pages_by, pages_why, gb_per_s (of the largest pull), phases_ms and page_rounds (printed below
each row), spare (whether a worker stood ready), driver_ms, auto_right: whether the mode that `auto` took was
no worse than the other one, both measured in this run, as `auto` weighs them.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.move import move_load, move_rows  # noqa: E402
from bench.support.pool import BenchPool  # noqa: E402
from bench.support.shaper import Shaper  # noqa: E402

LOAD = ROOT / "bench" / "move" / "move_load.py"
MODES = ("copy", "replay", "auto")


def gigabits(link: str) -> float:
    """Of a link's name: `loopback` is 0, `10g` is 10. Raises ValueError."""
    return 0.0 if link == "loopback" else float(link.removesuffix("g"))


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
                self._start(host_of(link), *self._shaped(gigabits(link)))
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _shaped(self, rate: float) -> tuple[str, ...]:
        if not rate:
            return ()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shaper = Shaper(("127.0.0.1", port), rate)
        self._shapers.append(shaper)
        return "--data-port", str(port), "--advertise-data", f"127.0.0.1:{shaper.address[1]}"


def host_of(link: str) -> str:
    """The name of the node behind a link."""
    return f"to-{link}".replace(".", "-")


def load(kind: str, mib: int, until: Path = Path("/nonexistent"), share: float = 1.0) -> list[str]:
    return [sys.executable, str(LOAD), "--kind", kind, "--mib", str(mib), "--until", str(until), "--share", str(share)]


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


def measure(pool: MovesPool, kind: str, mib: int, link: str, mode: str, pages: str, options: argparse.Namespace,
            timeout: float) -> dict[str, Any]:
    """One program, one move. Raises what failed."""
    name = f"{kind}-{mib}-{link}-{mode}-{pages}".replace(".", "-")
    until = pool.folder / f"{name}.stop"
    program = pool.run(*load(kind, mib, until, options.share), name=name,
                       options=("--host", "origin", "--memory", f"{mib + 64}MiB"))
    try:
        program.wait_lines(3, timeout)
        time.sleep(move_rows.BEFORE)
        began = time.time()
        moved = pool.rgpu("migrate", name, host_of(link), "--mode", mode, "--max-downtime", options.max_downtime,
                          "--pages", pages,
                          timeout=timeout)
        ended = time.time()
        time.sleep(0.5)
        until.touch()
        digest = program.finish(timeout)
    finally:
        program.stop()
    at = times(program.lines)
    downtime = float(moved["downtime_ms"])
    pace = move_rows.around(at, began, ended, float(moved["total_ms"]) / 1000, downtime / 1000)
    brownout = max(float(moved["brownout_ms"]), pace.lost * 1000 if pace else 0.0)
    row = {"name": kind, "size_gib": mib / 1024, "link": link, "asked": mode, "mode": moved["mode"],
           "downtime_ms": downtime, "brownout_ms": brownout, "lost_ms": downtime + brownout,
           "steps_before": pace.before if pace else None, "steps_during": pace.during if pace else None,
           "slowdown": pace.slowdown if pace else None, "steps": len(at),
           "longest_gap_ms": max((b - a for a, b in zip(at, at[1:], strict=False)), default=0.0) * 1000,
           **{key: moved.get(key) for key in ("total_ms", "bytes_sent", "rounds", "mismatched_pages", "repaired_bytes",
                                              "sampled_pages", "sampled_mismatches", "why", "fell_back", "expected",
                                              "bytes_pulled", "pages_by", "pages_why", "spare", "phases_ms",
                                              "page_rounds")},
           "asked_pages": pages, "gb_per_s": move_rows.pulled_gb_per_s(moved)}
    if kind in move_load.DETERMINISTIC:
        row["equal"] = digest == move_load.expected_digest(kind, mib, len(at))
    return row


def cases(options: argparse.Namespace, links: Sequence[str]) -> Iterator[tuple[int, str, str, str, str]]:
    """(size, load, link, mode, how pages go), those first that the rest can do without."""
    for mib in map(int, options.sizes_mib.split(",")):
        for kind in options.loads.split(","):
            for link in links:
                for mode in options.modes.split(","):
                    for pages in options.pages.split(","):
                        yield mib, kind, link, mode, pages


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="of the first node[, of the others]")
    parser.add_argument("--sizes-mib", default="16")
    parser.add_argument("--loads", help=f"of {', '.join(move_load.KINDS)}; by default those that fit the device")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--links", default="loopback,10g,25g")
    parser.add_argument("--pages", default="auto", help="how pages may go: auto, stream, or both one after the other")
    parser.add_argument("--link-gbit", type=float, help="one link of so many gigabits a second, instead of --links")
    parser.add_argument("--max-downtime", default="60s", help="as `rgpu migrate` takes it")
    parser.add_argument("--budget", type=float, default=900, help="seconds after which no further row begins")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--share", type=float, help="of its time that the program works; by default 1, but 0.3 where "
                        "source and destination are one device, which has to replay beside it")
    options = parser.parse_args()
    devices = options.device.split(",")
    options.share = options.share or (0.3 if devices[0] == devices[-1] else 1.0)
    # Atomics of the cpu device come in one order: its irreproducible load reads the timer.
    options.loads = options.loads or ("train,atomics,weights,few" if "cuda" in options.device else
                                      "train,timer,weights,few")
    if options.link_gbit:
        options.links = f"{options.link_gbit:g}g"
    return options


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what was left out and why)."""
    began, rows, skipped = time.monotonic(), [], []
    links = options.links.split(",")
    own: dict[tuple[str, int], float | None] = {}
    with MovesPool(Path(tempfile.mkdtemp(prefix="rgpu-moves-")), options.device.split(","), links) as pool:
        for mib, kind, link, mode, pages in cases(options, links):
            left = options.budget - (time.monotonic() - began)
            if left < 10:
                skipped.append(f"{kind} {mib} MiB over {link} by {mode}: the budget of {options.budget:.0f} s is used "
                               "up")
                continue
            if (kind, mib) not in own:
                own[kind, mib], why = driver_ms(kind, mib)
                if why:
                    skipped.append(f"driver's own, {kind} {mib} MiB: {why}")
            try:
                row = measure(pool, kind, mib, link, mode, pages, options, left)
            except Exception as error:  # noqa: BLE001 - one row's failure is a line of the table
                row = {"name": kind, "size_gib": mib / 1024, "link": link, "asked": mode, "asked_pages": pages,
                       "error": str(error)[:400]}
            rows.append(row | {"driver_ms": own[kind, mib]})
            print(move_rows.table(rows[-1:], head=len(rows) == 1), *move_rows.details(rows[-1]), sep="\n", flush=True)
    move_rows.judge(rows)
    return rows, skipped


def main() -> int:
    options = arguments()
    rows, skipped = run(options)
    bad = [row for row in rows if row.get("error") or row.get("equal") is False]
    print("\n" + move_rows.table(rows), *(f"skipped  {line}" for line in skipped), sep="\n")
    for row in rows:
        if row.get("verdict"):
            print(f"{row['name']} {row['size_gib']:g} GiB over {row['link']}: {row['verdict']}")
    downtimes = [row["downtime_ms"] for row in rows if row.get("downtime_ms") is not None]
    if downtimes:
        print(f"median downtime {statistics.median(downtimes):.1f} ms of {len(downtimes)} moves; {len(bad)} rows "
              "failed or differ from the unmoved run")
    output = options.output or ROOT / "bench" / "results" / f"{time.strftime('%Y-%m-%d')}-moves.json"
    output.write_text(json.dumps({"command": " ".join(["python", *sys.argv]), "device": options.device,
                                  "share": options.share, "processors": os.cpu_count(), "rows": rows,
                                  "skipped": skipped}, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
