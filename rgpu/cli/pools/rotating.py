"""``rgpu keys rotate``: another secret for the pool, while its sessions run."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from rgpu.api.settings import parse_age
from rgpu.cli import common
from rgpu.cli.pool import connect
from rgpu.link.control.control_client import ControlClient
from rgpu.link.data.tickets import LIFETIME
from rgpu.session.errors import PoolUnavailable, UsageError

OVERLAP = "70m"  #: longer than a ticket's life, so that every agent has another one
SPREAD_SECONDS = 20.0  #: for which the verb waits for all nodes to have the new secret
LOOK_SECONDS = 0.5


@click.command("rotate")
@click.option("--overlap", default=OVERLAP, show_default=True, metavar="TIME", help="How long tickets made with the "
              "old secret are good once every node has the new one: 90s, 70m, 24h; 0s after a theft.")
@click.option("--finish", is_flag=True, help="Drop the old secret now, however much of the overlap is left.")
@click.option("--status", is_flag=True, help="Print the state of a rotation, and when the old secret is dropped.")
@common.pool_option
@common.output_option
@common.verb
def command(overlap: str, finish: bool, status: bool, pool: str | None, output: str) -> None:
    """Give the pool a new secret; running sessions are not affected.

    Every node gets it from another node before a ticket is made with it; the old one is accepted beside it for
    --overlap, then dropped by itself. A node that was down gets the new one when it returns; a host that left,
    or whose key was revoked, does not. Checkpoints stay readable: their keys derive from the secret that the pool was
    made with, which is kept.
    """
    if finish and status:
        raise UsageError("--finish and --status are two things: name one")
    seconds = parse_age(overlap)
    with connect(common.settings(pool=pool), role="user" if status else "operator") as client:
        if status:
            found = client.call("keys.rotation", {})
        elif finish:
            found = client.call("keys.rotate", {"finish": True, "overlap": 0.0}, timeout=30)
        else:
            found = _until_spread(client, client.call("keys.rotate", {"overlap": seconds}, timeout=30))
    lacking = sorted(host for host, holds in found["hosts"].items() if not holds)
    common.emit(found, output, _show)
    if not status and not finish and seconds < LIFETIME and found["phase"] != "spreading":
        common.err.print(f"an agent whose ticket is older than {overlap} asks for another one when it attaches again",
                         markup=False)
    if not status and found["phase"] == "spreading":
        common.err.print(f"not yet on {', '.join(lacking)}: the old secret goes on until they have it, or have left",
                         markup=False)
        sys.exit(PoolUnavailable.exit_code)


def _until_spread(client: ControlClient, found: dict[str, Any]) -> dict[str, Any]:
    """Return the rotation once every node has the new secret, or after :data:`SPREAD_SECONDS`."""
    deadline = time.monotonic() + SPREAD_SECONDS
    while found["phase"] == "spreading" and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        found = client.call("keys.rotation", {})
    return found


def _show(found: dict[str, Any]) -> None:
    until = f" until {common.moment(found['until'])} ({common.age(max(0.0, found['until'] - time.time()))} more)" \
        if found["until"] is not None else ""
    common.out.print(found["reason"] + until, markup=False)
