"""Detached runs of this machine among the rows of ``rgpu ps``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rgpu.link.runs.folder import Runs
from rgpu.link.runs.record import RunRecord, Standing

Row = dict[str, Any]


def rows(runs: Runs, everything: bool) -> list[Row]:
    """Return a row for each run, without a request to a pool; ``everything``: also for ended runs."""
    return [_row(record, now) for record, now in runs.known() if everything or not now.over]


def merged(found: list[Row], runs: Runs, pool: Path, everything: bool) -> list[Row]:
    """Return the pool's rows, completed from the records of detached runs here, then rows of runs without a session.

    ``pool``: the directory of the rows' pool. A run's first session, or its gang, has the run's name.
    """
    here = {record.name: (record, now) for record, now in runs.known() if record.pool == str(pool.resolve())}
    result = []
    for row in found:
        known = here.get(str(row.get("session")))
        if known is None or not _same(row, known[0]):
            result.append(row)
            continue
        del here[known[0].name]
        result.append(_told(row, *known))
    gangs = {name for name, (record, _) in here.items()
             if any(row.get("gang") == name and _same(row, record) for row in found)}
    return result + [_row(record, now, name in gangs) for name, (record, now) in here.items()
                     if everything or not now.over]


def _same(row: Row, record: RunRecord) -> bool:
    """Whether that session belongs to this run: an earlier or later run may have the same name."""
    created, ended = float(row.get("created") or 0.0), float(row.get("ended") or 0.0)
    return not (record.ended and created > record.ended) and not (ended and ended < record.begun)


def _told(row: Row, record: RunRecord, now: Standing) -> Row:
    """The session's row with the run's: the pool has no exit code of a program that was not the session's own."""
    row = {**row, "detached": now.state}
    if row.get("exit_code") is None and now.state == "ended":
        row["exit_code"] = record.exit_code
    said = str(row.get("note") or "")
    if now.state == "unknown" or record.trouble or record.ended and row.get("state") not in ("ended", "failed"):
        row["note"] = f"{said}; the run: {now.reason}" if said else f"the run: {now.reason}"
    return row


def _row(record: RunRecord, now: Standing, of_gang: bool = False) -> Row:
    lasted = (record.ended or time.time()) - record.begun
    return {
        "session": record.name, "state": "detached" if now.state == "running" else now.state, "host": None, "epoch": 0,
        "pid": record.program.pid if not now.over else None, "command": record.command, "created": record.begun,
        "age_s": lasted, "ended": record.ended or None, "lasted_s": lasted if record.ended else None,
        "exit_code": record.exit_code, "reason": now.reason, "detached": now.state, "user": None, "gang": None,
        "rank": None,  # of a session, of which this run has none: a row has these fields in any case
        "note": now.reason or ("its ranks are the gang of its name" if of_gang else "its program has not used the GPU"),
    }
