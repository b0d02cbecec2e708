"""The rows of gangs, made of their records, their members' records and the members' workers' reports. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rgpu.migrate.records.gangs import GangRecord
from rgpu.migrate.records.schema import QueueRecord, SessionRecord
from rgpu.server.node.gangs.waits import CommunicatorFigures, last_collective, read_figures, who_waits

Views = Mapping[str, Mapping[str, Any]]


def gang_row(record: GangRecord, sessions: Sequence[SessionRecord], views: Views, now: float) -> dict[str, Any]:
    """One gang with its members. ``sessions``: all on record; ``now``: Unix time, s."""
    mine = sorted((one for one in sessions if one.gang == record.name and one.created >= record.created),
                  key=lambda one: (one.rank, len(one.name), one.name))
    first = [one for one in mine if "/" not in one.name]
    members = [_member(record, one, views) for one in mine]
    waits = who_waits(said for one in mine for said in _figures(one, views)) if record.state == "running" else []
    absent = [one["rank"] for one in members if one["came"] is False and one["session"] in record.epochs]
    notes = [record.reason if record.state == "ended" else "", *waits]
    if absent and len(absent) < len(first):
        notes.append(f"no process uses rank {', '.join(map(str, absent))} yet")
    return {"gang": record.name, "user": record.user or None, "state": record.state, "generation": record.generation,
            "ranks": record.ranks, "spread": record.spread,
            "hosts": list(dict.fromkeys(str(one.owner) for one in mine if one.owner)),
            "runs": [{"run": run.name, "client": run.program.host, "pid": run.program.pid, "first": run.first,
                      "ranks": run.ranks} for run in record.runs],
            "members": members, "waits": waits, "created": record.created, "changed": record.changed,
            "ended": record.ended or None, "age_s": max(0.0, now - record.created), "position": None,
            "reason": record.reason, "note": "; ".join(note for note in notes if note)}


def _figures(record: SessionRecord, views: Views) -> tuple[CommunicatorFigures, ...]:
    return read_figures(views.get(record.name, {}).get("communicators")) if record.live else ()


def _member(gang: GangRecord, record: SessionRecord, views: Views) -> dict[str, Any]:
    view = views.get(record.name, {})
    stats = dict(view.get("stats") or {})
    calls = stats.get("calls", view.get("position"))
    # For a live member whose node does not answer it is not known.
    came = bool(view.get("attached") or calls) if view else None if record.live else True
    return {"rank": record.rank, "session": record.name, "state": record.state, "host": record.owner,
            "device": record.device, "epoch": record.epoch,
            "in_generation": gang.epochs.get(record.name) == record.epoch,
            "came": came, "pid": stats.get("pid"), "memory_bytes": view.get("memory_bytes"), "calls": calls,
            "collective": last_collective(_figures(record, views)), "exit_code": record.exit_code,
            "checkpoint": _checkpoint(record), "reason": record.reason}


def _checkpoint(record: SessionRecord) -> dict[str, Any] | None:
    """The newest checkpoint that counts; members' checkpoints of one consistent cut have the same ``cut``."""
    found = record.checkpoint
    return None if found is None else {"image": found.name, "position": found.position, "created": found.created,
                                       "cut": found.cut or None, "put_off": found.put_off}


def waiting_rows(requests: Sequence[QueueRecord], lines: Mapping[str, Mapping[str, Any]],
                 now: float) -> list[dict[str, Any]]:
    """Gangs that wait for their places, or for their other runs. ``lines``: the leader's view of the queue."""
    gangs: defaultdict[str, list[QueueRecord]] = defaultdict(list)
    for record in requests:
        if record.gang is not None:
            gangs[record.gang.name].append(record)
    return [_waiting(name, sorted(found, key=lambda one: (one.arrived, one.name)), lines, now)
            for name, found in sorted(gangs.items())]


def _waiting(name: str, found: Sequence[QueueRecord], lines: Mapping[str, Mapping[str, Any]],
             now: float) -> dict[str, Any]:
    asks = [one.gang for one in found if one.gang is not None]
    runs, first = [], 0
    for one, ask in zip(found, asks, strict=True):
        runs.append({"run": one.name, "client": one.program.host, "pid": one.program.pid, "first": first,
                     "ranks": ask.ranks})
        first += ask.ranks
    line = lines.get(found[0].name, {})
    reason = str(line.get("reason") or found[0].reason)
    return {"gang": name, "user": found[0].user or None, "state": "queued", "generation": 0, "ranks": asks[0].of,
            "spread": asks[0].spread, "hosts": [], "runs": runs, "members": [], "waits": [],
            "created": found[0].arrived, "changed": found[0].arrived, "ended": None,
            "age_s": max(0.0, now - found[0].arrived), "position": line.get("position"), "reason": reason,
            "note": f"position {line['position']}: {reason}" if line.get("position") else reason}
