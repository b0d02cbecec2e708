"""Taking a session's state from a drained device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import Page, read_page
from rgpu.session.errors import DeviceError, TimedOut


def take(device: Device, *, session: str, epoch: int, position: int, hash_key: bytes, live: Any, answers: Any = None,
         printed: Any = None, contributions: Sequence[Any] = (), given: Any = msgspec.UNSET, drain_seconds: float = 0.1,
         without: Collection[tuple[int, int]] = ()) -> SessionState:
    """Take the session's state: everything but the pages' bytes, with the hash of each page.

    ``without``: (address, size) of mapped regions whose hashes are left out, because the reader has them.

    The caller applies no call meanwhile. Raises :class:`TimedOut` if the
    device does not drain in ``drain_seconds`` (apply further calls and try again,
    SEMANTICS 19), :class:`DeviceError` if the device has a sticky error: such a
    state is never kept.
    """
    if not device.drain(drain_seconds):
        raise TimedOut(f"work was still running after {drain_seconds} s", seconds=drain_seconds)
    if device.error:
        raise DeviceError(f"the session has failed: {device.error_detail()}", device.error)
    regions = [
        RegionState(region.address, region.size, region.kind, region.owner, region.name,
                    b"" if region.kind == "mapped" and (region.address, region.size) in without else
                    pagehash.pack(device.hash_pages(region, hash_key)))
        for region in sorted(device.regions(), key=lambda region: region.address)
    ]
    facts = device.facts
    return SessionState(
        session=session, epoch=epoch, position=position, hash_key=hash_key, regions=regions, live=live,
        events=device.event_states(), clock=device.clock(), answers=answers, printed=printed,
        contributions=contributions or msgspec.UNSET, given=given,
        device={"name": facts.name, "compute_capability": list(facts.compute_capability),
                "driver_version": facts.driver_version})


def pages(device: Device, state: SessionState, wanted: Sequence[Any] | None = None) -> Iterator[Page]:
    """Yield the pages of the consistent snapshot, in address order; the device must not run meanwhile.

    ``wanted``: for each region of ``state`` the indices of the pages to yield (what
    :meth:`rgpu.checkpoint.store.writer.CheckpointWriter.inherit` returns); by default all. Raises
    :class:`DeviceError` when a page does not have its hash: work ran meanwhile.
    """
    for number, region_state in enumerate(state.regions):
        region, hashes = region_state.region(), region_state.page_hashes()
        for index in range(len(hashes)) if wanted is None else wanted[number].tolist():
            page = read_page(device, region, index, state.hash_key)
            if page.hash != (int(hashes[index][0]), int(hashes[index][1])):
                raise DeviceError(f"page {index} of {region.address:#x} changed during the snapshot", 999)
            yield page
