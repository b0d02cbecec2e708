"""``rgpu cordon HOST``: no new sessions on a host."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect


def set_state(pool: str | None, host: str, state: str, reason: str) -> dict[str, Any]:
    """Set the state of a host, with the operator's key."""
    with connect(common.settings(pool=pool), role="operator") as client:
        return dict(client.call("node.cordon", {"host": host, "state": state, "reason": reason}, timeout=30))


def show(result: dict[str, Any]) -> None:
    """Print the state of a host after a change."""
    why = f" ({result['reason']})" if result["reason"] else ""
    common.out.print(f"{result['host']} is {result['state']}{why}", markup=False)


@click.command("cordon")
@click.argument("host", shell_complete=completing.hosts)
@click.option("--reason", default="", help="Why; shown wherever the host is refused.")
@common.pool_option
@common.output_option
@common.verb
def command(host: str, reason: str, pool: str | None, output: str) -> None:
    """Place no new session on HOST; its present sessions stay.

    The pool records this until `rgpu uncordon HOST`, also when the host's daemon
    is restarted.
    """
    common.emit(set_state(pool, host, "cordoned", reason), output, show)
