"""Places of a gang: for all of its ranks at once, or for none. Pure: from a snapshot, choices with a reason.

A rank has the devices of one process: ``request.gpus`` devices of one host. With ``spread`` each rank is one device of
one list, and a member of the gang has all of the list's devices on its host (at most
:data:`rgpu.session.devices.MAX_GPUS`: a host with more has several members).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rgpu.migrate.records.schema import DeviceRecord, NodeRecord
from rgpu.migrate.scheduling.gangs.hosts import allot
from rgpu.migrate.scheduling.placement import (
    WHOLE,
    Candidate,
    Choice,
    Claim,
    Request,
    Snapshot,
    alike,
    candidates,
    claims_on,
    joint,
    mebibytes,
    suitable,
)
from rgpu.session.devices import MAX_GPUS, MAX_RANKS
from rgpu.session.errors import Refused

Kind = tuple[str, tuple[int, int]]  #: kind of device, with its compute capability: all ranks of a gang have the same
Bandwidth = Mapping[frozenset[str], float]


@dataclass(frozen=True, slots=True)
class Wish:
    """Requested form of a gang. ``ranks``: in all. ``spread``: see the module docstring."""

    ranks: int
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """Place of one member: its ``first`` rank, its number of ranks, and the device."""

    first: int
    ranks: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Placed:
    """Places for all ranks of a gang."""

    members: tuple[Member, ...]
    reason: str


def place_gang(snapshot: Snapshot, request: Request, wish: Wish, bandwidth: Bandwidth | None = None) -> Placed:
    """Choose places for all ranks, near each other if possible. ``request``: that of one rank.

    Raises :class:`Refused` with the number of ranks that fit, and a reason for each device where none does;
    :class:`NotFound` for an unknown host.
    """
    rooms = rooms_of(snapshot, request, wish)
    best: Placed | None = None
    for slots in rooms.values():
        found = allot({host: len(places) for host, places in slots.items()}, wish.ranks, bandwidth)
        if found is None:
            continue
        members = _members(snapshot, slots, found.counts, wish)
        if best is None or len({one.choice.host for one in members}) < len({one.choice.host for one in best.members}):
            best = Placed(tuple(replace(one, choice=replace(one.choice, reason=found.reason)) for one in members),
                          found.reason)
    if best is None:
        raise Refused(f"no place for {request.session}: {lacking(rooms, wish)}", session=request.session)
    if len(best.members) > MAX_RANKS:
        raise Refused(f"no place for {request.session}: its {wish.ranks} devices would be {len(best.members)} sessions "
                      f"on as many hosts, {MAX_RANKS} at most", session=request.session)
    return best


def rooms_of(snapshot: Snapshot, request: Request, wish: Wish) -> dict[Kind, dict[str, list[Slot]]]:
    """Return the ranks that each host could take now, by kind of device. Raises as :func:`place_gang` if none fits."""
    found = candidates(snapshot, request)
    hosts: defaultdict[tuple[Kind, str], list[Candidate]] = defaultdict(list)
    for one in found:
        hosts[_kind(one.device), one.node.host].append(one)
    rooms: defaultdict[Kind, dict[str, list[Slot]]] = defaultdict(dict)
    for (kind, host), here in hosts.items():
        room = {one.device.device: _times(snapshot, request, one) for one in here}
        slots = _slots(here[0].node, [one.device for one in here], room, request, wish)
        rooms[kind][host] = slots[:1] if request.anti_affinity else slots
    return dict(rooms)


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one rank."""

    node: NodeRecord
    devices: tuple[DeviceRecord, ...]


def _kind(device: DeviceRecord) -> Kind:
    return device.kind, device.compute_capability


def _times(snapshot: Snapshot, request: Request, found: Candidate) -> int:
    """Return how many ranks fit on one device that fits one."""
    memory = found.free // request.quota if request.quota else WHOLE
    taken = snapshot.compute_promised(found.node.host, found.device.device, request.session)
    compute = (WHOLE - taken) // request.compute if request.compute else WHOLE
    return max(1, min(memory, compute, WHOLE))


