#!/usr/bin/env python3
"""What one awaited copy costs, and whom: processor time and wake-ups of program, agent, worker and daemon.

    python bench/remote/round_trip.py [--device cpu|cuda:0] [--calls 3000] [--rounds 5] [--same-host auto|off]
                                      [--exchange on|off|both] [--bytes 4] [--direction from|to|item]

A program copies 4 bytes from the device behind a small memset, again and again (`.item()`), or as many as told, or to
the device with a wait behind. It prints each call's time, and its kernel's counters (/proc/PID/task/*/schedstat) are
read around it, thread by thread. What is printed, medians over the rounds: microseconds of a call as the program sees
it; of each process, the microseconds of a processor and the wake-ups that a call costs, and the share of the busiest
threads. A wake-up is a hand-over between processors or processes: on an idle machine some 5 to 50 µs of a call each, so
their number says where to look first, also on a machine that is too busy for the times to mean much (its load average
stands beside them).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.pools.pool import LocalPool  # noqa: E402
from tests.support.processes import Use, threads  # noqa: E402

PROGRAM = ROOT / "bench" / "remote" / "round_trip_load.py"
BUSIEST = 3  #: threads of a process that are shown
SETTLE_SECONDS = 5.0  #: until what the session's start leaves to be done is done


def pids_of(pool: LocalPool, session: str, program: int) -> dict[str, int]:
    """Process ids by what they are."""
    row = pool.session(session)
    state = json.loads((pool.folder / "pool" / "nodes" / row["host"] / "server.json").read_text())
    return {"program": program, "agent": pool.programs[-1].process.pid, "worker": row["worker_pid"],
            "daemon": state["pid"]}


def one_round(pool: LocalPool, gate: Path, number: int, calls: int, pids: dict[str, int]) -> dict[str, Any]:
    """Have the program make its calls; what each thread of each process used meanwhile."""
    before = {name: threads(pid) for name, pid in pids.items()}
    (gate / str(number)).touch()
    pool.programs[-1].wait_lines(2 + number + 1, 300)
    after = {name: threads(pid) for name, pid in pids.items()}
    found: dict[str, Any] = {"call_us": float(pool.programs[-1].lines[-1].split()[1])}
    for name in pids:
        used = [one.since(before[name].get(tid, Use(0.0, 0.0)), calls) for tid, one in after[name].items()]
        used.sort(key=lambda one: -one.share)
        found[name] = {"cpu_us": sum(one.share for one in used) * 1e6, "wakes": sum(one.wakes for one in used),
                       "threads_us": [one.share * 1e6 for one in used[:BUSIEST]],
                       "threads_wakes": [one.wakes for one in used[:BUSIEST]]}
    return found


def medians(rounds: list[Any]) -> Any:
    """The same form, each figure the median of the rounds'."""
    first = rounds[0]
    if isinstance(first, dict):
        return {key: medians([one[key] for one in rounds]) for key in first}
    if isinstance(first, list):
        width = min(len(one) for one in rounds)
        return [medians([one[at] for one in rounds]) for at in range(width)]
    return round(statistics.median(rounds), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--same-host", default="off", choices=["auto", "off"], help="share memory with the worker")
    parser.add_argument("--exchange", default="on", choices=["on", "off", "both"],
                        help="messages passed on in compiled code; both: one after the other")
    parser.add_argument("--bytes", type=int, default=4, help="of one copy, 4 at least")
    parser.add_argument("--direction", default="from", choices=["from", "to", "item"],
                        help="from the device, to it, or from it to pinned memory and a wait, as `.item()`")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.bytes < 4:
        parser.error("--bytes: 4 at least, the value that is looked for")
    rows = {}
    for exchange in ("off", "on") if options.exchange == "both" else (options.exchange,):
        os.environ["RGPU_EXCHANGE"] = exchange
        rows[exchange] = measure(options)
        show(options, exchange, rows[exchange])
    if options.output:
        options.output.write_text(json.dumps({
            "device": options.device, "calls": options.calls, "rounds": options.rounds, "load": os.getloadavg()[0],
            "bytes": options.bytes, "direction": options.direction,
            "same_host": options.same_host, "processors": os.cpu_count(), "exchange": rows}, indent=1) + "\n")


def measure(options: argparse.Namespace) -> Any:
    """Run a pool and the program in it; return the medians of its rounds."""
    with tempfile.TemporaryDirectory(prefix="rgpu-trips-") as folder, \
            LocalPool(Path(folder), 1, 10.0, options.device) as pool:
        program = pool.run(sys.executable, str(PROGRAM), folder, str(options.calls), str(options.rounds),
                           str(options.bytes), options.direction, name="trips",
                           options=("--same-host", options.same_host))
        program.wait_lines(2, 120)
        time.sleep(SETTLE_SECONDS)
        pids = pids_of(pool, "trips", int(program.lines[0]))
        found = medians([one_round(pool, Path(folder), number, options.calls, pids)
                         for number in range(options.rounds)])
        (Path(folder) / "end").touch()
        found["exchanged"] = int(pool.session("trips")["exchanged_calls"] or 0)
        program.process.wait(60)
    return found


def show(options: argparse.Namespace, exchange: str, found: Any) -> None:
    """Print what was measured."""
    print(f"{options.bytes} bytes {options.direction} {options.device}, same host {options.same_host}, "
          f"exchange {exchange} "
          f"({found['exchanged']} calls), {os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}: "
          f"{found['call_us']:.1f} µs a call")
    for name in ("program", "agent", "worker", "daemon"):
        row = found[name]
        shares = ", ".join(f"{us:.1f} µs and {wakes:.2f}" for us, wakes in
                           zip(row["threads_us"], row["threads_wakes"], strict=True))
        print(f"  {name:<8}{row['cpu_us']:8.1f} µs of a processor{row['wakes']:7.2f} wake-ups   threads: {shares}")


if __name__ == "__main__":
    main()
