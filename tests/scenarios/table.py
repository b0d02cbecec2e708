"""The table of a sweep: one row for each case, written as the case ends and under a lock.

So pieces of a sweep may run side by side, and one that is broken off leaves what it found.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tests.scenarios.fire import Outcome
from tests.scenarios.pool import ROOT

WIDTH = 52
HEAD = f"{'case':{WIDTH}s} {'fired':6s}{'workers':8s}{'owner':11s}{'digest':9s}{'s':>6s}  rgpu migrate said"


def record(name: str, order: Sequence[str], outcome: Outcome) -> None:
    """Put the outcome's row into the day's table ``name``, in place of the same case's older one."""
    folder = Path(os.environ.get("RGPU_SWEEP_OUT", ROOT / "bench" / "results"))
    with open(folder / f"{time.strftime('%Y-%m-%d')}-{name}.txt", "a+") as file:
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
    return (f"{outcome.case:{WIDTH}s} {'yes' if outcome.fired else 'no':6s}{outcome.owners or '-'!s:8s}"
            f"{' '.join(outcome.notes) or '-':11s}{outcome.digest[:8] or 'none':9s}{outcome.seconds:6.1f}  {said}")
