"""Choice of a gang's hosts: a single one if possible, else the fewest, near each other. Pure, over counts only.

Used by the leader for sessions on record (:mod:`rgpu.migrate.scheduling.gangs.placing`) and by the simulator for tasks
of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SEEDS = 16  #: hosts with the most room from which a search for near ones begins


@dataclass(frozen=True, slots=True)
class Allotment:
    """Chosen hosts. ``counts``: (host, its ranks), in the gang's order. ``reason``: a sentence for the record."""

    counts: tuple[tuple[str, int], ...]
    reason: str


def allot(room: Mapping[str, int], ranks: int,
          bandwidth: Mapping[frozenset[str], float] | None = None) -> Allotment | None:
    """Choose the hosts that take ``ranks`` together; None: the hosts do not have room for all of them.

    ``room``: ranks that each host could take. ``bandwidth``: bytes/s between two hosts, where it was measured.
    The choice is the tightest single host; else the fewest hosts, and among such sets the one whose slowest measured
    link is fastest.
    """
    rooms = {host: count for host, count in room.items() if count > 0}
    alone = [host for host, count in rooms.items() if count >= ranks]
    if alone:
        host = min(alone, key=lambda one: (rooms[one], one))
        return Allotment(((host, ranks),), f"all {ranks} on {host}: the host with the least room that has enough")
    if sum(rooms.values()) < ranks:
        return None
    ranked = sorted(rooms, key=lambda one: (-rooms[one], one))
    fewest = _fewest(rooms, ranked, ranks)
    known = bandwidth or {}
    found = [_grown(rooms, ranked, seed, ranks, fewest, known) for seed in ranked[:SEEDS]]
    chosen = min((one for one in found if one),
                 key=lambda hosts: (-_slowest(hosts, known), -sum(rooms[host] for host in hosts), hosts))
    counts, left = [], ranks
    for host in chosen:
        counts.append((host, min(rooms[host], left)))
        left -= counts[-1][1]
    said = ", ".join(f"{host} {count}" for host, count in counts)
    slowest = _slowest(chosen, known)
    near = f", at least {slowest / 1e9:.2g} GB/s between them" if slowest else ""
    return Allotment(tuple(counts), f"{ranks} on {len(counts)} hosts ({said}): the fewest that have room for all{near}")


def _fewest(rooms: Mapping[str, int], ranked: Sequence[str], ranks: int) -> int:
    """Return the least number of hosts that have room together."""
    total = 0
    for number, host in enumerate(ranked, 1):
        total += rooms[host]
        if total >= ranks:
            return number
    raise AssertionError("the caller has checked that there is room")


def _grown(rooms: Mapping[str, int], ranked: Sequence[str], seed: str, ranks: int, most: int,
           bandwidth: Mapping[frozenset[str], float]) -> tuple[str, ...]:
    """Return ``most`` hosts with room for all: from ``seed`` on, the nearest each time; empty where there are none."""
    chosen, total = [seed], rooms[seed]
    while total < ranks:
        left = most - len(chosen)
        rest = [host for host in ranked if host not in chosen]
        best = [rooms[host] for host in rest[:left]]
        # A host may be taken only if the largest of the others can then still provide the rest.
        fit = [host for host in rest if left and total + rooms[host] + sum(_without(best, rooms[host], left)) >= ranks]
        if not fit:
            return ()
        host = min(fit, key=lambda one: (-_slowest((*chosen, one), bandwidth), -rooms[one], one))
        chosen.append(host)
        total += rooms[host]
    return tuple(chosen)


def _without(best: Sequence[int], taken: int, left: int) -> list[int]:
    """Return the ``left`` - 1 largest of ``best`` without ``taken``, which may be one of them."""
    others = list(best)
    if taken in others:
        others.remove(taken)
    return others[:left - 1]


def _slowest(hosts: Sequence[str], bandwidth: Mapping[frozenset[str], float]) -> float:
    """Return the speed of the slowest link between the hosts in bytes/s; 0: one was not measured."""
    links = [bandwidth.get(frozenset((one, other)), 0.0) for at, one in enumerate(hosts) for other in hosts[at + 1:]]
    return min(links, default=0.0)
