"""The pool kept between decisions: placement by fragmentation in well under a millisecond.

:class:`Kept` answers exactly what ``adapter.place_by_fragmentation`` answers from scratch (a test
with random histories holds the two together), but remembers the pool as arrays. Before each answer
it is brought up to date with the snapshot that is asked about, by what differs from the one before:
records are immutable, so unchanged ones are found by comparing identities, and a session that came,
went or changed touches one or two devices. It is a memory and no truth: any snapshot may be asked
about at any time, from any thread, and the answer depends on that snapshot alone.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from rgpu.migrate.placement import (
    Choice,
    Claim,
    Place,
    Request,
    Room,
    Snapshot,
    claims_of,
    no_place,
    suits,
    unknown_host,
)
from rgpu.migrate.records import DeviceRecord, NodeRecord, SessionRecord
from rgpu.migrate.scheduling.index import Bools, Index, Ints, build, effective
from rgpu.migrate.scheduling.mix import share_mix
from rgpu.migrate.scheduling.policies import Places, least_fragmenting
from rgpu.migrate.scheduling.shares import MIB, Shares, node_of, reason_of
from rgpu.migrate.scheduling.snapshot import WHOLE, Demand
from rgpu.migrate.scheduling.snapshot import Snapshot as Pool

MOST = (1 << 62) - 1  #: bytes; numbers beyond are counted as this, so that no sum leaves 64 bits
MAX_MASKS = 256  #: kinds of requests whose suitable devices are remembered


class Kept:
    """See the module docstring. One for each leader; all methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        """Know nothing: the next snapshot is read in whole."""
        self._nodes: tuple[NodeRecord, ...] = ()
        self._sessions: tuple[SessionRecord, ...] = ()
        self._reserved: tuple[Claim, ...] = ()
        self._claims: dict[Place, list[Claim]] = {}  #: of sessions, then of places reserved
        self._counted: list[Claim] = []  #: those of ``_reserved`` that count
        self._own: dict[str, list[Place]] = {}  #: session: where it has claims
        self._groups: dict[str, Counter[tuple[str, str]]] = {}  #: anti-affinity group: (host, session) -> claims
        self._shares = Shares()
        self._mixed = False  #: whether the index has the mix of the sessions of now
        self._masks: dict[object, Bools] = {}
        self._line: tuple[Mapping[Place, str], int, Bools] | None = None  #: ``Request.kept`` as a mask, so far
        self._lay_out(())

    # -- asked ------------------------------------------------------------------------
    def place(self, snapshot: Snapshot, request: Request) -> Choice:
        """As ``adapter.place_by_fragmentation``. Raises what that raises."""
        with self._lock:
            self._follow(snapshot)
            if request.host is not None and request.host not in self.index.rows:
                raise unknown_host(self._nodes, request.host)
            with self._without(request.session):
                fitting = self._fitting(request)
                at, columns = np.nonzero(fitting)
                if len(at) == 0:
                    raise no_place(_Promises(self), snapshot, request, self._rivals(request))
                return self._choice(request, Places(at, columns[:, None]))

    def suitable(self, snapshot: Snapshot, request: Request) -> list[tuple[NodeRecord, DeviceRecord]]:
        """As ``placement.suitable``."""
        with self._lock:
            self._follow(snapshot)
            mask = self._on_host(self._suiting(request), request) & (self._total >= min(request.quota, MOST))
            nodes = self._nodes
            return [(nodes[row], nodes[row].devices[column]) for row, column in np.argwhere(mask).tolist()]

    def sizes(self, snapshot: Snapshot, request: Request) -> list[int]:
        """As ``placement.sizes``."""
        with self._lock:
            self._follow(snapshot)
            found = self._total[self._on_host(self._suiting(request), request)]
            return [int(found.min()), int(found.max())] if len(found) else []

    def room(self, snapshot: Snapshot, request: Request) -> Room:
        """As ``placement.room``."""
        with self._lock:
            self._follow(snapshot)
            mask = self._ready & self._on_host(self._suiting(request), request) & (
                self._total >= min(request.quota, MOST))
            ready, before = int(mask.sum()), set()
            if request.kept:
                kept = self._kept_for_others(request.kept)
                before = {request.kept[self._place_at(row, column)]
                          for row, column in np.argwhere(mask & kept).tolist()}
                mask &= ~kept
            with self._without(request.session):
                free = [max(0, size) for size in self._free[mask].tolist()]
                compute = np.maximum(self.index.compute[mask], 0)
            return Room(ready, tuple(sorted(before)), len(free), sum(free), max(free, default=0), int(compute.sum()),
                        int(compute.max(initial=0)))

    # -- one decision -------------------------------------------------------------------
    def _fitting(self, request: Request) -> Bools:
        """Devices that take the session now: the filter of ``placement.py``, as a mask."""
        index = self.index
        fitting = self._ready & self._on_host(self._suiting(request), request)
        fitting &= self._free >= min(request.quota, MOST)
        if request.compute > 0:
            fitting &= index.compute >= request.compute
        for host in request.avoid_hosts:
            if host in index.rows:
                fitting[index.rows[host]] = False
        for host in self._rivals(request):
            if host in index.rows:
                fitting[index.rows[host]] = False
        for place in request.avoid:
            cell = self._cells.get(place)
            if cell is not None:
                fitting[cell] = False
        if request.store:
            fitting[[n for n, node in enumerate(self._nodes) if node.store not in ("", request.store)]] = False
        if request.kept:
            fitting &= ~self._kept_for_others(request.kept)
        return fitting

    def _choice(self, request: Request, found: Places) -> Choice:
        self._mix()
        best = least_fragmenting(self.index, Demand(1, request.compute, request.quota // MIB), found)
        row, column = int(found.rows[best]), int(found.columns[best, 0])
        node = self._nodes[row]
        device = node.devices[column]
        free = device.memory - self._promised((node.host, device.device), request.session)[0]
        return Choice(node.host, device.device, reason_of(node, device, len(found.rows), free), free)

    def _on_host(self, mask: Bools, request: Request) -> Bools:
        """Of these devices, those of the host that was asked for."""
        if request.host is None:
            return mask
        here, row = np.zeros_like(mask), self.index.rows.get(request.host)
        if row is not None:
            here[row] = mask[row]
        return here

    def _place_at(self, row: int, column: int) -> Place:
        node = self._nodes[row]
        return node.host, node.devices[column].device

    def _suiting(self, request: Request) -> Bools:
        """Devices that would do if they were empty, their memory apart: by kind of device, remembered."""
        key = (request.needs, tuple(request.models), request.device)
        mask = self._masks.get(key)
        if mask is None:
            good = np.array([suits(device, request) for device in self._kinds] + [False])
            mask = good[self._kind]
            if request.device is not None:
                for (_, name), cell in self._cells.items():
                    if name != request.device:
                        mask[cell] = False
            if len(self._masks) >= MAX_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[key] = mask
        return mask

    def _kept_for_others(self, kept: Mapping[Place, str]) -> Bools:
        """The mask of a line's places. One pass over a line asks with one mapping, which only grows."""
        done, mask = 0, np.zeros(self._ready.shape, bool)
        if self._line is not None and self._line[0] is kept and self._line[1] <= len(kept):
            _, done, mask = self._line
        for place in islice(kept, done, None):
            cell = self._cells.get(place)
            if cell is not None:
                mask[cell] = True
        self._line = kept, len(kept), mask
        return mask

    def _rivals(self, request: Request) -> Collection[str]:
        """Hosts that have another session of the request's group."""
        if not request.anti_affinity:
            return ()
        return {host for (host, session), count in self._groups.get(request.anti_affinity, Counter()).items()
                if count > 0 and session != request.session}

    def _promised(self, place: Place, without: str = "") -> tuple[int, int]:
        """Bytes and per cent of the device that sessions, but ``without``, have or will have."""
        quota = compute = 0
        for claim in self._claims.get(place, ()):
            if claim.session != without:
                quota += claim.quota
                compute += claim.compute
        return quota, compute

    @contextmanager
    def _without(self, session: str) -> Iterator[None]:
        """The arrays as if the session had nothing: it does not stand in its own way."""
        places = self._own.get(session, ())
        try:
            for place in places:
                self._refresh(place, session)
            yield
        finally:
            for place in places:
                self._refresh(place)

    # -- following the pool ---------------------------------------------------------------
    def _follow(self, snapshot: Snapshot) -> None:
        """Bring everything up to date with ``snapshot``, by what differs. Half a step is never built upon."""
        try:
            if snapshot.nodes is not self._nodes and snapshot.nodes != self._nodes:
                self._follow_nodes(snapshot.nodes)
            self._nodes = snapshot.nodes
            changed = snapshot.sessions is not self._sessions and self._follow_sessions(snapshot.sessions)
            self._sessions = snapshot.sessions
            if changed or snapshot.reserved != self._reserved:
                self._follow_reserved(snapshot.reserved, changed)
            self._reserved = snapshot.reserved
        except BaseException:
            self._forget()
            raise

    def _follow_nodes(self, nodes: tuple[NodeRecord, ...]) -> None:
        width = max([len(node.devices) for node in nodes] + [1])
        if len(nodes) != len(self._nodes) or width > self._ready.shape[1] or any(
                old.host != new.host or len(old.devices) != len(new.devices)
                for old, new in zip(self._nodes, nodes, strict=True)):
            self._join_and_leave(nodes, width)
            return
        for row, (old, new) in enumerate(zip(self._nodes, nodes, strict=True)):
            if old is not new and old != new:
                self._set_node(row, new)

    def _join_and_leave(self, nodes: tuple[NodeRecord, ...], width: int) -> None:
        """Hosts came or went: rows that stay are taken over, the others are filled in."""
        before, old = self.index, self._grids()
        known = {node.host: (row, node) for row, node in enumerate(self._nodes)}
        self._nodes = nodes
        self._lay_out(nodes)
        pairs, fresh = [], []
        for row, node in enumerate(nodes):
            found = known.get(node.host)
            if found is not None and found[1] == node:
                pairs.append((row, found[0]))
            else:
                fresh.append(row)
        self._count_sizes()
        if pairs:
            to, of = np.array(pairs).T
            columns = min(width, old[0].shape[1])
            for new_grid, old_grid in zip(self._grids(), old, strict=True):
                new_grid[to, :columns] = old_grid[of, :columns]
            self.index.effective[to, :columns] = before.effective[of, :columns]
        for row, _ in pairs:
            node = nodes[row]
            for column, device in enumerate(node.devices):
                self._cells[node.host, device.device] = row, column
        # The kinds are told anew for all: their numbers belong to one layout.
        for row in fresh:
            self._set_node(row, nodes[row])
        for row, _ in pairs:
            for column, device in enumerate(nodes[row].devices):
                self._kind[row, column] = self._kind_of(device)

    def _grids(self) -> tuple[Any, ...]:
        return self._free, self._total, self._ready, self.index.compute, self.index.memory, self.index.total_memory

    def _lay_out(self, nodes: tuple[NodeRecord, ...]) -> None:
        """Empty arrays for these nodes; who is called fills the cells."""
        self.index: Index = build(Pool(tuple(node_of(node) for node in nodes)), share_mix(self._shares.counts))
        shape = self.index.usable.shape
        self._free: Ints = np.full(shape, -1, np.int64)
        self._total: Ints = np.full(shape, -1, np.int64)
        self._ready: Bools = np.zeros(shape, bool)
        self._kind: Ints = np.full(shape, -1, np.int64)
        self._kinds: list[DeviceRecord] = []
        self._kind_numbers: dict[object, int] = {}
        self._cells: dict[Place, tuple[int, int]] = {}
        self._masks.clear()
        self._line = None

    def _set_node(self, row: int, node: NodeRecord) -> None:
        """A node's record is another one: its devices, its state."""
        for column, device in enumerate(node.devices):
            place = (node.host, device.device)
            self._cells[place] = row, column
            self._total[row, column] = min(device.memory, MOST)
            self._ready[row, column] = node.state == "ready" and device.healthy
            self._kind[row, column] = self._kind_of(device)
            self.index.total_memory[row, column] = device.memory // MIB
            self.index.usable[row, column] = device.healthy
        if node is not self._nodes[row]:
            for place in [place for place, cell in self._cells.items() if cell[0] == row]:
                if place[0] != node.host or all(device.device != place[1] for device in node.devices):
                    del self._cells[place]
            nodes = list(self._nodes)
            nodes[row] = node
            self._nodes = tuple(nodes)
            self._count_sizes()
        for device in node.devices:
            self._refresh((node.host, device.device))
        self._masks.clear()
        self._line = None

    def _kind_of(self, device: DeviceRecord) -> int:
        """Devices of one kind suit the same requests."""
        key = (device.name, device.kind, device.compute_capability, device.driver_version)
        number = self._kind_numbers.get(key)
        if number is None:
            number = self._kind_numbers[key] = len(self._kinds)
            self._kinds.append(device)
        return number

    def _count_sizes(self) -> None:
        if self._shares.resize(self._nodes):
            self._shares.recount(self._sessions)
            self._mixed = False

    def _follow_sessions(self, sessions: tuple[SessionRecord, ...]) -> bool:
        """Whether anything changed. Only what lies between what is alike at both ends is looked at."""
        old = self._sessions
        first = _alike(old, sessions)
        if first == len(old) == len(sessions):
            return False
        last = _alike(old[:first - 1 if first else None:-1], sessions[:first - 1 if first else None:-1])
        gone = {session.name: session for session in old[first:len(old) - last]}
        for session in sessions[first:len(sessions) - last]:
            known = gone.pop(session.name, None)
            if known is session:
                continue
            if known is not None:
                self._session(known, -1)
            self._session(session, 1)
        for session in gone.values():
            self._session(session, -1)
        return True

    def _session(self, session: SessionRecord, sign: int) -> None:
        for claim in claims_of(session):
            self._claim(claim, sign)
        if self._shares.add(session, sign):
            self._mixed = False

    def _follow_reserved(self, reserved: tuple[Claim, ...], sessions_changed: bool) -> None:
        """A reserved place counts until the session's own record has it."""
        before = len(self._reserved)
        if not sessions_changed and reserved[:before] == self._reserved:
            more: Collection[Claim] = reserved[before:]
        else:
            for claim in self._counted:
                self._claim(claim, -1)
            self._counted = []
            more = reserved
        for claim in more:
            if not any(other.session == claim.session for other in self._claims.get((claim.host, claim.device), ())):
                self._claim(claim, 1)
                self._counted.append(claim)

    def _claim(self, claim: Claim, sign: int) -> None:
        place = (claim.host, claim.device)
        here, own = self._claims.setdefault(place, []), self._own.setdefault(claim.session, [])
        if sign > 0:
            here.append(claim)
            own.append(place)
        else:
            here.remove(claim)
            own.remove(place)
            if not here:
                del self._claims[place]
            if not own:
                del self._own[claim.session]
        if claim.group:
            members = self._groups.setdefault(claim.group, Counter())
            members[claim.host, claim.session] += sign
            if members[claim.host, claim.session] <= 0:
                del members[claim.host, claim.session]
            if not members:
                del self._groups[claim.group]
        self._refresh(place)

    def _refresh(self, place: Place, without: str = "") -> None:
        """A device's numbers anew, from what is promised of it; exactly, whatever the numbers are."""
        cell = self._cells.get(place)
        if cell is None:
            return
        row, column = cell
        device, index = self._nodes[row].devices[column], self.index
        quota, compute = self._promised(place, without)
        free = device.memory - quota
        self._free[cell] = max(-MOST, min(MOST, free))
        index.memory[cell] = max(-MOST, min(MOST, free // MIB))
        index.compute[cell] = WHOLE - min(WHOLE, compute)
        index.effective[cell] = effective(index.compute[cell], index.memory[cell], index.total_memory[cell])

    def _mix(self) -> None:
        if not self._mixed:
            self.index.mix = share_mix(self._shares.counts)
            self._mixed = True


class _Promises:
    """What a refusal is explained with: the numbers of the snapshot that is being asked about."""

    def __init__(self, kept: Kept) -> None:
        self._promised: Callable[[Place, str], tuple[int, int]] = kept._promised

    def free(self, node: NodeRecord, device: DeviceRecord, without: str = "") -> int:
        return device.memory - self._promised((node.host, device.device), without)[0]

    def compute_promised(self, host: str, device: str, without: str = "") -> int:
        return self._promised((host, device), without)[1]


def _alike(a: tuple[SessionRecord, ...], b: tuple[SessionRecord, ...]) -> int:
    """How many records are the same at the beginning: by halves, so that equal stretches are compared at once."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
