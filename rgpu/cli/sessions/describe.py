"""``rgpu describe S``: everything that the pool records about one session or gang."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect
from rgpu.cli.sessions import gangs


@click.command("describe")
@click.argument("session", shell_complete=completing.sessions)
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, operator: bool, pool: str | None, output: str) -> None:
    """Show one session: its record, its worker, its checkpoint, what pins it.

    Or a gang of that name: its ranks, where they are, the last collective of each, which rank waits for which.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        value = verbs.describe_any(client, session)
    common.emit(value, output, gangs.show if "members" in value else _show)


def _show(value: dict[str, Any], indent: str = "") -> None:
    for key, item in value.items():
        if isinstance(item, dict):
            common.out.print(f"{indent}{key}:")
            _show(item, indent + "  ")
        elif item not in (None, "", []):
            common.out.print(f"{indent}{key}: {item}", markup=False)
