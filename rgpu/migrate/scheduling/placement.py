"""Choice of a session's device: pure, from a snapshot, with a reason.

Free memory and compute are counted from the promises in the session records (quotas and compute shares of
sessions and of moves under way, and reserved places), not from nodes'
reports: a report is always late, and two placements in a row would both use the same memory.

This is the filter: the devices that fit, and for each other device the reason why not. Of those that fit, the leader
takes the one with which the pool fragments least (:mod:`rgpu.migrate.scheduling.adapter`); :func:`rank`
orders by free memory, where nothing else decides.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from rgpu.migrate.records.schema import DeviceRecord, Needs, NodeRecord, SessionRecord
from rgpu.session.devices import join, parts
from rgpu.session.errors import NotFound, Refused
from rgpu.session.facts import PEERS

Place = tuple[str, str]  #: host, device
WHOLE = 100  #: per cent of one device
MOST_REASONS = 24  #: listed in a refusal before the rest is only counted
_WORDS = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Claim:
    """Promise of a part of a device to a session. ``group``: its anti-affinity group.

    ``run``: its run, whose sessions share the largest of their claims on a device; empty: it does not share.
    """

    session: str
    host: str
    device: str
    quota: int
    compute: int = 0
    group: str = ""
    run: str = ""


def run_of(session: str) -> str:
    """Return the run that a session of that name belongs to: NAME, NAME/2 and so on belong to NAME."""
    return session.partition("/")[0]


def promised_in_all(claims: Iterable[Claim], without: str = "") -> tuple[int, int]:
    """Return the promised bytes and per cent of one device: for each run the largest claim. ``without``: a session
    that does not count, together with those that share with it."""
    quota = compute = 0
    runs: dict[str, tuple[int, int]] = {}
    run = run_of(without)
    for claim in claims:
        if claim.session == without or (claim.run and claim.run == run):
            continue
        if claim.run:
            most = runs.get(claim.run, (0, 0))
            runs[claim.run] = max(most[0], claim.quota), max(most[1], claim.compute)
        else:
            quota, compute = quota + claim.quota, compute + claim.compute
    return quota + sum(most[0] for most in runs.values()), compute + sum(most[1] for most in runs.values())


@dataclass(frozen=True)
class Snapshot:
    """The pool at one revision. ``reserved``: places reserved for sessions."""

    nodes: tuple[NodeRecord, ...]
    sessions: tuple[SessionRecord, ...]
    reserved: tuple[Claim, ...] = ()
    #: Cache that decides for a large pool (:mod:`rgpu.migrate.scheduling.following.kept`), with the same answers.
    decider: Decider | None = field(default=None, compare=False, repr=False)

    def node(self, host: str) -> NodeRecord | None:
        """Return a node's record by its host; None: there is none."""
        return next((node for node in self.nodes if node.host == host), None)

    @cached_property
    def claims(self) -> dict[Place, tuple[Claim, ...]]:
        """Claims on each device; a session's reservation counts until its record has the place."""
        found: defaultdict[Place, list[Claim]] = defaultdict(list)
        for session in self.sessions:
            for claim in claims_of(session):
                found[claim.host, claim.device].append(claim)
        for claim in self.reserved:
            if not any(other.session == claim.session for other in found[claim.host, claim.device]):
                found[claim.host, claim.device].append(claim)
        return {place: tuple(claims) for place, claims in found.items()}

    def promised(self, host: str, device: str, without: str = "") -> int:
        """Return the bytes of the device that sessions, except ``without``, have or will have."""
        return promised_in_all(self.claims.get((host, device), ()), without)[0]

    def compute_promised(self, host: str, device: str, without: str = "") -> int:
        """Return the per cent of the device that sessions, except ``without``, have or will have."""
        return promised_in_all(self.claims.get((host, device), ()), without)[1]

    def free(self, node: NodeRecord, device: DeviceRecord, without: str = "") -> int:
        """Return the bytes of the device that are not promised; may be negative."""
        return device.memory - self.promised(node.host, device.device, without)

    def rivals(self, group: str, without: str = "") -> frozenset[str]:
        """Return the hosts that have a session of the anti-affinity group, except ``without``."""
        return frozenset(claim.host for claims in self.claims.values() for claim in claims
                         if group and claim.group == group and claim.session != without)


