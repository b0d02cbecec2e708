"""Adapter between the registry's records and the scheduler: placement by fragmentation, and the planners' view.

:func:`place_by_fragmentation` has the arguments and results of ``placement.place``. :func:`view` makes from
records the input of :mod:`rgpu.migrate.scheduling.plans.rebalancing` and
:mod:`rgpu.migrate.scheduling.plans.preempting`: each host is its own "model", and a demand's
set of models is the hosts that are suitable for the session (kind, capability, driver, a requested
host). Memory is rounded so that a plan never uses more bytes than are free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rgpu.migrate.records.schema import NodeRecord, SessionRecord
from rgpu.migrate.scheduling import placing
from rgpu.migrate.scheduling.index import Index, build
from rgpu.migrate.scheduling.placement import (
    Choice,
    Claim,
    Request,
    Snapshot,
    candidates,
    claims_of,
    joint,
    named,
    place,
    request_for,
    unsuitable,
)
from rgpu.migrate.scheduling.runs import beside
from rgpu.migrate.scheduling.shares import MIB, mix_of, node_of, reason_of
from rgpu.migrate.scheduling.snapshot import MAX_MEMORY_MIB, WHOLE, Demand, Device, Node, Placed
from rgpu.migrate.scheduling.snapshot import Request as Wanted
from rgpu.migrate.scheduling.snapshot import Snapshot as Pool
from rgpu.session.devices import join, parts


def place_by_fragmentation(snapshot: Snapshot, request: Request) -> Choice:
    """Choose the device with which the pool fragments least; best-fit among equals.

    It uses the snapshot's decider where there is one (:mod:`rgpu.migrate.scheduling.following.kept`: the same answer,
    faster), else the records alone. Raises what :func:`rgpu.migrate.scheduling.placement.place` raises, with the same
    reasons.
    """
    together = beside(snapshot, request)
    if together is not None:
        return together
    if snapshot.decider is not None and request.gpus == 1:
        return snapshot.decider.place(snapshot, request)
    fitting = candidates(snapshot, request)  # raises with a reason for each device when there is none
    index = _index(snapshot, request)
    allowed = np.zeros_like(index.usable)
    for found in fitting:
        allowed[index.rows[found.node.host], found.node.devices.index(found.device)] = True
    # The fitting devices were determined above, in bytes; rounding the quota to MiB must not exclude one here.
    wanted = Wanted(request.session, Demand(request.gpus, request.compute, request.quota // MIB))
    chosen = placing.place(index, wanted, allowed=allowed)
    if chosen is None:
        return place(snapshot, request)
    node = snapshot.nodes[index.rows[chosen.host]]
    devices = [node.devices[column] for column in chosen.devices]
    free, name = min(snapshot.free(node, device, request.session) for device in devices), joint(node, devices)
    return Choice(node.host, name, reason_of(node, name, len(fitting), free), free)


def _index(snapshot: Snapshot, request: Request) -> Index:
    index = build(Pool(tuple(map(node_of, snapshot.nodes))), mix_of(snapshot))
    for row, node in enumerate(snapshot.nodes):
        for column, device in enumerate(node.devices):
            index.memory[row, column] = snapshot.free(node, device, request.session) // MIB
            index.compute[row, column] = WHOLE - min(
                WHOLE, snapshot.compute_promised(node.host, device.device, request.session))
    index.refresh()
    return index


# -- for planners ------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """The pool for a planner. ``sessions``: all that hold a place; those that must stay have the reason in ``pinned``.
    """

    snapshot: Snapshot
    index: Index
    sessions: tuple[Placed, ...]
    demands: Demands

    def wanted(self, request: Request, priority: int = 0, arrived: float = 0.0) -> Wanted:
        """Return the request in the planner's form."""
        return Wanted(request.session, self.demands.of(request), priority, arrived,
                      anti_affinity=request.anti_affinity)

    def device(self, host: str, columns: Sequence[int]) -> str:
        """Return the joint name of several devices, in the host's order."""
        return join(self.index.nodes[self.index.rows[host]].devices[column].name for column in sorted(columns))


