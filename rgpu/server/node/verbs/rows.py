"""The lines of `rgpu ps`, made of a session's record and its worker's report."""

from __future__ import annotations

import time
from typing import Any

from rgpu.migrate.leader.silence import AGENT_GRACE, grace_of
from rgpu.migrate.records.schema import QueueRecord, SessionRecord
from rgpu.server.node.gangs.waits import read_figures, who_waits
from rgpu.session.calls.wire import BY_NAME

WAITS = 8  #: wire calls whose waits are shown


def waiting_row(record: QueueRecord, lines: dict[str, dict[str, Any]], user: str = "") -> dict[str, Any]:
    """The line of ``rgpu ps`` of a waiting request of ``user``; ``lines``: the leader's view of the queue, by name."""
    line = lines.get(record.name, {})
    return {"session": record.name, "user": user or None, "state": "queued", "host": None, "epoch": 0,
            "memory_bytes": None, "calls": None,
            "awaited_calls": None, "pid": record.program.pid, "worker_pid": None, "command": record.program.command,
            "position": line.get("position"), "priority": record.wants.priority, "quota": record.quota,
            "reason": str(line.get("reason") or record.reason), "note": _in_line(line) or record.reason,
            "gang": record.gang.name if record.gang else None, "rank": None,
            "labels": record.wants.labels, "created": record.arrived, "age_s": max(0.0, time.time() - record.arrived)}


def _in_line(line: dict[str, Any] | None) -> str:
    """The place in the queue, in words."""
    return f"position {line['position']}: {line['reason']}" if line and line.get("position") else ""


def _silence(record: SessionRecord, view: dict[str, Any], grace: float) -> tuple[float, float, str]:
    """Times at which the client's host fell silent and the session will be ended (0: neither), and both in words."""
    since, allowed = record.silent_since, grace_of(record, grace)
    if not since or record.state != "running" or view.get("attached") and not view.get("silent_s"):
        return 0.0, 0.0, ""
    begun, over = (time.strftime("%H:%M:%S", time.localtime(when)) for when in (since, since + allowed))
    return since, since + allowed, (f"its client host is silent since {begun} ({time.time() - since:.0f} s): "
                                    f"checkpointed and ended at {over} if it does not come back")


def row(record: SessionRecord, view: dict[str, Any], line: dict[str, Any] | None = None,
         grace: float = AGENT_GRACE, user: str = "") -> dict[str, Any]:
    """One line of ``rgpu ps``, of a session of ``user``; ``line``: the place of a parked session in the queue."""
    stats, words, gpu = dict(view.get("stats") or {}), view.get("last_words") or {}, view.get("gpu") or {}
    if record.state == "ended" and _asked_pid(words) == record.program.pid:  # not of an earlier session of that name
        stats.update(words)
    catch_up = dict(view.get("catch_up") or {})
    since, ends, silent = _silence(record, view, grace)
    notes = [record.reason if record.state not in ("running",) else "", _in_line(line), silent,
             str(stats.get("blocked_reason") or ""),
             f"diverged: {stats['divergence']}" if stats.get("divergence") else "",
             str(view.get("error_detail") or ""), _pinned(view.get("pins")), _waiting(stats.get("managed_waiting")),
             *who_waits(read_figures(view.get("communicators"))),
             _catching_up(catch_up, view.get("position"), stats.get("calls"))]
    return {"session": record.name, "user": user or None, "state": record.state, "host": record.owner,
            "epoch": record.epoch,
            "memory_bytes": view.get("memory_bytes"), "calls": stats.get("calls", view.get("position")),
            "applied": view.get("position"), "awaited_calls": stats.get("awaited_calls"),
            "exchanged_calls": stats.get("exchanged_calls"),
            "bytes": stats.get("bytes"), "pid": _pid(stats, record),
            "worker_pid": view.get("worker_pid"), "command": record.program.command, "attached": view.get("attached"),
            "module_bytes": stats.get("module_bytes"), "module_bytes_saved": stats.get("module_bytes_saved"),
            "modules": view.get("modules"), "journal_bytes": stats.get("journal_bytes"), "reason": record.reason,
            "shared_bytes_to_device": stats.get("shared_bytes_to_device"),
            "shared_bytes_from_device": stats.get("shared_bytes_from_device"),
            "managed_faults": stats.get("managed_faults"), "managed_waiting": stats.get("managed_waiting"),
            "waits": _waits(stats.get("waits")), "same_host": str(stats.get("same_host") or "")[:300],
            "divergences": stats.get("divergences", 0), "exposure": stats.get("exposure"),
            "unsupported_calls": _names(stats.get("unsupported_calls")), "compute": record.wants.compute or None,
            "gpu_seconds": gpu.get("busy_s"), "gpu_share": gpu.get("recent"), "compute_limit": gpu.get("limit"),
            "held_seconds": gpu.get("held_s"), "catch_up": catch_up.get("state"),
            "catch_ups": catch_up.get("catch_ups"), "catch_up_stalls": catch_up.get("stalls"),
            "collectives": view.get("communicators") or [], "rank_links": view.get("ranks"),
            "priority": record.wants.priority, "position": line.get("position") if line else None,
            "box": _names(view.get("box")), "mps": bool(view.get("mps")),
            "silent_since": since or None, "ends_at": ends or None,
            "gang": record.gang or None, "rank": record.rank if record.gang else None,
            "labels": record.wants.labels, "created": record.created, **_end(record),
            "note": "; ".join(note for note in notes if note), "age_s": max(0.0, time.time() - record.created)}


