"""Sessions of one run: the first is NAME, those of further processes are NAME/2, NAME/3 … Pure.

They share the promise of the first, as processes share a local GPU: on a device the largest of their claims counts
for all (:func:`rgpu.migrate.scheduling.placement.promised_in_all`), and each is placed beside the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rgpu.migrate.records.schema import SessionRecord
from rgpu.migrate.scheduling.placement import Choice, Request, Snapshot, candidates, run_of
from rgpu.session.devices import parts
from rgpu.session.errors import AlreadyExists, NotFound, Refused


def others_of(sessions: Iterable[SessionRecord], session: str) -> list[SessionRecord]:
    """Return the live sessions of the run of ``session``, without it, in the order in which they began."""
    run = run_of(session)
    found = [one for one in sessions if one.run == run and one.live and one.name != session]
    return sorted(found, key=lambda one: (one.created, one.name))


def check_run(sessions: Iterable[SessionRecord], session: str, agent: str) -> None:
    """Check the run of a new session. Raises :class:`AlreadyExists` for a run of another user, and for a new run while
    processes of an old one of that name are left.
    """
    run, others = run_of(session), others_of(sessions, session)
    if any(one.agent != agent for one in others):
        raise AlreadyExists(f"there is a run {run} of somebody else's: choose another name with --name",
                            session=session)
    if others and session == run:
        raise AlreadyExists(f"processes of an earlier run {run} use GPUs still ({others[0].name}): choose another name "
                            f"with --name, or end them with 'rgpu kill {others[0].name}'", session=session)


def beside(snapshot: Snapshot, request: Request) -> Choice | None:
    """Return a place beside another session of its run, where that is suitable; None: there is none.

    Waiting requests do not prevent it: the place was promised to its run before.
    """
    if "/" not in request.session:
        return None
    for other in others_of(snapshot.sessions, request.session):
        devices = parts(other.device)
        if request.gpus != len(devices) or request.host not in (None, other.owner) or (
                request.device not in (None, other.device)):
            continue
        try:
            found = candidates(snapshot, replace(request, host=other.owner, device=other.device, kept={}))
        except (Refused, NotFound):
            continue
        if len(found) == len(devices):
            free = min(one.free for one in found)
            return Choice(str(other.owner), other.device, f"{other.device} of {other.owner}: shared with {other.name}, "
                          "a process of the same run", free)
    return None


def kept_together(sessions: Sequence[SessionRecord]) -> dict[str, str]:
    """Return the sessions that are not moved to make room, since others of their run share their device; and why."""
    runs = Counter(one.run for one in sessions if one.run and one.live)
    if len(runs) == sum(runs.values()):
        return {}
    return {one.name: f"it shares its device with others of its run {one.run}" for one in sessions
            if one.live and one.run and runs[one.run] > 1}
