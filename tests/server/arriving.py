"""A process for the destination's side of a move: usage: python -m tests.server.arriving FD KEY KEY.

The device's addresses are fixed, so source and destination cannot share a process. Says ``held DIGEST`` of all that
the session holds once it was verified for the last time, and ends when its input does.
"""

from __future__ import annotations

import socket
import sys

from rgpu.checkpoint.device import Device
from rgpu.link.frames import Handover
from rgpu.link.sealing import FROM_NODE
from rgpu.server.arrival import Arrival
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker import Worker


def digest(device: Device) -> str:
    """Of every byte that belongs to the session."""
    from blake3 import blake3

    total = blake3()
    for region in sorted(device.regions(), key=lambda region: region.address):
        total.update(f"{region.address} {region.size} {region.kind};".encode())
        total.update(device.read(region.address, region.size))
    return total.hexdigest()


def main() -> None:
    number, near, far = sys.argv[1:]
    keys = bytes.fromhex(near), bytes.fromhex(far)
    connection = Handover(keys[1], keys[0], FROM_NODE, "s", 1, "pages").connection(socket.socket(fileno=int(number)))
    device = CpuDevice(memory=128 << 20)
    worker = Worker("s", 1, device, "incoming")
    Arrival(worker, connection).run()
    print("held", digest(device), worker.runtime.applied, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