def claims_of(session: SessionRecord) -> list[Claim]:
    """Return the claims of a session's record: on its place, and on the one that it moves to."""
    if not session.live:
        return []
    wants = session.wants
    found = claims_on(session.name, str(session.owner), session.device, session.quota, wants.compute,
                      wants.anti_affinity, session.run)
    move = session.open_move
    if move is not None:
        found += claims_on(session.name, move.destination, move.device, session.quota, wants.compute,
                           wants.anti_affinity, session.run)
    return found


def claims_on(session: str, host: str, device: str, quota: int, compute: int = 0, group: str = "",
              run: str = "") -> list[Claim]:
    """Return one claim for each of the devices that ``device`` names."""
    return [Claim(session, host, one, quota, compute, group, run) for one in parts(device)]


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a place. ``needs`` None: any device will do. ``compute``: per cent. ``avoid``: where it failed.

    ``kept``: places kept for another waiting request, with its name. ``store``: only hosts with that store or an
    unknown one. ``gpus``: number of devices of one host; ``quota`` and ``compute`` are for each. ``device``: may name
    several. ``kind``: only devices of that kind; empty: any.
    """

    session: str
    quota: int
    needs: Needs | None = None
    host: str | None = None
    device: str | None = None
    avoid: Collection[Place] = ()
    avoid_hosts: Collection[str] = ()
    compute: int = 0
    models: Collection[str] = ()
    anti_affinity: str = ""
    kept: Mapping[Place, str] = field(default_factory=dict)
    store: str = ""
    gpus: int = 1
    kind: str = ""


def request_for(record: SessionRecord, **more: Any) -> Request:
    """Return the request of a session on record, for any place."""
    wants = record.wants
    return Request(record.name, record.quota, needs=record.needs, compute=wants.compute, models=tuple(wants.models),
                   anti_affinity=wants.anti_affinity, gpus=wants.gpus, kind=wants.kind, **more)


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen device, why, and its free bytes."""

    host: str
    device: str
    reason: str
    free: int = 0  #: bytes before the session was placed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that would do, with its free bytes."""

    node: NodeRecord
    device: DeviceRecord
    free: int


class Promises(Protocol):
    """Source of the promises of devices."""

    def free(self, node: NodeRecord, device: DeviceRecord, without: str = "") -> int:
        """Return the bytes that are not promised to a session other than ``without``; may be negative."""

    def compute_promised(self, host: str, device: str, without: str = "") -> int:
        """Return the per cent that sessions, except ``without``, have or will have."""


class Decider(Protocol):
    """Cache that returns for a snapshot the same as the functions of this module, but faster."""

    def place(self, snapshot: Snapshot, request: Request) -> Choice:
        """Return the same as ``scheduling.adapter.place_by_fragmentation``."""

    def suitable(self, snapshot: Snapshot, request: Request) -> list[tuple[NodeRecord, DeviceRecord]]:
        """Return the same as :func:`suitable`."""

    def sizes(self, snapshot: Snapshot, request: Request) -> list[int]:
        """Return the same as :func:`sizes`."""

    def room(self, snapshot: Snapshot, request: Request) -> Room:
        """Return the same as :func:`room`."""


@dataclass(frozen=True, slots=True)
class Room:
    """Free capacity of ready, suitable devices for a waiting request. ``before``: requests that some are kept for.

    The figures are of devices that are not kept; ``most_*``: of one device. ``compute``: per cent.
    """

    ready: int = 0
    before: tuple[str, ...] = ()
    open: int = 0
    bytes: int = 0
    most_bytes: int = 0
    compute: int = 0
    most_compute: int = 0
    most_devices: int = 0  #: most fitting devices of one host, for a request of several


def place(snapshot: Snapshot, request: Request) -> Choice:
    """Choose the device with the most free memory.

    Raises :class:`Refused` with a reason for every device, :class:`NotFound` for an unknown host.
    """
    found = candidates(snapshot, request)
    ranked = rank(found)
    best = ranked[0]
    chosen = [one for one in ranked if one.node.host == best.node.host][:request.gpus]
    name = joint(best.node, [one.device for one in chosen])
    kind = "the host asked for" if request.host else f"most free memory of {len(found)} that fit"
    free = chosen[-1].free
    return Choice(best.node.host, name, f"{name} of {best.node.host}: {kind} ({free} bytes free)", free)


