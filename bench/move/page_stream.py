#!/usr/bin/env python3
"""The page stream's speed over loopback: this one, and one page after another as it was before, in one run.

    python bench/move/page_stream.py [--size-mib 512] [--lanes N] [--rounds 3]

Both ends are processes of their own with `cpu` devices; the pages are random,
so that nothing compresses. Prints GiB/s of each, the median of --rounds turns
taken in alternation, and their ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lz4.block  # noqa: E402
import numpy as np  # noqa: E402

from rgpu.checkpoint.device import PAGE  # noqa: E402
from rgpu.checkpoint.pages.pages import PageTable, collect_dirty  # noqa: E402
from rgpu.link.data.frames import Handover, SealedConnection  # noqa: E402
from rgpu.link.messages.data import FROM_NODE, TO_NODE
from rgpu.migrate.transfer.receiver import PageReceiver  # noqa: E402
from rgpu.migrate.transfer.sender import PageSender, lanes_here  # noqa: E402
from rgpu.server.device.cpu.device import CpuDevice  # noqa: E402
from rgpu.session.addresses import DEVICE_BASE  # noqa: E402

KEYS = bytes(32), bytes(range(32))  # of a benchmark: nothing secret passes
HASH_KEY = bytes(range(32))
OLD, END = 1, 2


def near(port: int) -> SealedConnection:
    sock = socket.create_connection(("127.0.0.1", port))
    return Handover(KEYS[0], KEYS[1], TO_NODE, "s", 1, "pages").connection(sock)


def far(listener: socket.socket) -> SealedConnection:
    return Handover(KEYS[1], KEYS[0], FROM_NODE, "s", 1, "pages").connection(listener.accept()[0])


def serve(listener: socket.socket, size: int, lanes: int, rounds: int) -> None:
    """The destination, for every turn anew; ends with the last."""
    import threading
    for _ in range(rounds):
        device = CpuDevice(memory=size)
        connection = far(listener)  # the old way
        device.map(DEVICE_BASE, size)
        while True:
            kind, body = connection.recv()
            if kind == END:
                connection.send(END, b"")
                break
            at = 0
            while at < len(body):
                index = int.from_bytes(body[at:at + 4], "little")
                device.write(DEVICE_BASE + index * PAGE, bytes(body[at + 4:at + 4 + PAGE]))
                at += 4 + PAGE
        connection.close()
        device.close()
        device = CpuDevice(memory=size)
        receiver = PageReceiver(far(listener), device)
        for _ in range(lanes - 1):
            threading.Thread(target=lambda to=receiver: to.join(far(listener)), daemon=True).start()
        try:
            receiver.receive()
        except Exception:  # noqa: BLE001 - the source hangs up when it has measured
            pass
        device.close()


def one_by_one(connection: SealedConnection, device: CpuDevice) -> float:
    """As the stream was: hash all, then read, hash, try lz4, gather, seal and send page after page in one thread."""
    began = time.monotonic()
    batch = []
    for page in collect_dirty(device, PageTable(HASH_KEY)):
        assert page.data is not None
        lz4.block.compress(page.data, store_size=False)
        batch.append(page.index.to_bytes(4, "little") + page.data)
        if len(batch) == 32:
            connection.send(OLD, b"".join(batch))
            batch.clear()
    connection.send(OLD, b"".join(batch))
    connection.send(END, b"")
    connection.recv()
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--lanes", type=int, default=lanes_here())
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.size_mib << 20
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    peer = multiprocessing.get_context("fork").Process(target=serve, args=(listener, size, options.lanes,
                                                                           options.rounds))
    peer.start()
    device = CpuDevice(memory=size)
    device.map(DEVICE_BASE, size)
    random = np.random.default_rng(1)
    for at in range(0, size, 1 << 24):
        device.write(DEVICE_BASE + at, random.integers(0, 256, min(1 << 24, size - at), np.uint8))
    found: dict[str, list[float]] = {"one page after another": [], "pipelined": []}
    for _ in range(options.rounds):
        connection = near(port)
        found["one page after another"].append(size / one_by_one(connection, device) / 2**30)
        connection.close()
        first = near(port)
        sender = PageSender(first, device, HASH_KEY, more=lambda: near(port), lanes=options.lanes)
        sender.begin("s", "m")
        began = time.monotonic()
        sender.round()
        found["pipelined"].append(size / (time.monotonic() - began) / 2**30)
        sender.close()
        first.close()
    peer.join(30)
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    for name, value in medians.items():
        print(f"{name:24s} {value:6.2f} GiB/s")
    print(f"{'ratio':24s} {medians['pipelined'] / medians['one page after another']:6.2f}   ({options.size_mib} MiB, "
          f"{options.lanes} lanes, {options.rounds} rounds)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
