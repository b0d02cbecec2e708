"""``rgpu down``: stop the daemons of the local pool."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from typing import Any

import click

from rgpu.api.settings import Settings
from rgpu.cli import asking, common
from rgpu.cli.pool import connect, daemon_state, pool_files
from rgpu.cli.pools import strays
from rgpu.cli.pools.supervising import supervisor
from rgpu.link.keys import PoolFiles
from rgpu.link.local.channel import connect as channel_to_worker
from rgpu.session.errors import NotFound, Refused, RgpuError, TimedOut

STOP_SECONDS = 60.0  #: for a daemon to stop: it ends its workers and cleans up after them
ORPHAN_SECONDS = 2.0  #: for a worker without daemon to end on request
LEAVE_SECONDS = 2.0  #: for a stopped process to disappear from /proc


@click.command("down")
@click.option("--purge", is_flag=True, help="Also delete the pool's directory: keys, registry, checkpoints.")
@asking.yes_option
@common.local_pool_option
@common.output_option
@common.verb
def command(purge: bool, yes: bool, pool: str | None, output: str) -> None:
    """Stop every node daemon of the pool on this host; its sessions end.

    --purge prints what it will delete and asks; without a terminal it needs --yes.
    """
    files = pool_files(common.settings(pool=pool))
    if not files.description_path.exists():
        if left := strays.of_folder(files.root):
            raise Refused(f"there is no pool in {files.root}, but {strays.said(left, files.root)}")
        raise NotFound(f"there is no pool in {files.root}; `rgpu up` makes one")
    settings = common.settings(pool=pool)
    if purge:
        asking.confirm(yes, lambda: _what_is_deleted(files), always=True)
    _end_sessions(settings)
    stopped = []
    states = [daemon_state(files, path.name) for path in sorted((files.root / "nodes").glob("*"))]
    if watcher := supervisor(files):
        with contextlib.suppress(ProcessLookupError):
            os.kill(watcher, signal.SIGTERM)
    for state in states:
        if state["running"]:
            os.kill(state["pid"], signal.SIGTERM)
            stopped.append(state["host"])
    deadline = time.monotonic() + STOP_SECONDS
    for host in stopped:
        while daemon_state(files, host)["running"]:
            if time.monotonic() > deadline:
                raise TimedOut(f"the daemon of {host} does not stop; its log is in {files.root}/nodes/{host}")
            time.sleep(0.05)
    while supervisor(files) and time.monotonic() < deadline:
        time.sleep(0.05)
    _end_orphans(files)
    _check_nothing_left(files)
    if purge:
        shutil.rmtree(files.root)
    common.emit({"stopped": stopped, "purged": purge}, output, _show)


def _what_is_deleted(files: PoolFiles) -> list[str]:
    """The contents of the pool's folder that cannot be made again."""
    keys = len(list((files.root / "keys").glob("*.key")))
    manifests = sum(1 for _ in (files.root / "images").rglob("*.manifest")) if (files.root / "images").exists() else 0
    size = sum(path.stat().st_size for path in files.root.rglob("*") if path.is_file() and not path.is_symlink())
    return [f"every daemon of the pool in {files.root} is stopped, its sessions end, and the folder is deleted: {keys} "
            f"key pairs, the registry and its history, {manifests} checkpoints, {common.size(size)} in all"]


def _end_sessions(settings: Settings) -> None:
    """End the running sessions, so that no later start finds parts of them; none if the pool does not answer."""
    try:
        with connect(settings, role="operator") as client:
            for row in client.call("session.list", {"all_users": True}, timeout=5)["sessions"]:
                client.call("session.kill", {"session": row["session"], "reason": "the pool was stopped"}, timeout=10)
    except RgpuError as error:
        common.err.print(f"sessions could not be ended first: {error.message}", markup=False)


def _end_orphans(files: PoolFiles) -> None:
    """End workers whose daemon was killed: they wait for another daemon to take them over, and none will."""
    nodes = files.root / "nodes"
    for path in [*nodes.glob("*/homes/*/*.sock"), *nodes.glob("*/workers/*/*.sock")]:
        try:
            channel = channel_to_worker(path, 0.0)
        except TimedOut:
            continue  # a socket without a listener
        pid = channel.peer()[0]
        with contextlib.suppress(RgpuError, ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                channel.send({"id": 1, "do": "forget", "reason": "the pool was stopped"})
                if not select.select([process], [], [], ORPHAN_SECONDS)[0]:
                    signal.pidfd_send_signal(process, signal.SIGKILL)  # suspended, or blocked in a call
            finally:
                os.close(process)
        channel.close()


def _check_nothing_left(files: PoolFiles) -> None:
    """Raise :class:`Refused` where daemons run that no file of the pool records."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while left := strays.of_folder(files.root):
        if time.monotonic() > deadline:
            raise Refused(strays.said(left, files.root))
        time.sleep(0.05)


def _show(value: dict[str, Any]) -> None:
    common.out.print(f"stopped {', '.join(value['stopped'])}" if value["stopped"] else "nothing was running")
