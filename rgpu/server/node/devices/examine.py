"""Check whether a device works: ``python -m rgpu.server.node.devices.examine --device cuda:0``, started by the daemon
as a process of its own.

A faulty device can hang a process that uses it, so only this process does. Memory is allocated,
written, hashed by a kernel, and read back and compared. One line on stdout: {"fault": "…"}, empty where
there is none. An error that is not the device's, such as too little memory for a context, is no fault; ``worked`` is
false then.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np

from rgpu.checkpoint.device import Device, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.link.faults import broken
from rgpu.server.device.spec import lost, make_device
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.errors import DeviceError, RgpuError

#: Errors of making a context or memory: too little memory, too many processes, a mode that allows only one.
NOT_TOLD = frozenset({2, 46, 205, 208, 304, 305, 800})
CONTEXT = 16


def examine(spec: str) -> tuple[str, bool]:
    """Return what is wrong with the device, empty where nothing was found, and whether it did its work."""
    if found := broken(spec):
        return found, False
    try:
        device = make_device(spec, 4 * GRANULE)
    except DeviceError as error:
        return "" if error.result in NOT_TOLD else f"it cannot be used: {error.message}", False
    try:
        fault = _work(device) or lost(spec, device)
        return fault, not fault
    except DeviceError as error:
        return "" if error.result in NOT_TOLD else f"it failed at plain work: {error.message}", False


def _work(device: Device) -> str:
    key, size = os.urandom(32), GRANULE
    device.create_context(CONTEXT, 0, True)
    device.map(DEVICE_BASE, size)
    device.allocate(DEVICE_BASE, size)
    data = np.random.default_rng(int.from_bytes(key[:4])).bytes(size)
    device.write(DEVICE_BASE, data)
    found = device.hash_pages(Region(DEVICE_BASE, size, "mapped"), key)
    wanted = [pagehash.hash_page(data[at:at + pagehash.PAGE], key) for at in range(0, size, pagehash.PAGE)]
    if [tuple(map(int, value)) for value in found] != [tuple(map(int, value)) for value in wanted]:
        return "a kernel computed other hashes of its memory than the host"
    if bytes(device.read(DEVICE_BASE, size)) != data:
        return "its memory does not hold what was written"
    return ""


def main() -> None:
    """Examine one device and print the result; may hang on a faulty one."""
    parser = argparse.ArgumentParser(description="internal: looks whether a device works; started by `rgpu server`")
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    try:
        found, worked = examine(options.device)
    except RgpuError as error:
        found, worked = f"it cannot be examined: {error.message}", False
    print(json.dumps({"fault": found, "worked": worked}), flush=True)
    os._exit(0)  # a faulty device's threads are not waited for


if __name__ == "__main__":
    main()
