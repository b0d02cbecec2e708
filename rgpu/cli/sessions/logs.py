"""``rgpu logs S``: what a session's worker wrote."""

from __future__ import annotations

import click

from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect
from rgpu.session.printable import printable


@click.command("logs")
@click.argument("session", shell_complete=completing.sessions)
@click.option("-n", "--lines", default=100, show_default=True, help="How many of the newest lines.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, lines: int, operator: bool, pool: str | None, output: str) -> None:
    """Print the newest lines of the log of SESSION's worker."""
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        value = client.call("session.logs", {"session": session, "lines": lines})
    common.emit(value, output, lambda v: print("\n".join(printable(line, keep="\t") for line in v["lines"])))
