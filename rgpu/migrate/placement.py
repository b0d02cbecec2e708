"""Which device a session goes to: pure, a snapshot in, a choice with its reason out.

Free memory is counted from the promises in the session records (quotas of
sessions and of moves under way), not from what nodes report: a report is
always late, and two placements in a row would both believe it.

First version: the device with the most free memory, so that load spreads; equal
ones by name. (A later policy replaces :func:`rank`; the filter stays.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rgpu.migrate.records import DeviceRecord, Needs, NodeRecord, SessionRecord
from rgpu.session.errors import NotFound, Refused

Place = tuple[str, str]  #: host, device


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one revision."""

    nodes: tuple[NodeRecord, ...]
    sessions: tuple[SessionRecord, ...]

    def node(self, host: str) -> NodeRecord | None:
        return next((node for node in self.nodes if node.host == host), None)

    def promised(self, host: str, device: str, without: str = "") -> int:
        """Bytes of the device that sessions (but ``without``) have or will have."""
        total = 0
        for session in self.sessions:
            if session.name == without or not session.live:
                continue
            if (session.owner, session.device) == (host, device):
                total += session.quota
            move = session.open_move
            if move is not None and (move.destination, move.device) == (host, device):
                total += session.quota
        return total

    def free(self, node: NodeRecord, device: DeviceRecord, without: str = "") -> int:
        """Bytes of the device that are promised to nobody; may be negative."""
        return device.memory - self.promised(node.host, device.device, without)


@dataclass(frozen=True, slots=True)
class Request:
    """``needs`` None: any device will do. ``avoid``: places not to use, with the reason for the message."""

    session: str
    quota: int
    needs: Needs | None = None
    host: str | None = None
    device: str | None = None
    avoid: Collection[Place] = ()
    avoid_hosts: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    host: str
    device: str
    reason: str
    free: int = 0  #: bytes before the session came


@dataclass(frozen=True, slots=True)
class Candidate:
    node: NodeRecord
    device: DeviceRecord
    free: int


@dataclass
class _Search:
    """Candidates, and why the others are none."""

    found: list[Candidate] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def place(snapshot: Snapshot, request: Request) -> Choice:
    """The best device.

    Raises :class:`Refused` with a reason for every device, :class:`NotFound` for an unknown host.
    """
    search = _search(snapshot, request)
    if not search.found:
        detail = "; ".join(search.reasons) if search.reasons else "the pool has no nodes"
        raise Refused(f"no place for {request.session}: {detail}", session=request.session)
    best = rank(search.found, request)[0]
    kind = "the host asked for" if request.host else f"most free memory of {len(search.found)} that fit"
    return Choice(best.node.host, best.device.device,
                  f"{best.device.device} of {best.node.host}: {kind} ({best.free} bytes free)", best.free)


def rank(candidates: Sequence[Candidate], request: Request) -> list[Candidate]:
    """The policy: most free memory first."""
    return sorted(candidates, key=lambda c: (-c.free, c.node.host, c.device.device))


def _search(snapshot: Snapshot, request: Request) -> _Search:
    search = _Search()
    nodes: Iterable[NodeRecord] = snapshot.nodes
    if request.host is not None:
        node = snapshot.node(request.host)
        if node is None:
            known = ", ".join(sorted(n.host for n in snapshot.nodes)) or "none"
            raise NotFound(f"no host is called {request.host!r}; the pool has: {known}", host=request.host)
        nodes = [node]
    for node in nodes:
        why = node_refuses(node, request)
        if why is not None:
            search.reasons.append(why)
            continue
        devices = [d for d in node.devices if request.device in (None, d.device)]
        if not devices:
            search.reasons.append(f"{node.host} has no device {request.device or 'at all'}")
        for device in devices:
            free = snapshot.free(node, device, request.session)
            why = device_refuses(node, device, request, free)
            if why is None:
                search.found.append(Candidate(node, device, free))
            else:
                search.reasons.append(why)
    return search


def node_refuses(node: NodeRecord, request: Request) -> str | None:
    """Why the node takes no session now."""
    if node.state != "ready":
        return f"{node.host} is {node.state}" + (f" ({node.reason})" if node.reason else "")
    if node.host in request.avoid_hosts:
        return f"{node.host} was tried and failed"
    return None


def device_refuses(node: NodeRecord, device: DeviceRecord, request: Request, free: int) -> str | None:
    """Why the device cannot take the session."""
    where = f"{device.device} of {node.host}"
    if not device.healthy:
        return f"{where} is unhealthy" + (f" ({device.reason})" if device.reason else "")
    if (node.host, device.device) in request.avoid:
        return f"{where} is where the session failed"
    needs = request.needs
    if needs is not None:
        if device.kind != needs.kind:
            return f"{where} is another kind of device than the session began on ({needs.kind})"
        if device.compute_capability != needs.compute_capability:
            return (f"{where} has compute capability {_dotted(device.compute_capability)}, the session needs "
                    f"{_dotted(needs.compute_capability)}")
        if device.driver_version < needs.driver_version:
            return f"{where} has driver {device.driver_version}, older than the {needs.driver_version} it began with"
    if free < request.quota:
        return f"{where} is full: {mebibytes(max(0, free))} free of the {mebibytes(request.quota)} needed"
    return None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def mebibytes(count: int) -> str:
    """``400 MiB``; bytes where that would not be the whole truth."""
    return f"{count >> 20} MiB" if count % (1 << 20) == 0 else f"{count} bytes"
