"""Measures the input of a move's choice of mode: how fast a session's pages change, and how many were not sent yet."""

from __future__ import annotations

import time

import structlog

from rgpu.checkpoint.device import PAGE, Device
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.frozen import HOST_LIMIT, RESERVE, look
from rgpu.checkpoint.pages.pages import PageTable
from rgpu.migrate.move import forecast
from rgpu.session.errors import DeviceError

log = structlog.get_logger(__name__)

SAMPLE_SECONDS = 0.1  #: between the two hashings that are compared
LOOKS = 3  #: tries to measure


def measure(device: Device, table: PageTable, speed: float, since_seconds: float) -> forecast.Measured:
    """Measure how much changes, and how much differs from what was sent; the session runs meanwhile.

    ``table``: the pages that the other side has, since ``since_seconds`` seconds. ``speed``: of the link, bytes/s.
    """
    for _ in range(LOOKS):
        try:
            seconds, pages, differing, moved = _compare_twice(device, table)
            break
        except DeviceError as error:  # memory was freed between the two hashings
            log.info("could not measure what changes", reason=error.message)
    else:
        return forecast.Measured(pages=0, differing=0, changed=(), speed=speed, free_pages=0,
                                 replay_refused="the session's memory changes too fast to be measured")
    room = max(0, device.free_memory() - RESERVE) + HOST_LIMIT
    pins = device.pins()
    return forecast.Measured(
        pages=pages, differing=differing, changed=((seconds, moved), (since_seconds + seconds, differing)), speed=speed,
        free_pages=room // PAGE, settle_seconds=0.02, replay_refused="; ".join(pins))


def _compare_twice(device: Device, table: PageTable) -> tuple[float, int, int, int]:
    """Return (seconds between two hashings, pages in all, pages that differ from those sent, pages that changed)."""
    first = look(device, table.key)
    began = time.monotonic()
    time.sleep(SAMPLE_SECONDS)
    second = look(device, table.key)
    seconds = time.monotonic() - began
    table.follow(second.regions())
    pages = differing = moved = 0
    before = {(region.address, region.size): first.hash_pages(region, table.key) for region in first.regions()}
    for region in second.regions():
        hashes = second.hash_pages(region, table.key)
        pages += len(hashes)
        differing += len(table.dirty(region, hashes))
        known = before.get((region.address, region.size))
        moved += len(hashes) if known is None else int(pagehash.differ(known, hashes).sum())
    return seconds, pages, differing, moved
