"""Samples of a session's pages, taken at one position of the journal on both sides of a replay.

The source takes them while the program runs, in pauses of some milliseconds, at
growing distances from the snapshot point: results that a replay cannot repeat show early, and
slowly spreading differences are seen to grow. Each sample stands in the tap, behind the
calls that it reflects; the destination compares when its replay reaches that position.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import page_size
from rgpu.link.faults import fault
from rgpu.link.messages.pages import PROBE_ENTRY_LAYOUT
from rgpu.migrate.move import sampling
from rgpu.migrate.transfer import replay_link as wire
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import DeviceError, RecoveryFailed, RgpuError

log = structlog.get_logger(__name__)

FIRST_SECONDS = 0.05  #: from the snapshot point to the first sample; the gaps double then
LONGEST_SECONDS = 10.0  #: between two samples
DRAIN_SECONDS = 0.1  #: limit for the device to drain; beyond it the sample is left out


class Prober:
    """Takes samples in a thread of its own from :meth:`start` to :meth:`stop`."""

    def __init__(self, runtime: SessionRuntime, tap: JournalTap, chance: random.Random | None = None) -> None:
        self.stood = 0.0  #: seconds that the session was paused for samples only
        self.pages = 0  #: of the session, when the last sample was taken
        self.error: RgpuError | None = None  #: the error that ended sampling early
        self._runtime = runtime
        self._tap = tap
        self._chance = chance or random.Random()
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)

    def start(self) -> None:
        """Start after the consistent snapshot: a sample from before it would not test the replay."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; on return no sample is being taken. May be called without :meth:`start`, and again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        gap = FIRST_SECONDS
        while not self._stop.wait(gap):
            try:
                fault("replay.sample")
                taken = self.take()
            except RgpuError as error:
                self.error = error
                return
            gap = min(2 * gap, LONGEST_SECONDS) if taken else FIRST_SECONDS

    def take(self) -> bool:
        """Pause, hash a sample, mark its position. Return False when that was not possible just now."""
        runtime = self._runtime
        began, stands = time.monotonic(), runtime.paused
        runtime.pause()
        try:
            if not runtime.device.drain(DRAIN_SECONDS):
                return False
            regions = runtime.device.regions()
            counts = [pagehash.page_count(region.size) for region in regions]
            chosen = sampling.choose(counts, sampling.PAGES, self._chance)
            entries = hashed(runtime.device, regions, chosen, runtime.hash_key)
            self._number += 1
            self.pages = sum(counts)
            self._tap.mark(wire.probe(self._number, runtime.applied, entries))
            return True
        except DeviceError as error:  # the program's own error does not end the move
            log.info("no sample could be taken", reason=error.message)
            return False
        finally:
            runtime.resume()
            self.stood += 0.0 if stands else time.monotonic() - began


def hashed(device: Device, regions: Sequence[Region], chosen: Sequence[Sequence[int]],
           key: bytes) -> np.ndarray[Any, Any]:
    """Return the entries of a PROBE for the pages ``chosen`` of each region. Raises :class:`DeviceError`."""
    pages = [Region(region.address + index * PAGE, page_size(region, index), region.kind)
             for region, indices in zip(regions, chosen, strict=True) for index in indices]
    entries = np.empty(len(pages), PROBE_ENTRY_LAYOUT)
    entries["address"] = [page.address for page in pages]
    entries["size"] = [page.size for page in pages]
    for row, found in enumerate(device.hash_regions(pages, key) if pages else ()):
        entries["hash"][row] = found.hashes[0]
    return entries


def differing(device: Device, entries: np.ndarray[Any, Any], key: bytes) -> int:
    """Return how many pages of a sample differ on a drained device.

    Raises :class:`RecoveryFailed` for a page outside its regions: then the replay has other memory than the session.
    """
    regions = sorted(device.regions(), key=lambda region: region.address)
    starts = [region.address for region in regions]
    pages = []
    for address, size in zip(entries["address"].tolist(), entries["size"].tolist(), strict=True):
        region = regions[at] if (at := bisect.bisect_right(starts, address) - 1) >= 0 else None
        if region is None or address + size > region.address + region.size or (address - region.address) % PAGE:
            raise RecoveryFailed(f"the session has a page at {address:#x} where the replay has none", address=address,
                                 reason="regions")
        pages.append(Region(address, size, region.kind))
    found = device.hash_regions(pages, key) if pages else []
    return sum(bool((one.hashes[0] != row).any()) for one, row in zip(found, entries["hash"], strict=True))
