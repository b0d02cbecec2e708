"""The queue of requests that wait for a place, its order, and the choice of those that get one now: pure.

Two kinds of entries are in one queue: requests (``queue/NAME``) and parked sessions, by priority, then by age.
For an entry that does not fit, every device that could ever take it is kept from the entries behind it: no entry is
overtaken on the devices that it waits for, however small the others are, and no entry waits for a device that
the entries before it cannot use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rgpu.migrate.records.quota_decision import NOTHING, Quotas, Use
from rgpu.migrate.records.schema import QueueRecord, SessionRecord
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.migrate.scheduling.gangs.placing import (
    Bandwidth,
    Placed,
    Wish,
    claims_of_gang,
    gang_never_fits,
    place_gang,
    why_gang_waits,
)
from rgpu.migrate.scheduling.placement import (
    Choice,
    Place,
    Request,
    Snapshot,
    claims_on,
    mebibytes,
    never_fits,
    request_for,
    room,
    run_of,
    suitable,
)
from rgpu.migrate.scheduling.queueing import ordered
from rgpu.migrate.scheduling.runs import others_of
from rgpu.migrate.scheduling.snapshot import Demand
from rgpu.migrate.scheduling.snapshot import Request as Wanted
from rgpu.session.devices import MAX_GPUS
from rgpu.session.errors import NotFound, Refused, RgpuError


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of the queue. ``arrived``: Unix time, s. ``hold``: why it is not served now, whatever is free.

    ``user``: the user whose quota must allow it; empty: none, as for a parked session, which counts already.
    """

    request: Request
    priority: int = 0
    arrived: float = 0.0
    parked: bool = False
    hold: str = ""
    user: str = ""
    wish: Wish | None = None  #: form of a gang, whose request is that of one rank

    @property
    def name(self) -> str:
        return self.request.session

    def asks(self, shares: bool = False) -> Use:
        """Return its use against its user's quota; ``shares``: it shares memory and compute with others of its run."""
        request = self.request
        if self.wish is not None:
            each, ranks = request.gpus, self.wish.ranks
            members = -(-ranks // MAX_GPUS) if self.wish.spread else ranks  # a spread gang's hosts are not known yet
            return Use(members, request.quota * each * ranks, request.compute * each * ranks)
        return Use(1) if shares else Use(1, request.quota * request.gpus, request.compute * request.gpus)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Entry that gets no place now. ``never``: no present device of the pool would do."""

    entry: Entry
    position: int  #: 1: the head
    reason: str
    never: bool = False
    error: RgpuError | None = None  #: the reason for each device


@dataclass(frozen=True, slots=True)
class Served:
    """Result of serving the queue. ``placed``: in the order of the queue."""

    placed: tuple[tuple[Entry, Choice], ...] = ()
    gangs: tuple[tuple[Entry, Placed], ...] = ()  #: placed gangs, with all their places
    waiting: tuple[Waiting, ...] = ()

    def choice(self, name: str) -> Choice | None:
        """Return the place given to a request; None: it got none."""
        return next((choice for entry, choice in self.placed if entry.name == name), None)

    def gang(self, name: str) -> Placed | None:
        """Return the places given to a gang; None: it got none."""
        return next((placed for entry, placed in self.gangs if entry.name == name), None)

    def waits(self, name: str) -> Waiting | None:
        """Return how a request waits; None: it does not."""
        return next((waiting for waiting in self.waiting if waiting.entry.name == name), None)

    @property
    def head(self) -> Waiting | None:
        """First waiting entry, gangs apart, that is not on hold and could be placed on a present device."""
        return self._first(of_gangs=False)

    @property
    def head_gang(self) -> Waiting | None:
        """First waiting gang that is not on hold and could be placed on present devices."""
        return self._first(of_gangs=True)

    def _first(self, of_gangs: bool) -> Waiting | None:
        return next((waiting for waiting in self.waiting if not waiting.never and not waiting.entry.hold
                     and (waiting.entry.wish is not None) == of_gangs), None)


def queued(record: QueueRecord, hold: str = "", user: str = "") -> Entry:
    """Make the entry of a request of ``user``."""
    wants = record.wants
    request = Request(record.name, record.quota, host=record.host or None, compute=wants.compute,
                      models=tuple(wants.models), anti_affinity=wants.anti_affinity, gpus=wants.gpus, kind=wants.kind)
    return Entry(request, wants.priority, record.arrived, hold=hold, user=user)


def gang_waits(records: Iterable[QueueRecord], hold: str = "", user: str = "") -> Entry:
    """Make one entry of the requests of a gang: as old as the oldest of them, and held until all have arrived."""
    found = sorted(records, key=lambda one: (one.arrived, one.name))
    first = found[0]
    assert first.gang is not None
    have, of = sum(one.gang.ranks for one in found if one.gang), first.gang.of
    if have < of and not hold:
        runs = ", ".join(f"{one.name} with {one.gang.ranks}" for one in found if one.gang)
        hold = f"gang {first.gang.name} gathers: {have} of its {of} ranks have been asked for ({runs})"
    entry = queued(first, hold, user)
    return replace(entry, request=replace(entry.request, session=first.gang.name),
                   priority=max(one.wants.priority for one in found), wish=Wish(of, first.gang.spread))


def parked(record: SessionRecord, hold: str = "") -> Entry:
    """Make the entry of a parked session: its age is the session's, so that it is the first of its priority to return.
    """
    store = record.parked.store if record.parked else ""
    return Entry(request_for(record, store=store), record.wants.priority, record.created, True, hold)


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort requests by priority, then age, then name."""
    known = {entry.name: entry for entry in entries}
    return [known[wanted.name] for wanted in ordered(
        Wanted(entry.name, Demand(), entry.priority, entry.arrived) for entry in known.values())]


def serve(snapshot: Snapshot, entries: Iterable[Entry], quotas: Quotas | None = None,
          bandwidth: Bandwidth | None = None) -> Served:
    """Decide which requests get which places now; each place counts before the next one is chosen.

    A gang gets all its places or none, and keeps none while it waits. ``bandwidth``: between hosts, where it is known.
    For a request above its user's quota no device is kept from others. For a request that waits for a place its
    part of the quota is kept from the same user's requests behind it.
    """
    placed: list[tuple[Entry, Choice]] = []
    gangs: list[tuple[Entry, Placed]] = []
    waiting: list[Waiting] = []
    kept: dict[Place, str] = {}
    ahead: dict[str, Use] = {}  #: by user: use of the quota by the entries before
    everything = sum(len(node.devices) for node in snapshot.nodes)
    for position, entry in enumerate(in_order(entries), 1):
        request = replace(entry.request, kept=kept)
        if entry.hold:
            waiting.append(Waiting(entry, position, entry.hold))
            continue
        before = ahead.get(entry.user, NOTHING)
        if quotas is not None and quotas.records and entry.user:
            asks = entry.asks(_shares(snapshot, entry))
            verdict = quotas.decide(entry.user, asks, before)
            if not verdict.allowed:
                waiting.append(Waiting(replace(entry, hold=verdict.reason), position, verdict.reason, verdict.never,
                                       verdict.error(entry.user, session=entry.name)))
                continue
            ahead[entry.user] = before + asks
        if kept and len(kept) == everything:  # the usual case in a long queue: nothing to choose from
            waiting.append(Waiting(entry, position, _behind(kept)))
            continue
        if entry.wish is not None:  # no device is kept for a gang, which takes all or none
            try:
                together = place_gang(snapshot, request, entry.wish, bandwidth)
            except (Refused, NotFound) as error:
                never = gang_never_fits(snapshot, entry.request, entry.wish)
                waiting.append(Waiting(entry, position, never or why_gang_waits(snapshot, request, entry.wish),
                                       never is not None, error))
                if never is not None:
                    ahead[entry.user] = before
                continue
            placed.append((entry, together.members[0].choice))
            gangs.append((entry, together))
            snapshot = replace(snapshot, reserved=(*snapshot.reserved, *claims_of_gang(entry.name, together, request)))
            continue
        try:
            choice = place_by_fragmentation(snapshot, request)
        except (Refused, NotFound) as error:
            never = never_fits(snapshot, entry.request)
            waiting.append(Waiting(entry, position, never or why_waits(snapshot, request), never is not None, error))
            for node, device in suitable(snapshot, entry.request):
                kept.setdefault((node.host, device.device), entry.name)
            if never is not None:
                ahead[entry.user] = before
            continue
        placed.append((entry, choice))
        claims = claims_on(entry.name, choice.host, choice.device, request.quota, request.compute,
                           request.anti_affinity, run_of(entry.name))
        snapshot = replace(snapshot, reserved=(*snapshot.reserved, *claims))
    return Served(tuple(placed), tuple(gangs), tuple(waiting))


def _shares(snapshot: Snapshot, entry: Entry) -> bool:
    """Whether it is a further process of a run, which shares the run's promise."""
    return "/" in entry.name and bool(others_of(snapshot.sessions, entry.name))


def _behind(kept: dict[Place, str]) -> str:
    first = next(iter(kept.values()))
    return f"{first} waits before it, and every device is kept for those that do"


def why_waits(snapshot: Snapshot, request: Request) -> str:
    """Return the reason of a wait: the free total and largest piece for such a request, or the entries before it."""
    found = room(snapshot, request)
    if not found.ready:
        return f"no device that would do is ready: {_wanted(request)}"
    if not found.open:
        others = " and others" if len(found.before) > 3 else ""
        return f"{', '.join(found.before[:3])}{others} wait before it for what it needs"
    said = f"{_wanted(request)} fits nowhere now: {mebibytes(found.bytes)} are free in all, the largest piece is " \
           f"{mebibytes(found.most_bytes)}"
    if request.gpus > 1:
        said += f"; at most {found.most_devices} of one host have that much each"
    if request.compute:
        said += f"; {found.compute} % of a GPU's compute in all, at most {found.most_compute} % of one"
    if request.anti_affinity and snapshot.rivals(request.anti_affinity, request.session):
        said += f"; hosts with another session of {request.anti_affinity} do not count"
    return said


def _wanted(request: Request) -> str:
    share = f" and {request.compute} % of one GPU" if request.compute else ""
    where = f" on {request.host}" if request.host else ""
    models = f" of {' or '.join(sorted(request.models))}" if request.models else ""
    of_each = f" of each of {request.gpus} GPUs of one host" if request.gpus > 1 else ""
    return f"{mebibytes(request.quota)}{share}{models}{of_each}{where}"


def row(record: QueueRecord | SessionRecord, told: Waiting | None, now: float) -> dict[str, object]:
    """Return a waiting entry in the form of ``rgpu ps``, ``rgpu top`` and ``pool.status``."""
    waits_since = record.arrived if isinstance(record, QueueRecord) else \
        record.parked.when if record.parked else record.changed
    return {"name": record.name, "kind": "request" if isinstance(record, QueueRecord) else "parked",
            "position": told.position if told else None, "priority": record.wants.priority,
            "memory_bytes": record.quota, "compute": record.wants.compute or None,
            "waited_s": max(0.0, now - waits_since), "reason": told.reason if told else record.reason}
