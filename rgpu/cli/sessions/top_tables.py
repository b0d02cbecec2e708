"""The content of ``rgpu top``, a headline and tables of text: made from the pool's answers, without a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rgpu.cli import common

Rows = list[tuple[str, ...]]

NODE_COLUMNS = ("HOST", "STATE", "", "DEVICE", "PROMISED", "MEMORY", "USED", "BUSY", "SESSIONS", "NOTE")
SESSION_COLUMNS = ("SESSION", "STATE", "HOST", "EPOCH", "MEMORY", "CALLS", "COMMAND", "NOTE")
QUEUE_COLUMNS = ("", "WAITS", "KIND", "PRIORITY", "WANTS", "SINCE", "REASON")
MOVE_COLUMNS = ("SESSION", "FROM", "TO", "STATE", "ROUND", "PAGES", "SENT", "PROGRESS")


@dataclass
class Picture:
    """The pool's answers at one moment."""

    status: dict[str, Any] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the picture as ``-o json`` prints it."""
        return {"status": self.status, "nodes": self.nodes, "sessions": self.sessions}


def headline(picture: Picture) -> str:
    """Return the line above the tables."""
    status = picture.status
    sessions = ", ".join(f"{count} {state}" for state, count in sorted(status.get("sessions", {}).items())
                         if state != "ended") or "no sessions"
    automation = f"  AUTOMATION PAUSED ({status['paused_reason']})" if status.get("paused") else ""
    doing = f"  {status['rebalancing']}" if status.get("rebalancing") else ""
    lost = sum(1 for node in picture.nodes if node.get("lost_since"))
    nodes = f"{len(picture.nodes) - lost} nodes" + (f" ({lost} lost)" if lost else "")
    return (f"{nodes}, {sessions}; coordinator: {status.get('leader') or 'none'}"
            f"{automation}{doing}")


def node_rows(picture: Picture) -> Rows:
    """Return a row for each device; a node without devices has one, too."""
    rows: Rows = []
    for node in picture.nodes:
        silent = not node.get("answers", True) and not node.get("lost_since")
        who = (node["host"], "silent" if silent else node["state"], "*" if node["leader"] else "")
        lost = f"since {common.moment(node['lost_since'])}" if node.get("lost_since") else ""
        for device in node["devices"] or [{}]:
            total, free = device.get("total_memory") or 0, device.get("free_memory") or 0
            busy = device.get("utilization")
            rows.append((*who, str(device.get("device") or "none"), bar(total - free, total), common.size(total),
                         common.size(device.get("memory_used")), "" if busy is None else f"{busy:.0%}",
                         str(device.get("sessions") or 0), lost or str(node.get("reason") or "")))
    return rows


def session_rows(picture: Picture) -> Rows:
    """Return the rows of the sessions' table."""
    return [(s["session"], s["state"], str(s.get("host") or ""), str(s["epoch"]), common.size(s.get("memory_bytes")),
             str(s["calls"] if s.get("calls") is not None else ""), str(s.get("command") or "")[:60],
             str(s.get("note") or "")) for s in picture.sessions]


def move_rows(picture: Picture) -> Rows:
    """Return the rows of the moves in progress, with the share of their pages that was sent."""
    owners = {s["session"]: s.get("host") for s in picture.sessions}
    rows: Rows = []
    for name, move in sorted(picture.status.get("moves", {}).items()):
        total = int(move.get("pages_total") or 0)
        left = int(move.get("pages_left") or max(0, total - int(move.get("pages_sent") or 0)))
        rows.append((name, str(move.get("from") or owners.get(name) or ""), str(move.get("to") or ""),
                     str(move.get("phase") or move.get("state") or ""), str(move.get("round") or ""),
                     str(move.get("pages_sent") or 0), common.size(move.get("bytes_sent") or 0),
                     bar(total - left, total) if total else ""))
    return rows


def queue_rows(picture: Picture) -> Rows:
    """Return the rows of the requests that wait for a place, in the order in which they are served."""
    return [(str(one["position"] or ""), str(one["name"]), str(one["kind"]), str(one["priority"]),
             common.size(one.get("memory_bytes")) + (f", {one['compute']} %" if one.get("compute") else ""),
             f"{one.get('waited_s') or 0:.0f} s", str(one.get("reason") or ""))
            for one in picture.status.get("queue", [])]


def bar(part: float, whole: float, width: int = 10) -> str:
    """Return a text bar: ``####......  40%``."""
    share = min(1.0, max(0.0, part / whole)) if whole else 0.0
    full = round(share * width)
    return f"{'#' * full}{'.' * (width - full)} {share:4.0%}"
