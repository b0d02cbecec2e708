"""``rgpu history``: what was decided, and why."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect


@click.command("history")
@click.argument("session", required=False, shell_complete=completing.sessions)
@click.option("--host", metavar="HOST", shell_complete=completing.hosts, help="Only decisions about this host.")
@click.option("-n", "--limit", default=100, show_default=True, type=click.IntRange(1, 2000), help="How many, the last.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str | None, host: str | None, limit: int, operator: bool, pool: str | None, output: str) -> None:
    """Print decisions (about SESSION), oldest first, each with its reason.

    The registry keeps the last 2000; each is stored in the step in which it takes effect.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        found = client.call("pool.history", {"session": session, "host": host, "limit": limit})["events"]
    common.emit(found, output, show)


def show(events: list[dict[str, Any]]) -> None:
    """Print decisions as a table, one a line."""
    common.table(("WHEN", "ABOUT", "DECISION", "EPOCH", "OWNER", "BY", "REASON"), [
        (common.moment(e["when"]), about(e), e["decision"], e["epoch"], e["owner"], e.get("actor"), e["reason"])
        for e in events], drop=("BY", "EPOCH", "OWNER", "WHEN"), cut=("REASON",))


def about(event: dict[str, Any]) -> str:
    """Return the subject of a decision: ``NAME``, ``host HOST``, ``user NAME`` or ``pool``."""
    return event["session"] or (f"host {event['host']}" if event["host"] else
                                f"user {event['user']}" if event.get("user") else "pool")
