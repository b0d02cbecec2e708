"""``rgpu events``: decisions as they happen."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from rgpu.cli import common, tables
from rgpu.cli.pool import connect
from rgpu.cli.sessions.history import about
from rgpu.session.errors import PoolUnavailable
from rgpu.session.printable import printable

WAIT_SECONDS = 10.0
SILENCE_SECONDS = 60.0


@click.command("events")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("-n", "--last", default=20, show_default=True, type=click.IntRange(0, 2000),
              help="How many of the past to begin with.")
@click.option("--kind", type=click.Choice(["node", "session", "move", "pool"]), help="Only these.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(follow: bool, last: int, kind: str | None, operator: bool, pool: str | None, output: str) -> None:
    """Print what happens to nodes, sessions and moves, from whichever node answers.

    With -o json each event is one line. After a broken connection another node is
    asked for what came since: nothing is missed or told twice.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        found = client.call("pool.history", {"limit": last})
        _print(found["events"], kind, output)
        since, heard = found["revision"], time.monotonic()
        while follow:
            try:
                found = client.call("pool.events", {"since": since, "wait": WAIT_SECONDS}, timeout=WAIT_SECONDS + 10)
            except PoolUnavailable:
                if time.monotonic() - heard > SILENCE_SECONDS:
                    raise
                time.sleep(0.5)
                continue
            since, heard = found["revision"], time.monotonic()
            _print(found["events"], kind, output)


def _print(events: list[dict[str, Any]], kind: str | None, output: str) -> None:
    for event in events:
        if kind in (None, event["kind"]):
            by = f" (by {event['actor']})" if event.get("actor") else ""
            line = f"{common.moment(event['when'])}  {about(event):20}  {event['decision']:12}  {event['reason']}{by}"
            print(json.dumps(event) if output == "json" else f"---\n{tables.as_yaml(event)}".rstrip()
                  if output == "yaml" else printable(line), flush=True)
