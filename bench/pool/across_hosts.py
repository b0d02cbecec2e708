#!/usr/bin/env python3
"""One process that uses devices of several hosts: how fast does a copy from one host's device to another's go?

    python bench/pool/across_hosts.py                     three hosts of two cpu devices, links of 1 Gb/s
    python bench/pool/across_hosts.py --gigabits 10 --mib 512

Hosts are network namespaces, each behind a link of its own that the kernel shapes (tc, tbf); needs root, `ip` and
`tc`. In turns: a plain TCP connection between two of the hosts, and cuMemcpyPeer between their devices. Also the time
of a copy of 4 bytes, and of a stream's wait for an event of another host. Writes DATE-across-hosts.json to --output.
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

from tests.gpu.suite.report import environment  # noqa: E402
from tests.support.pools.hosts import NAMES, HostsPool, Network, unavailable  # noqa: E402
from tests.support.registry.etcd_cluster import EtcdCluster  # noqa: E402

#: Each end of a plain connection: receives, or sends, so many bytes.
RECEIVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7999))
print("ready", flush=True)
sock, _ = listener.accept()
left, buffer = int(sys.argv[2]), bytearray(1 << 20)
while left > 0:
    left -= sock.recv_into(buffer, min(left, len(buffer))) or left
sock.sendall(b"x")
"""
SEND = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 7999), 20)
data, left = memoryview(bytes(1 << 20)), int(sys.argv[2])
began = time.monotonic()
while left > 0:
    left -= sock.send(data[:min(left, len(data))])
sock.recv(1)
print(time.monotonic() - began)
"""


def shape(network: Network, gigabits: float) -> None:
    """Give every host's interface, and the bridge's end of it, that rate."""
    rule = ("root", "tbf", "rate", f"{gigabits}gbit", "burst", "512kb", "latency", "50ms")
    for index, host in enumerate(network.hosts):
        for words in (("-n", network.space(host), "qdisc", "add", "dev", "eth0"),
                      ("qdisc", "add", "dev", network.end(index))):
            subprocess.run(["tc", *words, *rule], check=True, capture_output=True)


def plain(network: Network, size: int) -> float:
    """Bytes a second of a TCP connection from the first host to the second."""
    inside = [["ip", "netns", "exec", network.space(host), sys.executable, "-c"] for host in NAMES[:2]]
    where = network.hosts[NAMES[1]]
    with subprocess.Popen([*inside[1], RECEIVE, where, str(size)], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        spent = float(subprocess.run([*inside[0], SEND, where, str(size)], check=True, capture_output=True,
                                     text=True).stdout)
    return size / spent


def measured(pool: HostsPool, size: int, turns: int, network: Network) -> dict[str, Any]:
    """Run the program, and a plain connection before each of its copies."""
    gates = pool.folder / "gates"
    gates.mkdir()
    command = (sys.executable, "-W", "ignore", str(ROOT / "bench" / "pool" / "across_hosts_copies.py"), str(gates))
    program = pool.run(*command, str(size), str(turns), name="across", options=("--gpus", "6", "--spread"))
    links = []
    for turn in range(turns):
        while f"turn {turn}" not in program.lines:
            if program.process.poll() is not None:
                raise SystemExit(f"the program ended: {program.errors[-20:]}")
            time.sleep(0.05)
        links.append(plain(network, size))
        (gates / str(turn)).touch()
    if program.process.wait(300):
        raise SystemExit(f"the program failed: {program.errors[-20:]}")
    program.finish_reading()
    found: dict[str, Any] = json.loads(program.lines[-1])
    return {**found, "link_bytes_per_s": links}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabits", type=float, default=1.0, help="of each host's link")
    parser.add_argument("--mib", type=int, default=128, help="of a copy")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as name, Network() as network, \
            EtcdCluster(Path(name) / "etcd", host=network.address) as cluster, \
            HostsPool(Path(name), network, cluster, devices=("cpu:0", "cpu:1")) as pool:
        shape(network, options.gigabits)
        found = measured(pool, options.mib << 20, options.turns, network)
    ratios = [copy / link for copy, link in zip(found["copy_bytes_per_s"], found["link_bytes_per_s"], strict=True)]
    found |= {"gigabits": options.gigabits, "mib": options.mib, "ratios": ratios, "ratio": statistics.median(ratios)}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-across-hosts.json"
    path.write_text(json.dumps({**environment(), "processors": os.cpu_count(), "command": " ".join(sys.argv), **found},
                               indent=1) + "\n")
    print(f"copies between hosts: {statistics.median(found['copy_bytes_per_s']) / 1e6:.0f} MB/s, a plain connection "
          f"{statistics.median(found['link_bytes_per_s']) / 1e6:.0f} MB/s: {found['ratio']:.2f} ({min(ratios):.2f} to "
          f"{max(ratios):.2f})\n4 bytes: {found['small_s'] * 1e3:.1f} ms; a wait for another host's event: "
          f"{found['wait_s'] * 1e3:.1f} ms\nwritten: {path}")


if __name__ == "__main__":
    main()
