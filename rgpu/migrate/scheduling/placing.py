"""Placement of one request now, or the reason why it fits nowhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rgpu.migrate.scheduling import scores
from rgpu.migrate.scheduling.index import Bools, Index, Ints
from rgpu.migrate.scheduling.policies import DUST, POLICIES, REASONS, Places, least
from rgpu.migrate.scheduling.snapshot import WHOLE, Demand, Placed, Request
from rgpu.session.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """Chosen place: devices of one host, and why."""

    host: str
    devices: tuple[int, ...]
    reason: str

    def placed(self, request: Request, now: float = 0.0) -> Placed:
        """Return the session at this place, from ``now`` on."""
        return Placed(request.name, request.demand, self.host, self.devices, request.priority, now,
                      anti_affinity=request.anti_affinity)


def place(index: Index, request: Request, policy: str = "fgd", seed: int = 0,
          allowed: Bools | None = None) -> Place | None:
    """Return the best place by ``policy``, or None when it fits nowhere now (:func:`why_not` gives the reason).

    ``allowed``: devices to choose from (rows by columns), where the caller excludes some. The same
    arguments give the same answer; ``seed`` matters to the policy ``random`` only.
    Raises :class:`UsageError` for a policy that does not exist.
    """
    if policy not in POLICIES:
        raise UsageError(f"no placement policy is called {policy!r}; there are: {', '.join(POLICIES)}")
    if policy != "random" and request.demand.gpus == 1:
        return _remembered(index, request, policy, allowed)
    found = candidates(index, request, allowed)
    if len(found.rows) == 0:
        return None
    random = np.random.default_rng([seed, int.from_bytes(request.name.encode()[-8:], "big")])
    best = least(POLICIES[policy](index, request.demand, found, random))
    return _place(index, request, policy, int(found.rows[best]), found.columns[best], len(found.rows))


def _remembered(index: Index, request: Request, policy: str, allowed: Bools | None) -> Place | None:
    """Place a demand of one device by its cached scores, of which only changed rows are computed anew."""
    keys = scores.keys(index, request.demand, policy)
    first = keys[0]
    if allowed is not None:
        first = np.where(allowed, first, np.inf)
    taken = _rivals(index, request)
    if taken:
        first = first.copy()
        first[taken] = np.inf
    lowest = first.min(initial=np.inf)
    if lowest == np.inf:
        return None
    best = np.flatnonzero(first <= lowest + DUST)
    if len(best) > 1 and len(keys) > 1:
        best = best[[least(tuple(key.ravel()[best] for key in keys[1:]))]]
    row, column = divmod(int(best[0]), first.shape[1])
    return _place(index, request, policy, row, np.array([column]), int(np.isfinite(first).sum()))


def _place(index: Index, request: Request, policy: str, row: int, columns: Ints, fitting: int) -> Place:
    node, devices = index.nodes[row], tuple(int(column) for column in columns)
    names = ", ".join(node.devices[d].name for d in devices) or "no GPU"
    return Place(node.host, devices,
                 f"{names} of {node.host}: {REASONS[policy]}, of {fitting} places that fit {request.demand}")


def _rivals(index: Index, request: Request) -> list[int]:
    """Return the rows that have a session of the same anti-affinity group."""
    if not request.anti_affinity:
        return []
    return [row for (group, row), count in index.groups.items() if group == request.anti_affinity and count > 0]


def candidates(index: Index, request: Request, allowed: Bools | None = None) -> Places:
    """Return every place that fits; for several devices, the tightest set of each host."""
    need = request.demand
    rows = index.admits(need)
    rows[_rivals(index, request)] = False
    if need.gpus == 0:
        ready = index.usable.any(axis=1) if allowed is None else (index.usable & allowed).any(axis=1)
        chosen = np.flatnonzero(rows & ready)
        return Places(chosen, np.zeros((len(chosen), 0), np.int64))
    fits = index.fits(need) & rows[:, None]
    if allowed is not None:
        fits &= allowed
    if need.gpus == 1:
        chosen, columns = np.nonzero(fits)
        return Places(chosen, columns[:, None])
    return _several(index, need, fits)


def _several(index: Index, need: Demand, fits: Bools) -> Places:
    chosen = np.flatnonzero(fits.sum(axis=1) >= need.gpus)
    free: Ints = np.where(fits[chosen], index.free()[chosen], WHOLE + 1)
    return Places(chosen, np.argsort(free, axis=1, kind="stable")[:, :need.gpus])


def why_not(index: Index, request: Request) -> str:
    """Return why it fits nowhere now: what is free in all, and the largest piece of it."""
    need = request.demand
    rows = index.admits(need)
    if not rows.any():
        return f"no host of the right model has {need.cpu_milli / 1000:g} cores and {need.host_memory_mib} MiB free"
    free = np.where(index.usable & rows[:, None], index.free(), 0)
    most = int(index.fits(need)[rows].sum(axis=1).max(initial=0))
    return (f"{need} fits nowhere: {free.sum() / WHOLE:.2f} GPUs are free on the hosts that could take it, the largest "
            f"piece is {int(free.max(initial=0))} % of one, and at most {most} devices of one host fit")


def never_fits(index: Index, request: Request) -> str | None:
    """Return why it would not fit even in the empty pool, with the largest request that would; None when it would."""
    need = request.demand
    best: tuple[int, int] = (0, 0)
    models: set[str] = set()
    for node in index.nodes:
        if need.models and node.model not in need.models:
            models.add(node.model)
            continue
        sizes = sorted((device.memory_mib for device in node.devices), reverse=True)
        if node.cpu_milli >= need.cpu_milli and node.host_memory_mib >= need.host_memory_mib:
            if sum(size >= need.memory_mib for size in sizes) >= need.gpus:
                return None
        if sizes:
            best = max(best, (len(sizes), sizes[min(max(need.gpus, 1), len(sizes)) - 1]))
    if best == (0, 0):
        return f"{need} can never fit: the pool has {', '.join(sorted(models)) or 'no GPUs'}"
    return f"{need} can never fit: the largest that would is {best[0]} GPUs with {best[1]} MiB each on one host"
