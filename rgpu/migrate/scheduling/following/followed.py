"""A pool's records as arrays that are updated incrementally from snapshot to snapshot.

Rows are hosts in the snapshot's order, columns their devices. Records are immutable and, where they have not
changed, mostly the very same objects as before, so that ten thousand of them are compared by
identity. A session that was added, removed or changed affects one or two devices, whose numbers are then counted anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from rgpu.migrate.records.schema import DeviceRecord, NodeRecord, SessionRecord
from rgpu.migrate.scheduling.index import Bools, Index, Ints
from rgpu.migrate.scheduling.mix import share_mix
from rgpu.migrate.scheduling.placement import (
    Claim,
    Place,
    Snapshot,
    claims_of,
    promised_in_all,
    run_of,
)
from rgpu.migrate.scheduling.shares import MIB, Shares
from rgpu.migrate.scheduling.snapshot import WHOLE

MOST = (1 << 62) - 1  #: bytes; larger numbers are counted as this, so that sums fit in 64 bits
CHUNK = 256  #: records that are compared at once
MOST_DIFFERENCES = 64  #: that are searched for singly
LOOK = 8  #: most records in a row whose removal or addition is recognised

T = TypeVar("T")


class Followed:
    """Arrays of the pool. ``free``, ``total``: bytes of each device (-1 where there is none); ``ready``: it takes
    sessions now.

    ``kind``: number of the device's kind, the first device of which is in ``kinds``. ``index``: arrays for the scores.
    """

    def __init__(self) -> None:
        self.nodes: tuple[NodeRecord, ...] = ()
        self.sessions: tuple[SessionRecord, ...] = ()
        self.reserved: tuple[Claim, ...] = ()
        self.claims: dict[Place, list[Claim]] = {}  #: claims of sessions, then reserved places
        self.counted: list[Claim] = []  #: the claims of ``reserved`` that count
        self.own: dict[str, list[Place]] = {}  #: run, or session without a run: places of its claims
        self.groups: dict[str, Counter[tuple[str, str]]] = {}  #: anti-affinity group: (host, session) -> claims
        self.shares = Shares()
        self.columns: dict[str, dict[str, int]] = {}  #: host: device: its column
        self.kinds: list[DeviceRecord] = []
        self.layout = 0  #: changes whenever a place gets another row, column or kind
        self._numbers: dict[object, int] = {}
        self._mixed = False  #: whether the index has the mix of the present sessions
        nothing = np.zeros((0, 1), np.int64)
        self.free, self.total, self.kind = nothing.copy(), nothing.copy(), nothing.copy()
        self.ready: Bools = np.zeros((0, 1), bool)
        self._index({}, nothing.copy(), nothing.copy(), nothing.copy())

    def follow(self, snapshot: Snapshot) -> None:
        """Update the arrays to the snapshot. After an error in here the object must not be used any more."""
        if snapshot.nodes is not self.nodes:
            self._follow_nodes(snapshot.nodes)
        changed = snapshot.sessions is not self.sessions and self._follow_sessions(snapshot.sessions)
        self.sessions = snapshot.sessions
        if changed or snapshot.reserved != self.reserved:
            self._follow_reserved(snapshot.reserved, changed)
        self.reserved = snapshot.reserved

    def cell(self, place: Place) -> tuple[int, int] | None:
        """Return row and column of a place; None where the pool has no such device."""
        column = self.columns.get(place[0], {}).get(place[1])
        return None if column is None else (self.index.rows[place[0]], column)

    def place_at(self, row: int, column: int) -> Place:
        """Return (host, device) of a row and a column of the arrays."""
        node = self.nodes[row]
        return node.host, node.devices[column].device

    def promised(self, place: Place, without: str = "") -> tuple[int, int]:
        """Return bytes and per cent of the device that sessions, except ``without``, have or will have."""
        return promised_in_all(self.claims.get(place, ()), without)

    def rivals(self, group: str, without: str = "") -> Collection[str]:
        """Return the hosts that have a session of the anti-affinity group, except ``without``."""
        if not group:
            return ()
        return {host for (host, session), count in self.groups.get(group, Counter()).items()
                if count > 0 and session != without}

    @contextmanager
    def without(self, session: str) -> Iterator[None]:
        """Change the arrays for the context as if the session had no place, so that its own claims do not count."""
        places = self.own.get(run_of(session), ())
        try:
            for place in places:
                self._refresh(place, session)
            yield
        finally:
            for place in places:
                self._refresh(place)

    def mixed(self) -> Index:
        """Return the index, with the mix of the present sessions."""
        if not self._mixed:
            self.index.mix = share_mix(self.shares.counts)
            self._mixed = True
        return self.index

    # -- hosts ----------------------------------------------------------------------
    def _follow_nodes(self, nodes: tuple[NodeRecord, ...]) -> None:
        if nodes == self.nodes:
            self.nodes = nodes
            return
        gone, come = differences(self.nodes, nodes)
        rows, before = self.index.rows, {node.host for node in gone}
        same_rows = len(nodes) == len(rows) and all(rows.get(node.host) == row for row, node in enumerate(nodes))
        width = max([len(node.devices) for node in come] + [self.free.shape[1]])
        for node in gone:
            self.shares.devices(node, -1)
        if not same_rows or width != self.free.shape[1]:
            self._lay_out(nodes, width)
        self.nodes = nodes
        for node in come:
            self._set_node(self.index.rows[node.host], node)
        for host in before - self.index.rows.keys():
            del self.columns[host]
        if self.shares.settled():
            self.shares.recount(self.sessions)
            self._mixed = False

    def _lay_out(self, nodes: tuple[NodeRecord, ...], width: int) -> None:
        """Move every row to its host's present position; rows of new hosts are empty, for the caller to fill in."""
        rows = self.index.rows
        source = np.array([rows.get(node.host, -1) for node in nodes], np.int64)
        stays = np.flatnonzero(source >= 0)
        source, shape, index = source[stays], (len(nodes), width), self.index

        def moved(grid: Any, nothing: Any) -> Any:
            laid = np.full(shape, nothing, grid.dtype)
            laid[stays, :grid.shape[1]] = grid[source]
            return laid

        self.free, self.total, self.kind = moved(self.free, -1), moved(self.total, -1), moved(self.kind, -1)
        self.ready = moved(self.ready, False)
        then = moved(index.effective, 0)
        self._index({node.host: row for row, node in enumerate(nodes)}, moved(index.compute, 0),
                    moved(index.memory, 0), moved(index.total_memory, 0))
        self.index.effective = then
        self.layout += 1

    def _index(self, rows: dict[str, int], compute: Ints, memory: Ints, total_memory: Ints) -> None:
        """Make an index with the data that scores for one device without CPU read."""
        none = np.zeros(len(rows), np.int64)
        self.index = Index((), rows, share_mix(self.shares.counts), compute, memory, total_memory, self.total >= 0,
                           self.ready, none, none, none, {})

    def _set_node(self, row: int, node: NodeRecord) -> None:
        """Set devices and state of a host that is new or has changed."""
        self.shares.devices(node, 1)
        columns = {device.device: column for column, device in enumerate(node.devices)}
        kinds = [self._kind_of(device) for device in node.devices]
        if self.columns.get(node.host) != columns or self.kind[row, :len(kinds)].tolist() != kinds:
            self.columns[node.host] = columns
            self.kind[row], self.kind[row, :len(kinds)] = -1, kinds
            self.layout += 1
        for grid, nothing in ((self.free, -1), (self.total, -1), (self.ready, False), (self.index.compute, 0),
                              (self.index.memory, 0), (self.index.total_memory, 0), (self.index.effective, 0)):
            grid[row, len(kinds):] = nothing
        for column, device in enumerate(node.devices):
            self.total[row, column] = min(device.memory, MOST)
            self.ready[row, column] = node.state == "ready" and device.healthy
            self.index.total_memory[row, column] = device.memory // MIB
            self._refresh((node.host, device.device))

    def _kind_of(self, device: DeviceRecord) -> int:
        """Return the number of the device's kind; devices of one kind suit the same requests."""
        key = (device.name, device.kind, device.compute_capability, device.driver_version)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.kinds)
            self.kinds.append(device)
            self.layout += 1
        return number

    # -- sessions, reserved places ---------------------------------------------------------
    def _follow_sessions(self, sessions: tuple[SessionRecord, ...]) -> bool:
        """Update to the sessions; return whether anything changed."""
        gone, come = differences(self.sessions, sessions)
        for session in gone:
            self._session(session, -1)
        for session in come:
            self._session(session, 1)
        return bool(gone or come)

    def _session(self, session: SessionRecord, sign: int) -> None:
        for claim in claims_of(session):
            self._claim(claim, sign)
        if self.shares.add(session, sign):
            self._mixed = False

    def _follow_reserved(self, reserved: tuple[Claim, ...], sessions_changed: bool) -> None:
        """Update the reserved places; each counts until the session's own record has the place."""
        before = len(self.reserved)
        more: Collection[Claim] = reserved[before:]
        if sessions_changed or reserved[:before] != self.reserved:
            for claim in self.counted:
                self._claim(claim, -1)
            self.counted = []
            more = reserved
        for claim in more:
            if not any(other.session == claim.session for other in self.claims.get((claim.host, claim.device), ())):
                self._claim(claim, 1)
                self.counted.append(claim)

    def _claim(self, claim: Claim, sign: int) -> None:
        place = (claim.host, claim.device)
        here, own = self.claims.setdefault(place, []), self.own.setdefault(run_of(claim.session), [])
        if sign > 0:
            here.append(claim)
            own.append(place)
        else:
            here.remove(claim)
            own.remove(place)
            if not here:
                del self.claims[place]
            if not own:
                del self.own[run_of(claim.session)]
        if claim.group:
            members = self.groups.setdefault(claim.group, Counter())
            members[claim.host, claim.session] += sign
            if members[claim.host, claim.session] <= 0:
                del members[claim.host, claim.session]
            if not members:
                del self.groups[claim.group]
        self._refresh(place)

    def _refresh(self, place: Place, without: str = "") -> None:
        """Count a device's numbers anew from its claims, exactly for any values."""
        cell = self.cell(place)
        if cell is None:
            return
        index, (quota, compute) = self.index, self.promised(place, without)
        free = self.nodes[cell[0]].devices[cell[1]].memory - quota
        self.free[cell] = max(-MOST, min(MOST, free))
        memory, share = max(-MOST, min(MOST, free // MIB)), WHOLE - min(WHOLE, compute)
        index.memory[cell], index.compute[cell] = memory, share
        index.effective[cell] = effective_of(share, memory, int(index.total_memory[cell]))


def effective_of(compute: int, memory: int, total_memory: int) -> int:
    """Return :func:`rgpu.migrate.scheduling.index.effective` of one device."""
    return max(0, min(compute, memory * WHOLE // total_memory if total_memory > 0 else WHOLE, WHOLE))


def differences(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[list[T], list[T]]:
    """Return what was removed and added between two listings in one order; equal stretches are skipped by chunks.

    Changed records are in both results. For any listings, the first without the removed and with the added records is
    the second.
    """
    gone: list[T] = []
    come: list[T] = []
    at, to = 0, 0
    while True:
        at, to = _skip(old, new, at, to)
        if at == len(old) or to == len(new) or len(gone) + len(come) > MOST_DIFFERENCES:
            break
        went, came = _resume(old[at:at + LOOK], new[to:to + LOOK])
        gone += old[at:at + went]
        come += new[to:to + came]
        at, to = at + went, to + came
    gone += old[at:]
    come += new[to:]
    kept = {id(record) for record in gone} & {id(record) for record in come}
    if kept:  # the order has changed, or more than is searched for
        return [one for one in gone if id(one) not in kept], [one for one in come if id(one) not in kept]
    return gone, come


def _resume(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[int, int]:
    """Return how many records were removed and added before the listings agree again; (1, 1) where that is not found.
    """
    for ahead in range(1, LOOK):
        if ahead < len(old) and old[ahead] is new[0]:
            return ahead, 0
        if ahead < len(new) and new[ahead] is old[0]:
            return 0, ahead
    return 1, 1


def _skip(old: tuple[T, ...], new: tuple[T, ...], at: int, to: int) -> tuple[int, int]:
    """Return the positions after the equal records from ``at`` and ``to`` on."""
    most = min(len(old) - at, len(new) - to)
    done = 0
    while done < most and old[at + done:at + done + CHUNK] == new[to + done:to + done + CHUNK]:
        done += CHUNK
    if done >= most:
        return at + most, to + most
    low, high = done, min(done + CHUNK, most)
    while low < high:  # the first difference is in here, or everything up to ``most`` is equal
        middle = (low + high) // 2
        if old[at + low:at + middle + 1] == new[to + low:to + middle + 1]:
            low = middle + 1
        else:
            high = middle
    return at + low, to + low
