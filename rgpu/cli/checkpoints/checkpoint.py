"""``rgpu checkpoint S``: write a checkpoint of a session."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common
from rgpu.cli.pool import connect


@click.command("checkpoint")
@click.argument("session")
@click.option("--wait/--no-wait", default=True, show_default=True,
              help="Return when the checkpoint is published, or at once.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, wait: bool, operator: bool, pool: str | None, output: str) -> None:
    """Write a checkpoint of SESSION to the pool's store; it is published when the registry names it."""
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        result = verbs.checkpoint(client, session, wait=wait)
    common.emit(result, output, _show)


def _show(result: dict[str, Any]) -> None:
    if "image" not in result:
        common.out.print(f"a checkpoint of {result['session']} is being taken", markup=False)
        return
    common.out.print(f"checkpoint {result['image']}: position {result['position']}, {result['pages']} pages, "
                     f"{common.size(result['bytes'])} written", markup=False)
    if "pause_ms" in result:
        common.out.print(f"the session was paused for {result['pause_ms']:.1f} ms; {common.size(result['cut_bytes'])} "
                         f"were set aside on the device, {common.size(result['paused_bytes'])} read meanwhile; "
                         f"{result['total_ms'] / 1000:.2f} s in all", markup=False)
