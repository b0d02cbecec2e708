"""The snapshot as arrays, so that a decision over a thousand nodes is a few array operations.

It is built from a snapshot (:func:`build`); planners change a copy (:meth:`Index.copy`). The only
changes are :meth:`Index.take` and :meth:`Index.give`, which refuse to over-allocate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rgpu.migrate.scheduling.mix import Mix, mix
from rgpu.migrate.scheduling.snapshot import WHOLE, Demand, Node, Placed, Snapshot
from rgpu.session.errors import Conflict

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass
class Scores:
    """Scores of every device for one demand by one policy, kept by ``scores.py``."""

    seen: int  #: length of the part of :attr:`Index.changed` that they include
    keys: list[Floats]  #: one grid for each key; the first is infinite where the demand does not fit


@dataclass
class Index:
    """Arrays of the pool: rows are nodes, columns their devices; a missing device has nothing free."""

    nodes: tuple[Node, ...]
    rows: dict[str, int]
    mix: Mix
    compute: Ints  #: per cent free
    memory: Ints  #: MiB free
    total_memory: Ints
    exists: Bools
    usable: Bools  #: healthy, on a node that is ready
    cpu: Ints
    total_cpu: Ints
    host_memory: Ints
    models: dict[str, Bools]  #: model -> rows
    groups: Counter[tuple[str, int]] = field(default_factory=Counter)  #: (anti-affinity group, row) -> sessions
    effective: Ints = field(init=False)  #: see :meth:`free`; kept by :meth:`take` and :meth:`give`
    scores: dict[tuple[str, Demand], Scores] = field(default_factory=dict)  #: (policy, demand) -> scores
    changed: list[int] = field(default_factory=list)  #: rows in the order of their changes, for caches

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Discard cached values after the arrays were written directly."""
        self.scores = {}
        self.effective = effective(self.compute, self.memory, self.total_memory)

    def copy(self) -> Index:
        """Return a copy to change; constant parts are shared."""
        return Index(self.nodes, self.rows, self.mix, self.compute.copy(), self.memory.copy(), self.total_memory,
                     self.exists, self.usable, self.cpu.copy(), self.total_cpu, self.host_memory.copy(), self.models,
                     self.groups.copy())

    def take(self, placed: Placed, check: bool = True) -> None:
        """Give the session its place. Raises :class:`Conflict` when it is not free (nothing is changed then).

        ``check`` False: the session runs there by the records, so it counts even where that is too much.
        """
        row, devices = self.rows[placed.host], list(placed.devices)
        need = placed.demand
        if check and (len(set(devices)) != need.gpus or self.cpu[row] < need.cpu_milli
                      or self.host_memory[row] < need.host_memory_mib
                      or any(self.compute[row, d] < need.compute or self.memory[row, d] < need.memory_mib
                             or not self.exists[row, d] for d in devices)):
            raise Conflict(f"{placed.name} ({need}) does not fit on devices {devices} of {placed.host}")
        self._add(placed, -1)

    def give(self, placed: Placed) -> None:
        """Free the session's place."""
        self._add(placed, 1)

    def _add(self, placed: Placed, sign: int) -> None:
        row, devices, need = self.rows[placed.host], list(placed.devices), placed.demand
        self.compute[row, devices] += sign * need.compute
        self.memory[row, devices] += sign * need.memory_mib
        self.cpu[row] += sign * need.cpu_milli
        self.host_memory[row] += sign * need.host_memory_mib
        self.effective[row] = effective(self.compute[row], self.memory[row], self.total_memory[row])
        self.changed.append(row)
        if placed.anti_affinity:
            self.groups[placed.anti_affinity, row] -= sign

    def free(self) -> Ints:
        """Return the per cent of each device that is free: the scarcer of compute and memory."""
        return self.effective

    def fragmentation(self) -> float:
        """Return the free capacity, in devices, that a random next request cannot use (see ``mix.py``)."""
        return float(fragmentation(self.mix, self.free(), self.cpu).sum()) / WHOLE

    def capacity(self) -> int:
        """Return the number of devices of the pool."""
        return int(self.exists.sum())

    def allocated(self) -> float:
        """Return the allocated compute, in devices; a device held twice during a move counts once."""
        return float((WHOLE - np.clip(self.compute[self.exists], 0, WHOLE)).sum()) / WHOLE

    def admits(self, need: Demand, rows: Ints | None = None) -> Bools:
        """Return which of ``rows`` (None: all) suit the demand by model and host resources."""
        which = slice(None) if rows is None else rows
        admitted = (self.cpu[which] >= need.cpu_milli) & (self.host_memory[which] >= need.host_memory_mib)
        if need.models:
            named = np.zeros(len(self.nodes), dtype=bool)
            for model in need.models & self.models.keys():
                named |= self.models[model]
            admitted &= named[which]
        return np.asarray(admitted)

    def fits(self, need: Demand, rows: Ints | None = None) -> Bools:
        """Return which devices (of ``rows``; None: all) have enough free, regardless of their host."""
        which = slice(None) if rows is None else rows
        return np.asarray(self.usable[which] & (self.compute[which] >= need.compute)
                          & (self.memory[which] >= need.memory_mib))


def effective(compute: Ints, memory: Ints, total_memory: Ints) -> Ints:
    """Return the scarcer of free compute and free memory, in per cent; never below 0."""
    by_memory = np.where(total_memory > 0, memory * WHOLE // np.maximum(total_memory, 1), WHOLE)
    return np.clip(np.minimum(compute, by_memory), 0, WHOLE)


def fragmentation(mix: Mix, free: Ints, cpu: Ints) -> Floats:
    """Return the fragmentation of each row (its devices' free per cent, its free CPU), in per cent of a device."""
    level = mix.level(cpu)
    whole = (free >= WHOLE).sum(axis=-1)
    return np.asarray(free.sum(axis=-1) - (free * mix.single[level[..., None], free]).sum(axis=-1)
                      - WHOLE * whole * mix.several[level, whole])


def build(snapshot: Snapshot, demands: Mix | None = None) -> Index:
    """Build the index of a snapshot; the mix is that of its recent requests unless one is given.

    A session on a host that is not in the pool is not counted.
    """
    nodes = snapshot.nodes
    width = max([len(node.devices) for node in nodes] + [1])
    grid = (len(nodes), width)
    compute, memory = np.zeros(grid, np.int64), np.zeros(grid, np.int64)
    exists, usable = np.zeros(grid, bool), np.zeros(grid, bool)
    models: dict[str, Bools] = {}
    for row, node in enumerate(nodes):
        count = len(node.devices)
        compute[row, :count] = WHOLE
        memory[row, :count] = [device.memory_mib for device in node.devices]
        exists[row, :count] = True
        usable[row, :count] = [device.healthy and node.ready for device in node.devices]
        models.setdefault(node.model, np.zeros(len(nodes), bool))[row] = True
    cpu = np.array([node.cpu_milli for node in nodes], np.int64)
    host_memory = np.array([node.host_memory_mib for node in nodes], np.int64)
    index = Index(nodes, {node.host: row for row, node in enumerate(nodes)}, demands or mix(snapshot.recent), compute,
                  memory, memory.copy(), exists, usable, cpu, cpu.copy(), host_memory, models)
    for placed in snapshot.placed:
        if placed.host in index.rows and all(d < len(nodes[index.rows[placed.host]].devices) for d in placed.devices):
            index.take(placed, check=False)
    return index