def _slots(node: NodeRecord, devices: Sequence[DeviceRecord], room: Mapping[str, int], request: Request,
           wish: Wish) -> list[Slot]:
    """Return the slots for ranks on a host; each device is used once before any is used twice."""
    ordered = [device for device in node.devices if device in devices]
    if wish.spread:
        return [Slot(node, (device,)) for device in alike(request, ordered, least=1)]
    groups = [(device,) for device in ordered] if request.gpus == 1 else _groups(alike(request, ordered), request.gpus)
    left = [min(room[device.device] for device in group) for group in groups]
    slots = []
    for turn in range(max(left, default=0)):
        slots += [Slot(node, group) for group, times in zip(groups, left, strict=True) if times > turn]
    return slots


def _groups(devices: Sequence[DeviceRecord], size: int) -> list[tuple[DeviceRecord, ...]]:
    """Return devices in groups of ``size``; a remainder is left out."""
    return [tuple(devices[at:at + size]) for at in range(0, len(devices) - size + 1, size)]


def _members(snapshot: Snapshot, slots: Mapping[str, Sequence[Slot]], counts: Iterable[tuple[str, int]],
             wish: Wish) -> list[Member]:
    members: list[Member] = []
    rank = 0
    for host, count in counts:
        taken = slots[host][:count]
        size = MAX_GPUS if wish.spread else 1
        for at in range(0, count, size):
            together = taken[at:at + size]
            devices = [device for slot in together for device in slot.devices]
            node = together[0].node
            free = min(snapshot.free(node, device) for device in devices)
            members.append(Member(rank, len(together), Choice(host, joint(node, devices), "", free)))
            rank += len(together)
    return members


def claims_of_gang(session: str, placed: Placed, request: Request) -> list[Claim]:
    """Return the claims of a gang's places, for requests that are placed after it."""
    return [claim for member in placed.members for claim in claims_on(
        f"{session}.{member.first}", member.choice.host, member.choice.device, request.quota, request.compute,
        request.anti_affinity, f"{session}.{member.first}")]


def lacking(rooms: Mapping[Kind, Mapping[str, Sequence[Slot]]], wish: Wish) -> str:
    """Return a sentence with the number of ranks that fit now."""
    counts: Counter[str] = Counter()
    for slots in rooms.values():
        here = {host: len(places) for host, places in slots.items()}
        if sum(here.values()) > counts.total():
            counts = Counter(here)
    what = "devices" if wish.spread else "ranks"
    said = ", ".join(f"{host} {count}" for host, count in sorted(counts.items()))
    return (f"{counts.total()} of its {wish.ranks} {what} have room now ({said}); they are placed together or not at "
            "all")


def why_gang_waits(snapshot: Snapshot, request: Request, wish: Wish) -> str:
    """Return the sentence for the clients of a waiting gang."""
    try:
        return lacking(rooms_of(snapshot, request, wish), wish)
    except Refused:
        return (f"0 of its {wish.ranks} {'devices' if wish.spread else 'ranks'} have room now, each wants "
                f"{mebibytes(request.quota)}; they are placed together or not at all")


def gang_never_fits(snapshot: Snapshot, request: Request, wish: Wish) -> str | None:
    """Return why the pool could not take the gang even if it were empty; None: it could."""
    hosts: defaultdict[tuple[Kind, str], list[tuple[NodeRecord, DeviceRecord]]] = defaultdict(list)
    for node, device in suitable(snapshot, request):
        hosts[_kind(device), node.host].append((node, device))
    most: Counter[Kind] = Counter()
    for (kind, _), here in hosts.items():
        room = {device.device: max(1, min(device.memory // request.quota if request.quota else WHOLE,
                                          WHOLE // request.compute if request.compute else WHOLE))
                for _, device in here}
        slots = _slots(here[0][0], [device for _, device in here], room, request, wish)
        most[kind] += len(slots[:1] if request.anti_affinity else slots)
    best = max(most.values(), default=0)
    if best >= wish.ranks:
        return None
    each = f"{request.gpus} devices with {mebibytes(request.quota)} each" if request.gpus > 1 else \
        mebibytes(request.quota)
    what = "devices" if wish.spread else "ranks"
    return (f"{request.session} can never fit: it wants {wish.ranks} {what} of {each}, and "
            f"{request.host or 'the pool'}, were it empty, has room for {best}")
