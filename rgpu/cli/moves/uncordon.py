"""``rgpu uncordon HOST``: a host takes sessions again."""

from __future__ import annotations

import click

from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.moves.cordon import set_state, show


@click.command("uncordon")
@click.argument("host", shell_complete=completing.hosts)
@click.option("--reason", default="", help="Why; kept in the history.")
@common.pool_option
@common.output_option
@common.verb
def command(host: str, reason: str, pool: str | None, output: str) -> None:
    """Let HOST take sessions again; a drain in progress is cancelled."""
    common.emit(set_state(pool, host, "ready", reason), output, show)
