"""``rgpu ps``: the sessions of the pool."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import connect


@click.command("ps")
@click.option("-a", "--all", "everything", is_flag=True, help="Also sessions that ended or failed.")
@common.pool_option
@common.output_option
@common.verb
def command(everything: bool, pool: str | None, output: str) -> None:
    """List sessions (where they run, what they hold, how often they wait) and requests that wait for a place."""
    with connect(common.settings(pool=pool)) as client:
        found = client.call("session.list", {"all": everything})
    sessions = found["sessions"] + found.get("queue", [])
    common.emit(sessions, output, _show)


def _show(sessions: list[dict[str, Any]]) -> None:
    common.table(
        ("SESSION", "STATE", "HOST", "EPOCH", "MEMORY", "GPU", "CALLS", "AWAITED", "PID", "WORKER", "NOTE"),
        ((s["session"], s["state"], s.get("host"), s["epoch"] or "", common.size(s.get("memory_bytes")), _time(s),
          s.get("calls"), s.get("awaited_calls"), s.get("pid"), s.get("worker_pid"), s.get("note") or "")
         for s in sessions))


def _time(session: dict[str, Any]) -> str:
    """Its share of the device's time in the last seconds, and what it is held to."""
    recent, limit = session.get("gpu_share"), session.get("compute_limit")
    if recent is None:
        return ""
    return f"{recent:.0%}" + (f" of {limit:.0%}" if limit else "")
