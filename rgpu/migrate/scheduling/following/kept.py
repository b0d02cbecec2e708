"""The pool kept as arrays between decisions: placement by fragmentation in well under a millisecond.

:class:`Kept` returns exactly what ``adapter.place_by_fragmentation`` and the functions of
``placement.py`` return from the records alone (a test with random histories compares them),
but keeps the pool as arrays (:mod:`.followed`). It is only a cache: before each answer it
is updated to the snapshot in question, so that any snapshot may be used at
any time, from any thread, and the answer depends on that snapshot alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import numpy as np

from rgpu.migrate.records.schema import DeviceRecord, NodeRecord
from rgpu.migrate.scheduling.following.followed import MOST, Followed
from rgpu.migrate.scheduling.index import Bools
from rgpu.migrate.scheduling.placement import Choice, Place, Request, Room, Snapshot, no_place, suits, unknown_host
from rgpu.migrate.scheduling.policies import Places, least_fragmenting
from rgpu.migrate.scheduling.shares import MIB, reason_of
from rgpu.migrate.scheduling.snapshot import Demand

MAX_MASKS = 256  #: kinds of requests whose suitable devices are cached


class Kept:
    """Cached pool for decisions; one for each leader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = Followed()
        self._masks: dict[object, Bools] = {}
        self._layout = 0  #: layout that the masks are for
        self._line: tuple[Mapping[Place, str], int, Bools] | None = None  #: mask of ``Request.kept`` so far

    # -- answers ----------------------------------------------------------------------
    def place(self, snapshot: Snapshot, request: Request) -> Choice:
        """Return the same as ``adapter.place_by_fragmentation``. Raises what that raises."""
        with self._following(snapshot) as pool, pool.without(request.session):
            if request.host is not None and request.host not in pool.index.rows:
                raise unknown_host(pool.nodes, request.host)
            rows, columns = np.nonzero(self._fitting(request))
            if len(rows) == 0:
                raise no_place(_Promises(pool), snapshot, request, pool.rivals(request.anti_affinity, request.session))
            found = Places(rows, columns[:, None])
            best = least_fragmenting(pool.mixed(), Demand(1, request.compute, request.quota // MIB), found)
            node = pool.nodes[int(rows[best])]
            device = node.devices[int(columns[best])]
            free = device.memory - pool.promised((node.host, device.device), request.session)[0]
            return Choice(node.host, device.device, reason_of(node, device.device, len(rows), free), free)

    def suitable(self, snapshot: Snapshot, request: Request) -> list[tuple[NodeRecord, DeviceRecord]]:
        """Return the same as ``placement.suitable``."""
        with self._following(snapshot) as pool:
            mask = self._suiting(request) & (pool.total >= min(request.quota, MOST))
            return [(pool.nodes[row], pool.nodes[row].devices[column]) for row, column in np.argwhere(mask).tolist()]

    def sizes(self, snapshot: Snapshot, request: Request) -> list[int]:
        """Return the same as ``placement.sizes``."""
        with self._following(snapshot) as pool:
            found = pool.total[self._suiting(request)]
            return [int(found.min()), int(found.max())] if len(found) else []

    def room(self, snapshot: Snapshot, request: Request) -> Room:
        """Return the same as ``placement.room``."""
        with self._following(snapshot) as pool:
            mask = pool.ready & self._suiting(request) & (pool.total >= min(request.quota, MOST))
            ready, before = int(mask.sum()), set()
            if request.kept:
                kept = self._kept_for_others(request.kept)
                before = {request.kept[pool.place_at(row, column)] for row, column in np.argwhere(mask & kept).tolist()}
                mask &= ~kept
            with pool.without(request.session):
                free = [max(0, size) for size in pool.free[mask].tolist()]
                compute = np.maximum(pool.index.compute[mask], 0)
            return Room(ready, tuple(sorted(before)), len(free), sum(free), max(free, default=0), int(compute.sum()),
                        int(compute.max(initial=0)))

    # -- internals ----------------------------------------------------------------------
    @contextmanager
    def _following(self, snapshot: Snapshot) -> Iterator[Followed]:
        """Yield the arrays, updated to the snapshot. After an error they are discarded."""
        with self._lock:
            try:
                self._pool.follow(snapshot)
            except BaseException:
                self._pool = Followed()
                self._layout = -1
                raise
            if self._pool.layout != self._layout:
                self._layout, self._line = self._pool.layout, None
                self._masks.clear()
            yield self._pool

    def _fitting(self, request: Request) -> Bools:
        """Return the devices that can take the session now: the filter of ``placement.py``, as a mask."""
        pool = self._pool
        rows = pool.index.rows
        fitting = pool.ready & self._suiting(request)
        fitting &= pool.free >= min(request.quota, MOST)
        if request.compute > 0:
            fitting &= pool.index.compute >= request.compute
        for host in (*request.avoid_hosts, *pool.rivals(request.anti_affinity, request.session)):
            if host in rows:
                fitting[rows[host]] = False
        for place in request.avoid:
            cell = pool.cell(place)
            if cell is not None:
                fitting[cell] = False
        if request.store:
            fitting[[row for row, node in enumerate(pool.nodes) if node.store not in ("", request.store)]] = False
        if request.kept:
            fitting &= ~self._kept_for_others(request.kept)
        return fitting

    def _suiting(self, request: Request) -> Bools:
        """Return the devices that would do if they were empty, apart from their memory; a read-only mask."""
        key = (request.needs, tuple(request.models), request.device, request.kind)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._suiting_anywhere(request)
            if len(self._masks) > MAX_MASKS:
                del self._masks[next(iter(self._masks))]
        if request.host is None:
            return mask
        here, row = np.zeros_like(mask), self._pool.index.rows.get(request.host)
        if row is not None:
            here[row] = mask[row]
        return here

    def _suiting_anywhere(self, request: Request) -> Bools:
        """Return a mask by kind of device, of which there are few."""
        pool = self._pool
        mask = np.array([*(suits(device, request) for device in pool.kinds), False])[pool.kind]
        if request.device is not None:
            named = np.zeros_like(mask)
            for host, columns in pool.columns.items():
                if request.device in columns:
                    named[pool.index.rows[host], columns[request.device]] = True
            mask &= named
        return np.asarray(mask)

    def _kept_for_others(self, kept: Mapping[Place, str]) -> Bools:
        """Return a mask of the kept places. One pass over the queue uses one mapping, which only grows."""
        done, mask = 0, np.zeros(self._pool.ready.shape, bool)
        if self._line is not None and self._line[0] is kept and self._line[1] <= len(kept):
            _, done, mask = self._line
        for place in islice(kept, done, None):
            cell = self._pool.cell(place)
            if cell is not None:
                mask[cell] = True
        self._line = kept, len(kept), mask
        return mask


class _Promises:
    """Numbers of the snapshot in question, to explain a refusal."""

    def __init__(self, pool: Followed) -> None:
        self._pool = pool

    def free(self, node: NodeRecord, device: DeviceRecord, without: str = "") -> int:
        return device.memory - self._pool.promised((node.host, device.device), without)[0]

    def compute_promised(self, host: str, device: str, without: str = "") -> int:
        return self._pool.promised((host, device), without)[1]