def joint(node: NodeRecord, devices: Sequence[DeviceRecord]) -> str:
    """Return the joint name of devices of a node, in the node's order."""
    return join(device.device for device in node.devices if device in devices)


def candidates(snapshot: Snapshot, request: Request) -> list[Candidate]:
    """Return every device that fits, at least one; for several devices, those of hosts with enough of them.

    Raises as :func:`place` does.
    """
    rivals = snapshot.rivals(request.anti_affinity, request.session)
    found = [one for one in _look(snapshot, _hosts(snapshot, request), request, rivals) if isinstance(one, Candidate)]
    if request.gpus > 1:
        together = {node.host: alike(request, [one.device for one in found if one.node is node])
                    for node in snapshot.nodes}
        found = [one for one in found if one.device in together[one.node.host]]
    if not found:
        raise no_place(snapshot, snapshot, request, rivals)
    return found


def rank(found: Sequence[Candidate]) -> list[Candidate]:
    """Sort by free memory, the most first, then by name."""
    return sorted(found, key=lambda c: (-c.free, c.node.host, c.device.device))


def _hosts(snapshot: Snapshot, request: Request) -> tuple[NodeRecord, ...]:
    """Return the nodes to consider. Raises :class:`NotFound` for a requested host that is not in the pool."""
    if request.host is None:
        return snapshot.nodes
    node = snapshot.node(request.host)
    if node is None:
        raise unknown_host(snapshot.nodes, request.host)
    return (node,)


def unknown_host(nodes: Sequence[NodeRecord], host: str) -> NotFound:
    """Return the error for a requested host that is not in the pool."""
    known = sorted(node.host for node in nodes)
    named = ", ".join(known[:MOST_REASONS]) or "none"
    more = f" and {len(known) - MOST_REASONS} others" if len(known) > MOST_REASONS else ""
    return NotFound(f"no host is called {host!r}; the pool has: {named}{more}", host=host)


def no_place(promises: Promises, snapshot: Snapshot, request: Request, rivals: Collection[str]) -> Refused:
    """Return the error with the reason for each device; in a large pool for the first devices only."""
    hosts = _hosts(snapshot, request)
    reasons: list[str] = []
    for seen, node in enumerate(hosts):
        if len(reasons) >= MOST_REASONS:
            reasons.append(f"nor does any of {len(hosts) - seen} hosts more take it")
            break
        looked = list(_look(promises, (node,), request, rivals))
        reasons += [one for one in looked if isinstance(one, str)]
        if request.gpus > 1:
            fit = len(alike(request, [one.device for one in looked if isinstance(one, Candidate)], least=1))
            reasons.append(f"{node.host} has {fit} of the {request.gpus} devices of one kind that it needs")
    detail = "; ".join(reasons) if reasons else "the pool has no nodes"
    return Refused(f"no place for {request.session}: {detail}", session=request.session)


def _look(promises: Promises, nodes: Iterable[NodeRecord], request: Request,
          rivals: Collection[str]) -> Iterator[Candidate | str]:
    """Yield each device as a candidate, or why it (or its whole node) is none."""
    for node in nodes:
        why = node_refuses(node, request, rivals)
        if why is not None:
            yield why
            continue
        devices = [d for d in node.devices if named(request, d)]
        if not devices:
            yield f"{node.host} has no device {request.device or 'at all'}"
        for device in devices:
            why = device_refuses(promises, node, device, request)
            yield Candidate(node, device, promises.free(node, device, request.session)) if why is None else why


def alike(request: Request, devices: Sequence[DeviceRecord], least: int | None = None) -> list[DeviceRecord]:
    """Return devices of a host that one session may have: of one kind, with peer access to each other.

    The result is the largest such set; empty where it is smaller than ``least`` (default: the request's count).
    """
    kinds: defaultdict[object, list[DeviceRecord]] = defaultdict(list)
    for device in devices:
        group = kinds[device.kind, device.name, device.compute_capability, device.driver_version]
        if all(reaches(device, other) and reaches(other, device) for other in group):
            group.append(device)
    most = max(kinds.values(), key=len, default=[])
    return most if len(most) >= (request.gpus if least is None else least) else []


