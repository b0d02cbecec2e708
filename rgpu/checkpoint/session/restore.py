"""Rebuilding a session on a fresh device: replay the structural calls, write pages, verify.

The order is fixed: objects first (their replay maps memory and places module
variables), then the addresses are compared, then pages are written over the
variables' initial values, and at the end every page is hashed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from rgpu.checkpoint.device import Device, Region
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import differing, page_run
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.store.delivery import Delivery
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.session.errors import Corrupt, RecoveryFailed, RgpuError

MENDS = 2  #: how often pages that differ are fetched again
BATCH = 1024  #: pages written at once: where sessions share a GPU, each wait for the device may last a time slice

#: Calls its argument with batches of (address, size, bytes or None for zeros) …; returns the number of pages.
Deliver = Callable[[Callable[[list[tuple[int, int, Any]]], None]], int]
#: (region, indices of its pages that differ): fetch them again from their source; False: they are not available.
Mend = Callable[[Region, "np.ndarray[Any, Any]"], bool]


def rebuild(device: Device, state: SessionState, records: Iterable[Any], apply: Callable[[Any], None]) -> None:
    """Replay the structural calls through ``apply`` and compare the resulting regions with ``state``.

    ``records`` are the calls that the live objects consist of, in order.
    Raises :class:`RecoveryFailed`; then the device must not be used any more.
    """
    apply_calls(device, records, apply)
    compare_regions(device.regions(), state)


def apply_calls(device: Device, records: Iterable[Any], apply: Callable[[Any], None]) -> None:
    """Replay structural calls through ``apply``. Raises as :func:`rebuild`."""
    for record in records:
        try:
            apply(record)
        except RgpuError as error:
            seq = getattr(record, "seq", None)
            raise RecoveryFailed(f"call {seq} of the session's live objects failed: {error.message}", seq=seq,
                                 reason=error.code) from error
    if device.error:
        raise RecoveryFailed(f"the replay of the live objects failed: {device.error_detail()}", reason="device")


def compare_regions(present: list[Region], state: SessionState) -> None:
    """Check that every recorded region has its recorded address. Raises :class:`RecoveryFailed` naming the first that
    does not.

    Module variables are compared by (module, name, occurrence), so that the
    message contains the variable that moved, and its addresses.
    """
    wanted = [region.region() for region in state.regions]
    _compare_globals(present, wanted)
    for kind in ("mapped", "pinned"):
        here = {(r.address, r.size) for r in present if r.kind == kind}
        there = {(r.address, r.size) for r in wanted if r.kind == kind}
        for address, size in sorted(here ^ there):
            what = "is missing" if (address, size) in there else "was not there before"
            raise RecoveryFailed(f"the {kind} range {address:#x}+{size:#x} {what} after the replay", address=address,
                                 reason="region")


def _compare_globals(present: list[Region], wanted: list[Region]) -> None:
    named = all(region.name for region in wanted if region.kind == "global")  # an older checkpoint has no names
    here, there = _globals(present, named), _globals(wanted, named)
    for identity in sorted(there.keys() | here.keys()):
        module, name = identity
        now, before = here.get(identity), there.get(identity)
        if now == before:
            continue
        if now is None or before is None:
            what = "is missing" if now is None else "was not there before"
            raise RecoveryFailed(f"global {name!r} of module {module} {what} after the replay", module=module,
                                 variable=name, reason="global")
        raise RecoveryFailed(
            f"global {name!r} of module {module} is at {_places(now)} after the replay, it was at {_places(before)}",
            module=module, variable=name, reason="global address")


def _globals(regions: list[Region], named: bool) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Return (module, name) → its (address, size) … in ascending order: a module may have many variables of one name,
    in no order.
    """
    found: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for region in regions:
        if region.kind == "global":
            found.setdefault((region.owner, region.name if named else ""), []).append((region.address, region.size))
    return {identity: sorted(places) for identity, places in found.items()}


def _places(places: list[tuple[int, int]]) -> str:
    return ", ".join(f"{address:#x} ({size} bytes)" for address, size in places)


