"""A process for the destination's side of a move.

usage: python -m tests.support.worker.arriving FD KEY KEY [FOLDER [WRONG]]

FOLDER: where the source may hand its memory over; WRONG pulls to come leave a wrong byte behind.

The device's addresses are fixed, so source and destination cannot share a process. Says ``held DIGEST`` of all that
the session holds once it was verified for the last time, and ends when its input does.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.link.data.frames import Handover
from rgpu.link.messages.data import FROM_NODE
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.main import Worker
from rgpu.server.worker.move.arrival import Arrival


def digest(device: Device) -> str:
    """Of every byte that belongs to the session."""
    from blake3 import blake3

    total = blake3()
    for region in sorted(device.regions(), key=lambda region: region.address):
        total.update(f"{region.address} {region.size} {region.kind};".encode())
        total.update(device.read(region.address, region.size))
    return total.hexdigest()


def spoil(device: CpuDevice, times: int) -> None:
    """The next pulls after the first round's are wrong in one bit, as faulty memory would make them."""
    honest, left = device.peer.pull, [times]

    def pull(copies: Any) -> None:
        honest(copies)
        tells = sys._getframe(1).f_locals.get("tell")
        if not tells and left[0]:
            left[0] -= 1
            _, address, _ = copies[0]
            device.write(address, bytes([device.read(address, 1)[0] ^ 1]))

    device.peer.pull = pull  # type: ignore[method-assign]


def main() -> None:
    number, near, far, *more = sys.argv[1:]
    keys = bytes.fromhex(near), bytes.fromhex(far)
    connection = Handover(keys[1], keys[0], FROM_NODE, "s", 1, "pages").connection(socket.socket(fileno=int(number)))
    device = CpuDevice(memory=128 << 20)
    worker = Worker("s", 1, device, "incoming", folder=Path(more[0]) if more else None)
    if more[1:]:
        spoil(device, int(more[1]))
    Arrival(worker, connection).run()
    print("held", digest(device), worker.runtime.applied, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