def reaches(device: DeviceRecord, other: DeviceRecord) -> bool:
    """Whether its kernels can access the other's memory, as their node reports (:data:`rgpu.session.facts.PEERS`)."""
    attributes = device.facts.get("attributes") or {}
    mask = attributes.get(PEERS, attributes.get(str(PEERS), 0))
    return bool(int(mask) >> int(other.device.rpartition(":")[2]) & 1)


def named(request: Request, device: DeviceRecord) -> bool:
    """Whether the request names the device, or no device."""
    return request.device is None or device.device in parts(request.device)


def node_refuses(node: NodeRecord, request: Request, rivals: Collection[str] = ()) -> str | None:
    """Return why the node takes no such session now; None: it does."""
    if node.state != "ready":
        return f"{node.host} is {node.state}" + (f" ({node.reason})" if node.reason else "")
    if node.host in request.avoid_hosts:
        return f"{node.host} was tried and failed"
    if request.store and node.store and node.store != request.store:
        return f"{node.host} does not see the checkpoint, which lies in {request.store}"
    if node.host in rivals:
        return f"{node.host} has a session of the group {request.anti_affinity}"
    return None


def device_refuses(promises: Promises, node: NodeRecord, device: DeviceRecord, request: Request) -> str | None:
    """Return why the device cannot take the session; None: it can."""
    where = f"{device.device} of {node.host}"
    if not device.healthy:
        return f"{where} is unhealthy" + (f" ({device.reason})" if device.reason else "")
    if (node.host, device.device) in request.avoid:
        return f"{where} is where the session failed"
    why = unsuitable(node, device, request)
    if why is not None:
        return why
    free = promises.free(node, device, request.session)
    if free < request.quota:
        return f"{where} is full: {mebibytes(max(0, free))} free of the {mebibytes(request.quota)} needed"
    share = WHOLE - promises.compute_promised(node.host, device.device, request.session)
    if request.compute > max(0, share):
        return f"{where} is busy: {max(0, share)} % of its compute free of the {request.compute} % needed"
    if (node.host, device.device) in request.kept:
        return f"{where} is kept for {request.kept[node.host, device.device]}, which waits before it"
    return None


def unsuitable(node: NodeRecord, device: DeviceRecord, request: Request) -> str | None:
    """Return why the device would not do even if it were empty, apart from its memory's size; None: it would."""
    why = _unlike(device, request)
    return None if why is None else f"{device.device} of {node.host} {why}"


def suits(device: DeviceRecord, request: Request) -> bool:
    """Whether a device of that kind would do by :func:`unsuitable`, on any node."""
    return _unlike(device, request) is None


def _unlike(device: DeviceRecord, request: Request) -> str | None:
    needs = request.needs
    if needs is not None:
        if device.kind != needs.kind:
            return f"is another kind of device than the session began on ({needs.kind})"
        if device.compute_capability != needs.compute_capability:
            return (f"has compute capability {_dotted(device.compute_capability)}, the session needs "
                    f"{_dotted(needs.compute_capability)}")
        if device.driver_version < needs.driver_version:
            return f"has driver {device.driver_version}, older than the {needs.driver_version} it began with"
    if request.kind and device.kind != request.kind:
        return f"is no {request.kind} device"
    if request.models and not any(is_model(device.name, model) for model in request.models):
        return f"is {device.name or 'of no named model'}, not {' or '.join(sorted(request.models))}"
    return None


def is_model(name: str, wanted: str) -> bool:
    """Whether a device name matches the model ``wanted`` of a user, as consecutive words.

    ``H200`` and ``nvidia h200`` are "NVIDIA H200"; ``A10`` is not "NVIDIA A100".
    """
    have, want = _WORDS.findall(name.lower()), _WORDS.findall(wanted.lower())
    return bool(want) and any(have[at:at + len(want)] == want for at in range(len(have) - len(want) + 1))


