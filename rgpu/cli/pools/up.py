"""``rgpu up``: a local pool: keys, an embedded registry, and N node daemons on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from rgpu.api.settings import parse_size
from rgpu.checkpoint.blobs import places
from rgpu.cli import common
from rgpu.cli.pool import daemon_state, log_size, pool_files, wait_ready
from rgpu.cli.pools import supervising
from rgpu.cli.pools.supervising import Supervisor
from rgpu.server.node import belonging
from rgpu.server.node.ports import web_page
from rgpu.session.errors import AlreadyExists, PoolUnavailable


@click.command("up")
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1, 64), help="How many node daemons.")
@click.option("--device", "devices", multiple=True, metavar="DEV",
              help="Device of each node: cpu (default), cuda:0 …; cuda:0,cuda:1 for several. Given N times, node i "
                   "gets the i-th.")
@click.option("--device-memory", metavar="SIZE", default="8GiB", show_default=True,
              help="Device memory that a cpu device offers.")
@common.module_cache_option
@common.store_options
@click.option("--lease", "lease", default=5.0, show_default=True, help="Seconds after which a silent node is dead.")
@click.option("--web", default="", metavar="HOST:PORT", help="The first node serves the web page there "
              "(docs/operators/web.md).")
@click.option("--detach", is_flag=True, help="Leave the pool running and return.")
@click.option("--supervise/--no-supervise", default=True, show_default=True,
              help="Start a failed daemon again, after a delay that doubles while it keeps failing.")
@common.local_pool_option
@common.output_option
@common.verb
def command(nodes: int, devices: tuple[str, ...], device_memory: str, module_cache_size: str,
            store: str | None, store_credentials: str | None, keep_images: str | None, lease: float, web: str,
            detach: bool, supervise: bool, pool: str | None, output: str) -> None:
    """Start a local pool; without --detach it runs until Ctrl-C."""
    files = pool_files(common.settings(pool=pool))
    web_page.check(web, "")
    places.parse(store or ".")  # a wrong address is reported here, not in a daemon's log
    more = [part for name, value in (("--store", store), ("--store-credentials", store_credentials),
                                     ("--keep-images", keep_images)) if value for part in (name, str(value))]
    module_cache_size = str(parse_size(module_cache_size))
    hosts = [_host(i) for i in range(nodes)]
    running = [h for h in hosts if daemon_state(files, h)["running"]]
    if running:
        raise AlreadyExists(f"the pool in {files.root} is running already (host {running[0]}); stop it with "
                            "`rgpu down`")
    if not files.description_path.exists():
        files.create()
    for host in hosts:
        belonging.choose("embedded", belonging.look(files, host))
    commands = {host: _command(files.root, host, devices[index % len(devices)] if devices else "cpu", device_memory,
                               lease, module_cache_size, more) for index, host in enumerate(hosts)}
    if web:
        commands[hosts[0]] += ["--web", web]
    if detach and supervise:
        common.emit({"pool": str(files.root), "nodes": supervising.detach(files, commands)}, output, _show)
        return
    written = {host: log_size(files, host) for host in hosts}
    processes = {host: supervising.start(files.root, host, command) for host, command in commands.items()}
    try:
        states = [wait_ready(files, host, process, written[host]) for host, process in processes.items()]
    except BaseException:
        _stop(processes)
        raise
    common.emit({"pool": str(files.root), "nodes": states}, output, _show)
    if not detach:
        _stay(files.root, commands, processes, supervise)


def _command(root: Path, host: str, device: str, device_memory: str, lease: float, module_cache_size: str,
             more: Sequence[str]) -> list[str]:
    """The command line of one node daemon."""
    return [sys.executable, "-m", "rgpu.cli.main", "server", "--pool", os.path.abspath(root), "--host", host,
            *(part for one in device.split(",") for part in ("--device", one)),
            "--device-memory", device_memory, "--lease", str(lease), "--registry", "embedded",
            "--module-cache-size", module_cache_size, *more]


def _host(index: int) -> str:
    return f"node-{chr(97 + index)}" if index < 26 else f"node-{index + 1}"


def _show(value: dict[str, Any]) -> None:
    common.out.print(f"pool {value['pool']} is running", markup=False)
    common.table(("HOST", "CONTROL", "DATA", "PID"), ((n["host"], n["control"], n["data"], n["pid"])
                                                     for n in value["nodes"]), drop=("PID", "DATA"))


def _stay(root: Path, commands: dict[str, list[str]], processes: dict[str, subprocess.Popen[bytes]],
          supervise: bool) -> None:
    common.err.print("Ctrl-C stops the pool")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    found = Supervisor(restart=supervise)
    for host, process in processes.items():
        found.add(host, partial(supervising.start, root, host, commands[host]), process)
    try:
        found.run(lambda: False)
        raise PoolUnavailable("every node daemon has ended")
    except KeyboardInterrupt:
        common.err.print("stopping")
    finally:
        found.stop()


def _stop(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        process.terminate()
    for process in processes.values():
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
