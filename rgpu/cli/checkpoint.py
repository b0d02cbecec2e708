"""``rgpu checkpoint S``: write an image of a session."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import connect


@click.command("checkpoint")
@click.argument("session")
@common.pool_option
@common.output_option
@common.verb
def command(session: str, pool: str | None, output: str) -> None:
    """Write an image of SESSION to the pool's store; it counts once the registry names it."""
    with connect(common.settings(pool=pool)) as client:
        result = client.call("session.checkpoint", {"session": session}, timeout=600)
    common.emit(result, output, _show)


def _show(result: dict[str, Any]) -> None:
    common.out.print(f"image {result['image']}: position {result['position']}, {result['pages']} pages, "
                     f"{common.size(result['bytes'])}", markup=False)
