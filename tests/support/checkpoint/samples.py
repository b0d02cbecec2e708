"""A device with some of everything, its checkpoints, and what is compared of them."""

from __future__ import annotations

import random

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from tests.support.checkpoint.fake_device import FakeDevice

KEY = bytes(range(32))
BASE, PINNED, GLOBAL = 0x2000_0000_0000, 0x1800_0000_0000, 0x2700_0000_0000


def sample_device(seed: int = 1, pages: int = 6) -> FakeDevice:
    """Random, compressible, equal and zero pages, a short mirror and two variables."""
    chance = random.Random(seed)
    device = FakeDevice(now=123456, events={20: 1000, 21: None})
    device.add(BASE, pages * PAGE)
    for page in range(pages):
        kind = page % 4
        data = (chance.randbytes(PAGE), bytes(PAGE), b"abcd" * (PAGE // 4), b"same page" + bytes(PAGE - 9))[kind]
        device.write(BASE + page * PAGE, data)
    device.add(PINNED, 5000, "pinned", data=b"pinned bytes")
    device.add(GLOBAL, 12, "global", 17, "counter", b"counter val!")
    device.add(GLOBAL + 256, PAGE + 7, "global", 17, "table")
    return device


def taken(device: FakeDevice, position: int = 7) -> SessionState:
    return cut.take(device, session="demo/1", epoch=3, position=position, hash_key=KEY,  # type: ignore[arg-type]
                    live={"objects": [[8, b"args"]]}, answers={"9": [0, b"", b"data"]})


def fresh(device: FakeDevice) -> FakeDevice:
    """What a replay leaves: the same regions, mapped memory zero, variables as loaded."""
    made = FakeDevice(events=dict.fromkeys(device.events))
    for region in device.regions():
        made.add(region.address, region.size, region.kind, region.owner, region.name,
                 b"as loaded" if region.kind == "global" else b"")
    return made


def same(a: FakeDevice, b: FakeDevice) -> bool:
    return {k: (r, bytes(d)) for k, (r, d) in a.memory.items()} == {k: (r, bytes(d)) for k, (r, d) in b.memory.items()}
