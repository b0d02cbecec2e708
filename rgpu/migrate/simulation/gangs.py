"""Tasks with several GPUs as gangs: on one host if possible, else over several, chosen by the leader's code.

A rank has one GPU and its part of the task's CPU and memory; a member has all ranks of its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rgpu.migrate.scheduling.gangs.hosts import allot
from rgpu.migrate.scheduling.index import Index
from rgpu.migrate.scheduling.snapshot import Demand, Node, Placed, Request


def rank_of(demand: Demand, ranks: int = 1) -> Demand:
    """Return the demand of ``ranks`` of a task with several GPUs on one host."""
    return replace(demand, gpus=ranks, cpu_milli=-(-demand.cpu_milli * ranks // demand.gpus),
                   host_memory_mib=-(-demand.host_memory_mib * ranks // demand.gpus))


def members(index: Index, request: Request) -> list[Placed]:
    """Return the places of a gang over several hosts now, one for each host; none where the whole gang does not fit."""
    demand = request.demand
    one = rank_of(demand)
    fits = index.fits(one) & index.admits(one)[:, None]
    room = np.minimum(fits.sum(axis=1), np.minimum(_times(index.cpu, one.cpu_milli),
                                                   _times(index.host_memory, one.host_memory_mib)))
    found = allot({index.nodes[row].host: int(room[row]) for row in np.flatnonzero(room)}, demand.gpus)
    placed: list[Placed] = []
    first = 0
    for host, ranks in found.counts if found else ():
        devices = tuple(int(column) for column in np.flatnonzero(fits[index.rows[host]])[:ranks])
        placed.append(Placed(f"{request.name}.{first}", rank_of(demand, ranks), host, devices, request.priority,
                             pinned=f"it is a member of gang {request.name}"))
        first += ranks
    return placed


def ever_fits(nodes: Sequence[Node], demand: Demand) -> bool:
    """Whether the empty pool could take all ranks of a gang."""
    one, room = rank_of(demand), 0
    for node in nodes:
        if not demand.models or node.model in demand.models:
            devices = sum(device.memory_mib >= one.memory_mib for device in node.devices)
            hosts = [total // each for total, each in (
                (node.cpu_milli, one.cpu_milli), (node.host_memory_mib, one.host_memory_mib)) if each]
            room += min([devices, *hosts])
    return room >= demand.gpus


def _times(free: np.ndarray, each: int) -> np.ndarray:
    """Return for how many ranks, of ``each`` units, the free amount of each row is enough."""
    return free // each if each else np.full(free.shape, np.iinfo(np.int64).max)
