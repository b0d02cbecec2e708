"""``rgpu events``: decisions as they happen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common, tables
from rgpu.cli.pool import connect
from rgpu.cli.sessions.history import about
from rgpu.session.printable import printable


@click.command("events")
@click.option("-f", "--follow", is_flag=True, help="Continue with new events.")
@click.option("-n", "--last", default=20, show_default=True, type=click.IntRange(0, 2000),
              help="Number of past events to begin with.")
@click.option("--kind", type=click.Choice(["node", "session", "move", "gang", "pool"]), help="Only this kind of event.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(follow: bool, last: int, kind: str | None, operator: bool, pool: str | None, output: str) -> None:
    """Print what happens to nodes, sessions and moves, from any node that answers.

    With -o json each event is one line. After a broken connection another node is
    asked for the events since then: none is missed or repeated.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        past, since = verbs.past(client, last)
        _print(past, kind, output)
        if follow:
            _print(verbs.follow(client, since), kind, output)


def _print(events: Iterable[dict[str, Any]], kind: str | None, output: str) -> None:
    for event in events:
        if kind in (None, event["kind"]):
            by = f" (by {event['actor']})" if event.get("actor") else ""
            line = f"{common.moment(event['when'])}  {about(event):20}  {event['decision']:12}  {event['reason']}{by}"
            print(json.dumps(event) if output == "json" else f"---\n{tables.as_yaml(event)}".rstrip()
                  if output == "yaml" else printable(line), flush=True)