def _catching_up(catch_up: dict[str, Any], applied: Any, calls: Any) -> str:
    """Note on a backlog, with how much of it is applied: a long replay shows that it gets on."""
    if catch_up.get("state") not in ("ordered", "overlapping"):
        return ""
    far = f", {applied:,} of {calls:,} calls" if isinstance(applied, int) and isinstance(calls, int) else ""
    return f"catching up ({catch_up['state']}{far}): {catch_up.get('reason')}"


def _waiting(touches: Any) -> str:
    """Note on threads that wait for managed memory; a touch is short, except while the session is paused or lost."""
    return f"{touches} of its threads wait for managed memory" if isinstance(touches, int) and touches > 0 else ""


def _end(record: SessionRecord) -> dict[str, Any]:
    """Time of the end, s; duration, s; the program's exit code. Each None where not ended, or not known."""
    over = record.state in ("ended", "failed")
    ended = (record.ended or record.changed) if over else None
    return {"ended": ended, "lasted_s": None if ended is None else max(0.0, ended - record.created),
            "exit_code": record.exit_code if over else None}


def _asked_pid(stats: dict[str, Any]) -> Any:
    """Pid of the process that requested the session, from its agent's figures; earlier agents report one pid only."""
    return stats.get("asked_pid") or stats.get("pid")


def _pid(stats: dict[str, Any], record: SessionRecord) -> int:
    """Pid of the process that uses the session; until one does, of the process that requested it."""
    pid = stats.get("pid")
    return pid if isinstance(pid, int) and _asked_pid(stats) == record.program.pid else record.program.pid


def _pinned(pins: Any) -> str:
    """Note on why a session cannot move; empty where it can."""
    return f"cannot move: {'; '.join(_names(pins))}" if pins else ""


def _names(value: Any) -> list[str]:
    """Names from an agent or worker, which are untrusted: only texts are kept."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _waits(value: Any) -> dict[str, dict[str, Any]]:
    """Wire calls that were awaited longest, by name, from an untrusted agent: {count, seconds} of each."""
    found: dict[str, dict[str, Any]] = {}
    for name, row in list(value.items())[:WAITS] if isinstance(value, dict) else ():
        match row:
            case [int(count), int() | float() as seconds] if name in BY_NAME:
                found[name] = {"count": count, "seconds": float(seconds)}
    return found


def plain(record: Any) -> dict[str, Any] | None:
    """A record's fields by name; None for none."""
    return None if record is None else {name: getattr(record, name) for name in record.__struct_fields__}