def suitable(snapshot: Snapshot, request: Request) -> list[tuple[NodeRecord, DeviceRecord]]:
    """Return the devices that would take the session if they were empty, in any state of them and their hosts."""
    if snapshot.decider is not None and request.gpus == 1:
        return snapshot.decider.suitable(snapshot, request)
    found = []
    for node in snapshot.nodes:
        if request.host in (None, node.host):
            here = [device for device in node.devices if named(request, device)
                    and unsuitable(node, device, request) is None and device.memory >= request.quota]
            found += [(node, device) for device in (alike(request, here) if request.gpus > 1 else here)]
    return found


def sizes(snapshot: Snapshot, request: Request) -> list[int]:
    """Return least and most memory of the devices that would do if they were empty, for any quota; [] for none.

    For several devices: the most memory that enough devices of one host have.
    """
    if snapshot.decider is not None and request.gpus == 1:
        return snapshot.decider.sizes(snapshot, request)
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for node, device in suitable(snapshot, replace(request, quota=0)):
        hosts[node.host].append(device.memory)
    least = [min(sizes) for sizes in hosts.values()]
    most = [sorted(sizes, reverse=True)[request.gpus - 1] for sizes in hosts.values()]
    return [min(least), max(most)] if hosts else []


def room(snapshot: Snapshot, request: Request) -> Room:
    """Return the free capacity for a waiting request."""
    if snapshot.decider is not None and request.gpus == 1:
        return snapshot.decider.room(snapshot, request)
    places = [(node, device) for node, device in suitable(snapshot, request)
              if node.state == "ready" and device.healthy]
    before = {request.kept[node.host, device.device] for node, device in places
              if (node.host, device.device) in request.kept}
    free, compute = [], []
    fit: Counter[str] = Counter()
    for node, device in places:
        if (node.host, device.device) not in request.kept:
            free.append(max(0, snapshot.free(node, device, request.session)))
            compute.append(max(0, WHOLE - snapshot.compute_promised(node.host, device.device, request.session)))
            fit[node.host] += free[-1] >= request.quota and compute[-1] >= request.compute
    return Room(len(places), tuple(sorted(before)), len(free), sum(free), max(free, default=0), sum(compute),
                max(compute, default=0), max(fit.values(), default=0) if request.gpus > 1 else 0)


def never_fits(snapshot: Snapshot, request: Request) -> str | None:
    """Return why no device of the pool takes the session even when empty, with the largest that fits; None: one does.
    """
    found = sizes(snapshot, request)
    if found and found[-1] >= request.quota:
        return None
    if found:
        each = f"each of {request.gpus} devices of one host" if request.gpus > 1 else "one device"
        return (f"{request.session} can never fit: it wants {mebibytes(request.quota)} of {each}, and the largest "
                f"that would fit is {mebibytes(found[-1])}")
    if request.gpus > 1 and sizes(snapshot, replace(request, gpus=1)):
        most = Counter(node.host for node, _ in suitable(snapshot, replace(request, gpus=1, quota=0)))
        return (f"{request.session} can never fit: it wants {request.gpus} devices of one host, and the host with the "
                f"most that would do has {max(most.values())}")
    where = f"{request.host} has" if request.host else "the pool has"
    names = sorted({device.name or device.device for node in snapshot.nodes for device in node.devices
                    if request.host in (None, node.host)})
    return (f"{request.session} can never fit: it wants {' or '.join(sorted(request.models)) or 'a device'}, and "
            f"{where} {', '.join(names) or 'no devices'}")


def share_of_memory(snapshot: Snapshot, request: Request, share: int) -> int:
    """Return the bytes of ``share`` per cent of the smallest suitable device: the meaning of ``--gpus`` without
    ``--memory``. 0 where there is none."""
    found = sizes(snapshot, request)
    return found[0] * share // WHOLE >> 20 << 20 if found else 0


def sized(snapshot: Snapshot, request: Request, share: int, default: int) -> Request:
    """Return the request with its memory: as requested, else ``share`` per cent of a device's, else ``default``."""
    if request.quota:
        return request
    return replace(request, quota=(share_of_memory(snapshot, request, share) if share else 0) or default)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def mebibytes(count: int) -> str:
    """Return a size in words: ``400 MiB``; in bytes where it is not a whole number of MiB."""
    return f"{count >> 20} MiB" if count % (1 << 20) == 0 else f"{count} bytes"
