"""Devices with pages, and whether two hold the same."""

from __future__ import annotations

import numpy as np

from rgpu.checkpoint.device import PAGE, Region
from tests.support.worker.pages_device import PlainDevice

BASE = 0x100000000000
MAPPED = 48 * PAGE


def filled(seed: int = 1) -> PlainDevice:
    """Two mappings (random, half zeros), a variable of odd length, a pinned mirror."""
    random = np.random.default_rng(seed)
    device = PlainDevice()
    device.add(Region(BASE, MAPPED, "mapped"), random.integers(0, 256, MAPPED, np.uint8))
    half = device.add(Region(BASE + MAPPED, MAPPED, "mapped"))
    half[:MAPPED // 2] = random.integers(0, 256, MAPPED // 2, np.uint8)
    device.add(Region(BASE + (1 << 40), PAGE + 100, "global", 3), random.integers(0, 256, PAGE + 100, np.uint8))
    device.add(Region(BASE - (1 << 40), 2 * PAGE, "pinned"), random.integers(0, 256, 2 * PAGE, np.uint8))
    return device


def equal(source: PlainDevice, destination: PlainDevice, pages: dict[int, bytes]) -> None:
    for region, data in source.memory.values():
        if region.kind == "mapped":
            assert np.array_equal(destination.memory[region.address][1], data), f"{region}"
        else:
            whole = b"".join(pages[region.address + at] for at in range(0, region.size, PAGE))
            assert whole == data.tobytes(), f"{region}"
