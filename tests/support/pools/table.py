"""The table of a sweep: point, who broke and how, owner afterwards, digest; written as a case ends and under a lock.

So pieces of a sweep may run side by side, and one that is broken off leaves what it found.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.pools.fire import Outcome
from tests.support.pools.pool import ROOT

WIDTH, WHO = 52, 46
HEAD = (f"{'case':{WIDTH}s} {'who':{WHO}s}{'fired':6s}{'workers':8s}{'owner':11s}{'digest':9s}{'s':>6s}  "
        "rgpu migrate said")
#: Points that the destination's worker reaches; other names without a role's are the source's worker's.
DESTINATION = ("receive", "ahead.make", "ahead.made", "rebuild", "verified", "replay.calls", "replay.probe",
               "replay.compare", "replay.finished")
#: Daemons reach these on both sides or on one.
DAEMONS = {"receive": "destination", "activate": "destination", "discard": "destination"}
HOW = {"kill": "killed", "stop": "frozen, woken", "freeze": "frozen, woken", "lapse": "loses its lease",
       "fail": "fails there", "lost": "gets no answer", "drop": "drops everything", "stall": "stalls",
       "delay": "is slow", "cut": "is cut mid-frame", "flip": "flips a bit"}


def folder() -> Path:
    return Path(os.environ.get("RGPU_SWEEP_OUT", ROOT / "bench" / "results"))


def who(case: str) -> str:
    """Who breaks in a case, and how: from its name alone."""
    if "/" not in case:
        point, _, action = case.partition(":")
        return f"{_at(point)} {HOW.get(action, action)}"
    parts = case.split("/")
    if len(parts) == 3:  # point / actor or link / how
        return f"{parts[1]} {HOW.get(parts[2], parts[2])}"
    if parts[0] in HOW:  # how / which link while what
        side, when = parts[1].split(" ", 1)
        return f"{side}'s link {HOW[parts[0]]} ({when})"
    return f"{parts[1]} node killed"


def _at(point: str) -> str:
    head, _, tail = point.partition(".")
    if head in ("mover", "recovery", "drain"):
        return "coordinator"
    if head == "daemon":
        return f"{DAEMONS.get(tail, 'source')} daemon"
    return "destination worker" if point in DESTINATION else "source worker"


def record(name: str, order: Sequence[str], outcome: Outcome) -> None:
    """Put the outcome's row into the day's table ``name``, in place of the same case's older one."""
    path = folder() / f"{time.strftime('%Y-%m-%d')}-{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = {line[:WIDTH].rstrip(): line for line in file.read().splitlines()[1:]}
        rows[outcome.case] = _row(outcome)
        places = {case: number for number, case in enumerate(order)}
        file.truncate(0)
        file.writelines(f"{line}\n" for line in
                        (HEAD, *(rows[case] for case in sorted(rows, key=lambda case: places.get(case, len(places))))))


def _row(outcome: Outcome) -> str:
    said = outcome.move.splitlines()[0][:140] if outcome.move else "-"
    return (f"{outcome.case:{WIDTH}s} {who(outcome.case):{WHO}s}{'yes' if outcome.fired else 'no':6s}"
            f"{outcome.owners or '-'!s:8s}{' '.join(outcome.notes) or '-':11s}{outcome.digest[:8] or 'none':9s}"
            f"{outcome.seconds:6.1f}  {said}")
