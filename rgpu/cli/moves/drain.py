"""``rgpu drain HOST``: move every session away from a host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from rgpu.api.settings import parse_seconds
from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect
from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import PoolUnavailable, Refused, TimedOut

LOOK_SECONDS = 0.5
SILENCE_SECONDS = 60.0  #: without an answer of any leader, after which this command gives up


@click.command("drain")
@click.argument("host", shell_complete=completing.hosts)
@click.option("--reason", default="", help="Why; shown wherever the host is refused.")
@click.option("--no-wait", is_flag=True, help="Return at once; the pool continues the drain.")
@click.option("--timeout", metavar="TIME", help="Stop waiting after this time; the drain continues.")
@common.pool_option
@common.output_option
@common.verb
def command(host: str, reason: str, no_wait: bool, timeout: str | None, pool: str | None, output: str) -> None:
    """Move every session of HOST elsewhere, and place no new one there.

    The pool does it, not this command: the drain continues if it is interrupted;
    call it again to watch; `rgpu uncordon HOST` cancels it. At the end HOST is cordoned.
    A session that cannot be moved is named with the reason and tried again.
    """
    limit = parse_seconds(timeout) if timeout else None
    with connect(common.settings(pool=pool), role="operator") as client:
        # A host that was drained already is not drained again: its status reports that it is empty.
        status = client.call("node.drain_status", {"host": host}, timeout=30)
        if status["state"] != "draining" and not (status["drained"] and status["state"] == "cordoned"):
            client.call("node.cordon", {"host": host, "state": "draining", "reason": reason}, timeout=30)
        if no_wait:
            status = client.call("node.drain_status", {"host": host}, timeout=30)
        else:
            status = wait_empty(client, host, limit, _teller(output))
    common.emit(status, output, _show)


def wait_empty(client: ControlClient, host: str, limit: float | None,
               tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Wait until the host is empty and return its status.

    Raises :class:`TimedOut` (which sessions are left and why), :class:`Refused` when the drain was cancelled,
    :class:`PoolUnavailable` when no node answered for a minute.
    """
    began = heard = time.monotonic()
    while True:
        try:
            status = client.call("node.drain_status", {"host": host}, timeout=10)
            heard = time.monotonic()
        except PoolUnavailable:  # the leader may have ended; the next one continues
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise
            time.sleep(LOOK_SECONDS)
            continue
        tell(status)
        if status["drained"] and status["state"] == "cordoned":
            return dict(status)
        if status["state"] == "ready":
            raise Refused(f"the drain of {host} was called off: {status['reason'] or 'uncordoned'}", **status)
        if limit is not None and time.monotonic() - began > limit:
            left = "; ".join(_line(row) for row in status["sessions"])
            raise TimedOut(f"{host} is not empty after {limit:g} s: {left}", **status)
        time.sleep(LOOK_SECONDS)


def _teller(output: str) -> Callable[[dict[str, Any]], None]:
    """A function that prints changes on stderr, so that stdout contains the result alone."""
    said: dict[str, str] = {}

    def tell(status: dict[str, Any]) -> None:
        rows = {row["session"]: _line(row) for row in status["sessions"]}
        for name, line in rows.items():
            if said.get(name) != line:
                common.err.print(f"  {line}", markup=False)
        for name in set(said) - set(rows):
            common.err.print(f"  {name}: moved away", markup=False)
        said.clear()
        said.update(rows)

    return tell if output == "text" else lambda status: None


def _line(row: dict[str, Any]) -> str:
    """``NAME: what it does, or what keeps it``."""
    move = row["move"]
    if row["blocked"]:  # also while the next try is being checked
        return f"{row['session']}: blocked: {row['blocked']}"
    if move:
        phase = move.get("phase") or move.get("state")
        return f"{row['session']}: moves to {row['to'] or 'another host'} ({phase}, round {move.get('round', 0)})"
    return f"{row['session']}: {row['waits'] or 'waits its turn'}"


def _show(status: dict[str, Any]) -> None:
    if status["drained"]:
        common.out.print(f"{status['host']} is empty and {status['state']}", markup=False)
    else:
        common.out.print(f"{status['host']} is {status['state']}, {len(status['sessions'])} sessions are left",
                         markup=False)
