"""``rgpu restore CHECKPOINT``: restore a session from one of its checkpoints."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common
from rgpu.cli.pool import connect


@click.command("restore")
@click.argument("checkpoint")
@click.option("--host", help="Host to restore to (default: the coordinator chooses).")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(checkpoint: str, host: str | None, operator: bool, pool: str | None, output: str) -> None:
    """Restore a session from CHECKPOINT and its live program's journal.

    The agent must still hold the journal from the checkpoint's position on: a live
    program cannot be rolled back. It is refused if that part was cut.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        result = verbs.restore(client, checkpoint, host)
    common.emit(result, output, _show)


def _show(result: dict[str, Any]) -> None:
    common.out.print(f"{result['session']} restored on {result['host']} at epoch {result['epoch']} "
                     f"from position {result['position']}", markup=False)
