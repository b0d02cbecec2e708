"""``rgpu leave HOST``: take a host out of the pool for good."""

from __future__ import annotations

import shutil
import time
from typing import Any

import click

from rgpu.api.settings import parse_seconds
from rgpu.cli import asking, common
from rgpu.cli.helpers import completing
from rgpu.cli.moves.drain import wait_empty
from rgpu.cli.pool import connect, pool_files
from rgpu.link.control.control_client import ControlClient
from rgpu.link.description import drop_endpoint
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.session.errors import NotFound, PoolUnavailable, TimedOut

STOP_SECONDS = 30.0


@click.command("leave")
@click.argument("host", shell_complete=completing.hosts)
@click.option("--timeout", metavar="TIME", help="Give up when HOST is not empty by then; the drain continues.")
@asking.yes_option
@common.pool_option
@common.output_option
@common.verb
def command(host: str, timeout: str | None, yes: bool, pool: str | None, output: str) -> None:
    """Drain HOST, stop its daemon, and forget its key: to join again it needs an invitation.

    A person at a terminal is asked first.
    """
    settings = common.settings(pool=pool)
    with connect(settings, role="operator") as client:
        asking.confirm(yes, lambda: _what_goes(client, host))
        if host in _hosts(client):
            client.call("node.cordon", {"host": host, "state": "draining", "reason": "it leaves the pool"}, timeout=30)
            wait_empty(client, host, parse_seconds(timeout) if timeout else None, lambda status: None)
            _stop(client, host, KeyPair.load(pool_files(settings).key_path("operator")))
        client.call("node.remove", {"host": host}, timeout=30)
    _forget_files(pool_files(settings), host)
    common.emit({"left": host}, output, lambda v: common.out.print(f"{host} has left the pool", markup=False))


def _what_goes(client: ControlClient, host: str) -> list[str]:
    sessions = [s["session"] for s in client.call("session.list", {})["sessions"] if s.get("host") == host]
    moved = f"its {len(sessions)} sessions ({', '.join(sessions[:10])}) are moved away, " if sessions else ""
    return [f"{host} leaves the pool: {moved}its daemon is stopped, and its key forgotten: to come back it needs an "
            "invitation"]


def _hosts(client: ControlClient) -> list[str]:
    return [row["host"] for row in client.call("node.list", {})["nodes"]]


def _stop(client: ControlClient, host: str, keys: KeyPair) -> None:
    """Stop the daemon of a host. Raises :class:`TimedOut` when it does not stop."""
    endpoints: list[dict[str, Any]] = client.call("pool.ping", {})["endpoints"]
    client.refresh([Endpoint(e["address"], e["public"], e["host"]) for e in endpoints if e["host"] != host])
    found = [Endpoint(e["address"], e["public"], host) for e in endpoints if e["host"] == host]
    if found:
        with ControlClient(keys, found) as there:
            try:
                there.call("pool.stop", {}, timeout=10)
            except PoolUnavailable:
                pass  # it ended before it answered, or it hangs: the following loop finds out
    deadline = time.monotonic() + STOP_SECONDS
    while True:
        try:
            if host not in _hosts(client):
                return
        except PoolUnavailable:
            pass  # the host that left may have been the leader
        if time.monotonic() > deadline:
            raise TimedOut(f"the daemon of {host} does not stop: stop it by hand, then call this again")
        time.sleep(0.2)


def _forget_files(files: PoolFiles, host: str) -> None:
    """Delete the host's part of the pool where it is in this folder: its key must not be recorded again."""
    drop_endpoint(files, host)
    try:
        files.authorized.remove(f"node-{host}"[:63])
    except NotFound:
        return
    shutil.rmtree(files.node_directory(host), ignore_errors=True)