def view(snapshot: Snapshot, pinned: Mapping[str, str]) -> View:
    """Make the pool for a planner. ``pinned``: sessions that cannot be moved, and why.

    The first session of a run counts for all of its sessions.
    """
    demands = Demands(snapshot.nodes)
    placed: list[Placed] = []
    known: set[tuple[str, str, str]] = set()
    for session in snapshot.sessions:
        why = pinned.get(session.name) or stays(session, demands.nodes.get(str(session.owner)))
        claims = claims_of(session)
        known.update((claim.session, claim.host, claim.device) for claim in claims)
        placed += session_places(demands, session, claims, why)
    placed += reserved_places(demands, snapshot.reserved, known)
    return View(snapshot, build(replace(pool_of(snapshot.nodes), placed=tuple(placed)), mix_of(snapshot)),
                tuple(placed), demands)


def pool_of(nodes: Iterable[NodeRecord]) -> Pool:
    """Return the hosts in the planners' form, without sessions."""
    return Pool(tuple(Node(node.host, tuple(Device(d.device, d.memory // MIB, d.healthy) for d in node.devices),
                           model=node.host, ready=node.state == "ready") for node in nodes))


def session_places(demands: Demands, session: SessionRecord, claims: Sequence[Claim], why: str) -> list[Placed]:
    """Return a session's places in the planners' form; the second one is a move's destination.

    ``why``: why the session must stay, or empty.
    """
    if session.run not in ("", session.name):
        claims = [replace(claim, quota=0, compute=0) for claim in claims]
    count = len(parts(session.device))
    return [one for claimed, reserved in ((claims[:count], False), (claims[count:], True)) if claimed
            for one in _placed(demands, claimed, session, why, reserved)]


def reserved_places(demands: Demands, reserved: Iterable[Claim],
                    known: Collection[tuple[str, str, str]]) -> list[Placed]:
    """Return reserved places; ``known``: (session, host, device) that are in session records already."""
    together: dict[tuple[str, str], list[Claim]] = {}
    for claim in reserved:
        if (claim.session, claim.host, claim.device) not in known:
            together.setdefault((claim.session, claim.host), []).append(claim)
    return [one for claims in together.values() for one in _placed(demands, claims, None, "", reserved=True)]


class Demands:
    """Maker of demands; the suitable hosts are determined once for all requests with equal requirements."""

    def __init__(self, nodes: Iterable[NodeRecord]) -> None:
        self.nodes = {node.host: node for node in nodes}
        self._hosts: dict[object, frozenset[str]] = {}

    def of(self, request: Request) -> Demand:
        """Return the demand of a request, with the suitable hosts as models; none: any host."""
        key = (request.needs, request.host, request.device, tuple(request.models), request.kind)
        if key not in self._hosts:
            hosts = frozenset(node.host for node in self.nodes.values() if request.host in (None, node.host) and any(
                unsuitable(node, device, request) is None and named(request, device)
                for device in node.devices))
            self._hosts[key] = frozenset() if len(hosts) == len(self.nodes) else hosts or frozenset({"(no host)"})
        # Memory is rounded up, so that a plan uses no more than is free. (The bound keeps one absurd record from
        # stopping all plans.)
        return Demand(request.gpus, request.compute, min(-(-request.quota // MIB), MAX_MEMORY_MIB), self._hosts[key])


def stays(session: SessionRecord, node: NodeRecord | None) -> str:
    """Return why a session cannot be moved now, by the records; empty when it can be."""
    if session.state != "running" or session.move is not None:
        return f"it is {session.state}"
    if node is None or node.state in ("draining", "unhealthy"):
        return "its host is being emptied"
    return ""


def _placed(demands: Demands, claims: Sequence[Claim], session: SessionRecord | None, pinned: str,
            reserved: bool) -> list[Placed]:
    """Return the claims of one place in the planners' form; empty where the pool lacks one of the devices."""
    claim = claims[0]
    node = demands.nodes.get(claim.host)
    known = {device.device: column for column, device in enumerate(node.devices)} if node else {}
    columns = tuple(known[one.device] for one in claims if one.device in known)
    if node is None or len(columns) != len(claims):
        return []
    request = replace(request_for(session) if session else Request(claim.session, claim.quota, compute=claim.compute),
                      gpus=len(columns), quota=claim.quota, compute=claim.compute)
    share = sum(max(claim.compute / WHOLE, claim.quota / max(node.devices[column].memory, 1)) for column in columns)
    found = Placed(claim.session, demands.of(request), claim.host, columns, pinned=pinned, anti_affinity=claim.group,
                   reserved=reserved, share=share)
    if session is not None:
        found = replace(found, priority=session.wants.priority, started=session.created,
                        moved=session.moved or float("-inf"))
    return [found]
