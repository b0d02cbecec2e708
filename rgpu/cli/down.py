"""``rgpu down``: stop the daemons of the local pool."""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import connect, daemon_state, pool_files
from rgpu.cli.settings import Settings
from rgpu.session.errors import NotFound, RgpuError, TimedOut


@click.command("down")
@click.option("--purge", is_flag=True, help="Also delete the pool's directory: keys, registry, images.")
@common.pool_option
@common.output_option
@common.verb
def command(purge: bool, pool: str | None, output: str) -> None:
    """Stop every node daemon of the pool on this host; its sessions end."""
    files = pool_files(common.settings(pool=pool))
    if not files.description_path.exists():
        raise NotFound(f"there is no pool in {files.root}; `rgpu up` makes one")
    settings = common.settings(pool=pool)
    _end_sessions(settings)
    stopped = []
    states = [daemon_state(files, path.name) for path in sorted((files.root / "nodes").glob("*"))]
    for state in states:
        if state["running"]:
            os.kill(state["pid"], signal.SIGTERM)
            stopped.append(state["host"])
    deadline = time.monotonic() + 20
    for host in stopped:
        while daemon_state(files, host)["running"]:
            if time.monotonic() > deadline:
                raise TimedOut(f"the daemon of {host} does not stop; its log is in {files.root}/nodes/{host}")
            time.sleep(0.05)
    if purge:
        shutil.rmtree(files.root)
    common.emit({"stopped": stopped, "purged": purge}, output, _show)


def _end_sessions(settings: Settings) -> None:
    """End what runs, so that no later start finds it half there; a pool that does not answer has nothing to end."""
    try:
        with connect(settings) as client:
            for row in client.call("session.list", {}, timeout=5)["sessions"]:
                client.call("session.kill", {"session": row["session"], "reason": "the pool was stopped"}, timeout=10)
    except RgpuError as error:
        common.err.print(f"sessions could not be ended first: {error.message}", markup=False)


def _show(value: dict[str, Any]) -> None:
    common.out.print(f"stopped {', '.join(value['stopped'])}" if value["stopped"] else "nothing was running")
