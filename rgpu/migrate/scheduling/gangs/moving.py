"""Moves of the members of a gang that must leave a host: places for all of them, or no move. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from rgpu.migrate.records.schema import SessionRecord
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.migrate.scheduling.placement import Choice, Snapshot, claims_on, request_for
from rgpu.session.errors import NotFound, Refused


def members_of(sessions: Iterable[SessionRecord], gang: str) -> list[SessionRecord]:
    """Return the live sessions of a gang, in the order of their ranks; none for an empty name."""
    found = [one for one in sessions if gang and one.gang == gang and one.live]
    return sorted(found, key=lambda one: (one.rank, one.name))


def bound(sessions: Iterable[SessionRecord]) -> dict[str, str]:
    """Return the members of gangs, which are not moved or parked to make room for others, each with the reason."""
    return {one.name: f"it is a member of gang {one.gang}: moved by a drain or by hand, not to make room"
            for one in sessions if one.gang and one.live}


def places_elsewhere(snapshot: Snapshot, leaving: Sequence[SessionRecord],
                     avoid_hosts: Collection[str]) -> dict[str, Choice]:
    """Return a place for each of the sessions ``leaving``, all of one gang, on hosts other than ``avoid_hosts``; on
    the gang's other hosts where they fit there.

    Raises :class:`Refused` where there is none for one of them: then no member moves.
    """
    gang = leaving[0].gang
    own = list(dict.fromkeys(str(one.owner) for one in members_of(snapshot.sessions, gang)
                             if one.owner not in avoid_hosts))
    found: dict[str, Choice] = {}
    for record in leaving:
        try:
            choice = _place(snapshot, record, own, avoid_hosts)
        except (Refused, NotFound) as error:
            have = f"; {', '.join(found)} could" if found else ""
            raise Refused(f"gang {gang}: its members are moved together or not at all, and {record.name} cannot"
                          f"{have}: {error.message}", session=record.name) from None
        found[record.name] = choice
        claims = claims_on(record.name, choice.host, choice.device, record.quota, record.wants.compute,
                           record.wants.anti_affinity, record.run)
        snapshot = replace(snapshot, reserved=(*snapshot.reserved, *claims))
        if choice.host not in own:
            own.append(choice.host)
    return found


def _place(snapshot: Snapshot, record: SessionRecord, near: Sequence[str], avoid_hosts: Collection[str]) -> Choice:
    """Choose a place on a host that the gang is on already if one fits, else on any host."""
    for host in near:
        try:
            return place_by_fragmentation(snapshot, request_for(record, host=host, avoid_hosts=avoid_hosts))
        except (Refused, NotFound):
            continue
    return place_by_fragmentation(snapshot, request_for(record, avoid_hosts=avoid_hosts))
