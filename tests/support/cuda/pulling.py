"""The destination of test_peer_gpu, a process of its own: python -m tests.support.cuda.pulling ORDINAL FOLDER.

Says ``path PATH TOKEN``; then for each line of its input, ``take ADDRESS SIZE …`` (descriptors come on the socket),
``pull ADDRESS BYTES …``, ``hash ADDRESS SIZE`` and ``drop``, one line: ``ok`` and what it found, or ``error`` and why.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rgpu.checkpoint.device import Region
from rgpu.checkpoint.peer import Imported
from rgpu.migrate.transfer.peer_link import Listener, close_all
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.session.errors import RgpuError

KEY = bytes(range(32))


def pairs(words: list[str]) -> list[tuple[int, int]]:
    numbers = [int(word, 0) for word in words]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def obey(device: CudaDevice, listener: Listener, held: dict[int, Imported], words: list[str]) -> Any:
    what, rows = words[0], pairs(words[1:])
    began = time.monotonic()
    if what == "take":
        fds = listener.receive(len(rows))
        for address, size in rows:
            device.map(address, size)
        try:
            for one in device.peer.admit([(at, size, 1, fd) for (at, size), fd in zip(rows, fds, strict=True)]):
                held[one.address] = one
        finally:
            close_all(fds)
    elif what == "pull":
        starts = sorted(held)
        device.peer.pull([(held[max(at for at in starts if at <= address)], address, size) for address, size in rows])
    elif what == "hash":
        (found,) = device.hash_regions([Region(*rows[0], "mapped")], KEY)
        return found.hashes.tobytes().hex()
    else:
        device.peer.dismiss(list(held.values()))
        held.clear()
    return time.monotonic() - began


def main() -> None:
    device, listener = CudaDevice(int(sys.argv[1])), Listener(Path(sys.argv[2]))
    held: dict[int, Imported] = {}
    print("path", listener.path, listener.token.hex(), flush=True)
    for line in sys.stdin:
        try:
            print("ok", obey(device, listener, held, line.split()), flush=True)
        except RgpuError as error:
            print("error", error.message, flush=True)
    listener.close()
    device.close()


if __name__ == "__main__":
    main()
