#!/usr/bin/env python3
"""The client's side alone: shim and agent against a worker that does nothing, over sealed loopback TCP.

    python bench/remote/client.py [--library PATH] [--quick] [--engine [--paired]] [--recover] [--output FILE]

Measures launches published and sustained, the awaited 4-byte copy behind a
launch with where its time goes, and copies of 1 and 256 MiB both ways. Prints
a table, and with --output writes it as JSON. Needs a C++ compiler, no GPU.
With --paired copies go over TCP and through shared memory in turn, in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from rgpu.client.data_link.connection import DataLink  # noqa: E402
from rgpu.client.data_link.incoming import Incoming  # noqa: E402
from rgpu.client.run.agent import Agent, Options  # noqa: E402
from rgpu.client.run.pool_requests import PoolRequests  # noqa: E402
from rgpu.client.session.shipper import Shipper  # noqa: E402
from rgpu.link.data import tickets  # noqa: E402
from rgpu.link.keys import KeyPair, PoolFiles  # noqa: E402
from rgpu.session.facts import DeviceInfo, SessionFacts  # noqa: E402

MIB = 1 << 20
ATTRIBUTES = {1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2147483647, 6: 65535, 7: 65535, 8: 49152, 10: 32, 12: 65536, 16: 4,
              39: 1024, 41: 1, 75: 7, 76: 5, 81: 65536, 82: 65536, 97: 65536, 106: 16}


class Pool:
    """What the agent's control calls find: one worker, for every session."""

    def __init__(self, files: PoolFiles, keys: KeyPair, port: int, recover: bool) -> None:
        self.files, self.keys, self.port, self.recover = files, keys, port, recover

    def call(self, verb: str, args: dict[str, Any], timeout: float = 0, **more: Any) -> Any:
        name = args.get("name") or args["session"]
        grant = tickets.issue(self.files.secret(), name, self.keys.public, "calls", lifetime=3600)
        device = DeviceInfo("none", bytes(16), 1 << 40, attributes=ATTRIBUTES)
        facts = SessionFacts(name, 1, 13000, 1 << 40, 1 << 30, self.recover, (device,))
        return {"session": name, "owner": "bench", "address": ["127.0.0.1", self.port], "epoch": 1,
                "facts": facts.as_dict(), "recover": self.recover, "state": "running", "alive": True,
                "ticket": grant.ticket, "secret": grant.secret, "expires": grant.expires}

    def refresh(self, endpoints: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Trace:
    """When the agent did what, CLOCK_MONOTONIC ns: by wrapping its methods, so the agent itself has no probes."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []  #: (seq, when) after a walk that found it
        self.sent: list[tuple[int, int]] = []
        self.answered: dict[int, int] = {}

    def install(self) -> None:
        take, send, message = Shipper.take_calls, DataLink.send_calls, Incoming._message

        def take_calls(shipper: Any) -> Any:
            found = take(shipper)
            if found:
                self.seen.append((shipper.journal.last_seq, time.monotonic_ns()))
            return found

        def send_calls(link: Any, buffers: Any) -> Any:
            done = send(link, buffers)
            self.sent.append((self.seen[-1][0] if self.seen else 0, time.monotonic_ns()))
            return done

        def take_message(incoming: Any, link: Any, kind: int, body: Any) -> Any:
            seq = int.from_bytes(body[1:9], "little") if kind == 17 else 0
            done = message(incoming, link, kind, body)
            if seq:
                self.answered[seq] = time.monotonic_ns()
            return done

        Shipper.take_calls = take_calls  # type: ignore[method-assign]
        DataLink.send_calls = send_calls  # type: ignore[method-assign]
        Incoming._message = take_message  # type: ignore[method-assign]


class Bench:
    def __init__(self, library: Path, directory: Path, recover: bool, engine: bool = False) -> None:
        self.library, self.directory = library, directory
        self.files = PoolFiles(directory / "pool")
        self.files.create()
        self.keys = KeyPair.load(self.files.key_path("user"))
        secret = directory / "secret"
        secret.write_bytes(self.files.secret())
        self.times = directory / "times"
        self.probe = directory / "probe"
        subprocess.run(["c++", "-O2", "-std=c++20", str(HERE / "client_probe.cpp"), "-o", str(self.probe), "-ldl"],
                       check=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if engine:
            from tests.support import fake_driver

            environment.update(fake_driver.build(directory), PYTHONPATH=os.pathsep.join(sys.path))
            del environment["RGPU_ENGINE_RING"], environment["RGPU_ENGINE_ARENA"]
        self.worker = subprocess.Popen([sys.executable, str(HERE / "client_worker.py"), str(secret), "0",
                                        str(self.times), *(["engine"] if engine else [])], stdout=subprocess.PIPE,
                                       text=True, env=environment)
        assert self.worker.stdout is not None
        port = int(self.worker.stdout.readline())
        pool = Pool(self.files, self.keys, port, recover)
        self.agents = {shared: Agent(Options("bench", recover=recover, journal_limit=4 << 30, same_host=shared),
                                     self.keys, [], complain=print,
                                     requests=PoolRequests(self.keys, [], make=lambda keys, endpoints: pool))
                       for shared in (False, True)}
        for agent in self.agents.values():
            agent.start()

    def run(self, *args: object, shared: bool = False) -> list[list[int]]:
        """The probe's numbers, line by line. ``shared``: bulk may go through memory."""
        self.times.unlink(missing_ok=True)
        done = subprocess.run([str(self.probe), str(self.library), *map(str, args)], capture_output=True, text=True,
                              timeout=300, env={**os.environ, "RGPU_AGENT": str(self.agents[shared].socket_path)})
        if done.returncode:
            raise SystemExit(f"the probe failed ({done.returncode}): {done.stderr[-500:]}")
        return [[int(value) for value in line.split()] for line in done.stdout.splitlines()]

    def worker_times(self) -> list[list[int]]:
        deadline = time.monotonic() + 10
        while not self.times.exists():
            if time.monotonic() > deadline:
                raise SystemExit("the worker wrote no times")
            time.sleep(0.05)
        time.sleep(0.1)
        return list(msgspec.msgpack.decode(self.times.read_bytes()))

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        self.worker.kill()
        self.worker.wait()


def breakdown(bench: Bench, count: int) -> dict[str, float]:
    """Medians in µs of the parts of the awaited copy's way, with a probed (slightly slower) agent."""
    trace = Trace()
    kept = Shipper.take_calls, DataLink.send_calls, Incoming._message
    trace.install()
    rows = bench.run("item", count)
    Shipper.take_calls, DataLink.send_calls, Incoming._message = kept  # type: ignore[method-assign]
    by_seq = {seq: (seen, sent) for seq, seen, sent in bench.worker_times()}
    answered = sorted(seq for seq in trace.answered if seq in by_seq)[-len(rows):]
    parts: dict[str, list[float]] = {}
    seen, sent = iter(trace.seen), iter(trace.sent)
    last_seen, last_sent = next(seen), next(sent)
    for seq, (before, after) in zip(answered, rows, strict=True):
        while last_seen[0] < seq:
            last_seen = next(seen)
        while last_sent[0] < seq:
            last_sent = next(sent)
        points = [before, last_seen[1], last_sent[1], by_seq[seq][0], by_seq[seq][1], trace.answered[seq], after]
        names = ["program to agent", "agent: seal and send", "to the worker", "worker answers", "back to the agent",
                 "agent to program"]
        for name, begin, end in zip(names, points, points[1:], strict=False):
            parts.setdefault(name, []).append((end - begin) / 1000)
    return {name: round(statistics.median(values), 1) for name, values in parts.items()}


def measure(bench: Bench, quick: bool, copies_only: bool = False) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if not copies_only:
        measure_calls(bench, quick, rows)
    for name, mode in (("host to device", "h2d"), ("device to host", "d2h")):
        for size, times in ((MIB, 100), (256 * MIB, 3 if quick else 10)):
            taken = statistics.median(line[0] for line in bench.run(mode, times, size))
            rows[f"{name} {size // MIB} MiB (GB/s)"] = round(size / taken, 2)
    return rows


def measure_paired(bench: Bench, quick: bool) -> dict[str, Any]:
    """Copies over TCP and through memory, in turn; GB/s of each, and how many times faster memory is."""
    rows: dict[str, Any] = {}
    for name, mode in (("host to device", "h2d"), ("device to host", "d2h")):
        for size, times in ((MIB, 50), (256 * MIB, 3)):
            taken: dict[bool, list[int]] = {False: [], True: []}
            for _ in range(1 if quick else 3):
                for shared in (False, True):
                    taken[shared] += [line[0] for line in bench.run(mode, times, size, shared=shared)]
            tcp, memory = (size / statistics.median(taken[shared]) for shared in (False, True))
            rows[f"{name} {size // MIB} MiB (GB/s)"] = {"tcp": round(tcp, 2), "shared": round(memory, 2),
                                                        "ratio": round(memory / tcp, 2)}
    return rows


def measure_calls(bench: Bench, quick: bool, rows: dict[str, Any]) -> None:
    count = 20_000 if quick else 200_000
    published, drained = bench.run("launch", count)[0]
    rows["tiny launch, published (us)"] = round(published / count / 1000, 2)
    rows["tiny launch, sustained (us)"] = round(drained / count / 1000, 2)
    trips = sorted((after - before) / 1000 for before, after in bench.run("item", 500 if quick else 5000))
    rows["item, median (us)"] = round(statistics.median(trips), 1)
    rows["item, 95 % (us)"] = round(trips[int(len(trips) * 0.95)], 1)
    rows["item, where the time goes (us)"] = breakdown(bench, 500 if quick else 2000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, default=ROOT / "rgpu" / "client" / "lib" / "libcuda.so.1")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--recover", action="store_true", help="keep the journal, as with a store configured")
    parser.add_argument("--engine", action="store_true", help="copies only, against the real worker's link and engine "
                        "on the tests' fake driver")
    parser.add_argument("--paired", action="store_true", help="with --engine: TCP and shared memory in turn")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options.library.resolve(), Path(directory), options.recover, options.engine)
        try:
            if options.paired and options.engine:
                rows = measure_paired(bench, options.quick)
            else:
                rows = measure(bench, options.quick, options.engine)
        finally:
            bench.close()
    for name, value in rows.items():
        print(f"{name:36} {value}")
    if options.output:
        result = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "python": platform.python_version(),
                  "machine": platform.processor() or platform.machine(), "recover": options.recover, "rows": rows}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
