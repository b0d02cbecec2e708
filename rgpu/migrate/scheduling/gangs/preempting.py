"""Choice of the sessions of lower priority to park so that all ranks of a gang get places. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rgpu.migrate.records.schema import SessionRecord
from rgpu.migrate.scheduling.gangs.placing import Bandwidth, Placed, Wish, place_gang
from rgpu.migrate.scheduling.placement import Claim, Request, Snapshot, claims_on
from rgpu.session.errors import NotFound, Refused

TAKEN_BACK = 64  #: a larger set is not reduced again: each check is a placement


class ToPark(NamedTuple):
    """A session that is to be parked."""

    name: str
    priority: int


@dataclass(frozen=True, slots=True)
class GangRoom:
    """Sessions to park, the resulting places of all ranks, and why."""

    park: tuple[ToPark, ...]
    placed: Placed
    reason: str


def preempt_for(snapshot: Snapshot, request: Request, wish: Wish, priority: int, stays: Collection[str],
                bandwidth: Bandwidth | None = None) -> GangRoom | None:
    """Return the smallest set found, the least important first, each of which is needed; None where none suffices.

    ``request``: that of one rank. ``priority``: the gang's; only sessions below it are parked. ``stays``: names of
    sessions that are never parked.
    """
    lower = [one for one in snapshot.sessions
             if one.state == "running" and one.recover and one.wants.priority < priority and one.name not in stays]
    lower.sort(key=lambda one: (one.wants.priority, one.wants.gpus * one.wants.compute, -one.created, one.name))
    placed = _without(snapshot, lower, request, wish, bandwidth) if lower else None
    if placed is None:
        return None
    least, most = 1, len(lower)
    while least < most:  # more free devices never take a place away
        middle = (least + most) // 2
        if _without(snapshot, lower[:middle], request, wish, bandwidth) is None:
            least = middle + 1
        else:
            most = middle
    park = lower[:least]
    for one in reversed(park[:-1] if len(park) <= TAKEN_BACK else []):
        rest = [other for other in park if other is not one]
        if _without(snapshot, rest, request, wish, bandwidth) is not None:
            park = rest
    placed = _without(snapshot, park, request, wish, bandwidth)
    assert placed is not None
    highest = max(one.wants.priority for one in park)
    return GangRoom(tuple(ToPark(one.name, one.wants.priority) for one in park), placed,
                    f"all of gang {request.session} (priority {priority}) fits when "
                    f"{', '.join(one.name for one in park)} (priority at most {highest}) are parked")


def claims_while_parking(gang: str, placed: Placed, request: Request) -> tuple[Claim, ...]:
    """Return the places to reserve for the gang until the others are parked, in its name, so that it can take them."""
    return tuple(claim for member in placed.members for claim in claims_on(
        gang, member.choice.host, member.choice.device, request.quota, request.compute, request.anti_affinity,
        f"{gang}.{member.first}"))


def _without(snapshot: Snapshot, parked: Sequence[SessionRecord], request: Request, wish: Wish,
             bandwidth: Bandwidth | None) -> Placed | None:
    """Return the gang's places if the sessions were parked; None: it does not fit."""
    names = {one.name for one in parked}
    rest = replace(snapshot, sessions=tuple(one for one in snapshot.sessions if one.name not in names))
    try:
        return place_gang(rest, request, wish, bandwidth)
    except (Refused, NotFound):
        return None
