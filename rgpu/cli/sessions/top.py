"""``rgpu top``: the pool, live in the terminal."""

from __future__ import annotations

import click

from rgpu.api.verbs import hosts
from rgpu.cli import common
from rgpu.cli.pool import connect
from rgpu.cli.sessions.top_tables import (
    MOVE_COLUMNS,
    NODE_COLUMNS,
    QUEUE_COLUMNS,
    SESSION_COLUMNS,
    Picture,
    headline,
    move_rows,
    node_rows,
    queue_rows,
    session_rows,
)
from rgpu.link.control.control_client import ControlClient


def look(client: ControlClient, all_users: bool = False) -> Picture:
    """Return the pool's current state. Raises what the calls raise."""
    return Picture(client.call("pool.status", {}, timeout=5), hosts(client, timeout=5),
                   client.call("session.list", {"all_users": all_users}, timeout=5)["sessions"])


@click.command("top")
@click.option("--interval", default=1.0, show_default=True, type=click.FloatRange(0.2, 60.0), help="Seconds.")
@click.option("--all-users", is_flag=True, help="All users' sessions, with the operator's key (default: your own).")
@common.pool_option
@common.output_option
@common.verb
def command(interval: float, all_users: bool, pool: str | None, output: str) -> None:
    """Show nodes, devices, sessions, and moves with their progress, live.

    q ends it, p pauses and resumes it, Tab selects the next table. Where there is no terminal, or
    with -o json, it prints the pool once.
    """
    with connect(common.settings(pool=pool), common.role(all_users)) as client:
        if output != "text" or not common.out.is_terminal:
            common.emit(look(client, all_users).as_dict(), output, lambda value: _print(Picture(**value)))
            return
        from rgpu.cli.sessions.top_app import TopApp  # Textual takes a moment to load: only for the screen

        TopApp(lambda: look(client, all_users), interval).run()


def _print(picture: Picture) -> None:
    common.out.print(headline(picture), markup=False)
    for columns, rows, drop in (
            (NODE_COLUMNS, node_rows(picture), ("SESSIONS", "PROMISED", "BUSY", "MEMORY")),
            (SESSION_COLUMNS, session_rows(picture), ("CALLS", "EPOCH", "COMMAND", "MEMORY")),
            (QUEUE_COLUMNS, queue_rows(picture), ("PRIORITY", "KIND", "SINCE", "WANTS")),
            (MOVE_COLUMNS, move_rows(picture), ("PAGES", "ROUND", "SENT", "PROGRESS"))):
        if rows:
            common.table(columns, rows, drop=drop, cut=("NOTE", "REASON", "COMMAND"))
