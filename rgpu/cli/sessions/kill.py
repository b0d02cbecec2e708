"""``rgpu kill S``: end a session and its program's GPU side."""

from __future__ import annotations

import click

from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect


@click.command("kill")
@click.argument("session", shell_complete=completing.sessions)
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, operator: bool, pool: str | None, output: str) -> None:
    """End SESSION: its memory returns to the pool, its program's next call fails."""
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        value = client.call("session.kill", {"session": session})
    common.emit(value, output, lambda v: common.out.print(f"{session} ended"))