def write_pages(device: Device, state: SessionState, pages: Iterable[tuple[int, int, bytes | None]]) -> int:
    """Write (region address, page index, bytes or None for zeros) …; returns how many.

    Zero pages of mapped memory and mirrors may be left out: they are zero already.
    """
    regions = {region.address: region.region() for region in state.regions}
    count, runs = 0, []
    for address, index, data in pages:
        runs.append(page_run(regions, address, index, data))
        count += 1
        if len(runs) >= BATCH:
            device.write_pages(runs)
            runs = []
    if runs:
        device.write_pages(runs)
    return count


class Blame(Protocol):
    """Callable that raises the reason for which pages of a region differ; if it returns, the device is the reason.

    ``number``: the region's number in the state.
    """

    def __call__(self, number: int, indices: np.ndarray[Any, Any]) -> None: ...


def finish(device: Device, state: SessionState, mend: Mend | None = None, blame: Blame | None = None) -> None:
    """Verify every page, copy the arrays' memory into the arrays, then restore events and clock.

    ``mend``: fetches pages that differ again, from a source that does not change; they are verified, too.
    Raises :class:`RecoveryFailed` naming the first bad page, unless ``blame`` raises the reason.
    """
    regions = [region.region() for region in state.regions]
    present = device.hash_regions(regions, state.hash_key)
    for number, (region_state, found) in enumerate(zip(state.regions, present, strict=True)):
        bad = np.flatnonzero(pagehash.differ(_alike(found.hashes, region_state), region_state.page_hashes()))
        for _ in range(MENDS):
            if not len(bad) or mend is None or not mend(region_state.region(), bad):
                break
            bad = differing(device, region_state.region(), region_state.page_hashes(), state.hash_key)
        if len(bad):
            if blame is not None:
                blame(number, bad)
            what = f"global {region_state.name!r}" if region_state.kind == "global" else f"{region_state.kind} range"
            raise RecoveryFailed(
                f"{len(bad)} pages of the {what} at {region_state.address:#x} differ, the first is page {bad[0]}",
                address=region_state.address, page=int(bad[0]), pages=len(bad), reason="page hash")
    device.spread_arrays()
    events = device.event_states().keys()
    device.restore_event_states({event: when for event, when in state.events.items() if event in events})
    device.set_clock(state.clock)


def _alike(present: np.ndarray[Any, Any], region: RegionState) -> np.ndarray[Any, Any]:
    """Return ``present``. Raises :class:`Corrupt` if its number of hashes is not the region's."""
    if present.shape != region.page_hashes().shape:
        raise Corrupt(f"{len(region.page_hashes())} page hashes for a region of {len(present)} pages",
                      offset=region.address, reason="hash count")
    return present


def restore(device: Device, state: SessionState, records: Iterable[Any], apply: Callable[[Any], None],
            pages: Iterable[tuple[int, int, bytes | None]] | Deliver | StoredCheckpoint, mend: Mend | None = None,
            phases: Phases | None = None) -> int:
    """Rebuild the objects, write the pages, verify; returns the number of pages written.

    ``pages``: as :func:`write_pages` takes them; or :meth:`rgpu.checkpoint.store.reader.StoredCheckpoint.deliver` of a
    checkpoint with this state: then many threads read, check and write; or that checkpoint itself: then they do so
    through frames, and for a page that differs on the device it is found out whether the store is the reason.
    ``phases``: receives the time of each step.
    """
    phases = phases or Phases()
    blame: Blame | None = None
    with phases.phase("objects"):
        rebuild(device, state, records, apply)
    with phases.phase("pages"):
        if isinstance(pages, StoredCheckpoint):
            delivery = Delivery(pages, device, processes=pages.processes)
            count, blame = delivery.run(), delivery.blame
            for name, seconds in delivery.times.items():
                phases.add(f"threads {name}", seconds)
        else:
            count = pages(device.write_pages) if callable(pages) else write_pages(device, state, pages)
    with phases.phase("compare"):
        finish(device, state, mend, blame)
    return count
