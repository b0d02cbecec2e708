"""``rgpu pool``: the pool as a whole: its state, and its automation."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.groups import Group
from rgpu.cli.pool import connect
from rgpu.cli.pools import adopt


@click.group("pool", cls=Group)
def command() -> None:
    """Look at the pool as a whole; pause or resume its automation; repair its registry."""


command.add_command(adopt.command)


@command.command("status")
@common.pool_option
@common.output_option
@common.verb
def status(pool: str | None, output: str) -> None:
    """Show which node leads, whether automation is paused, how many nodes and sessions there are."""
    with connect(common.settings(pool=pool)) as client:
        found = client.call("pool.status", {})
    common.emit(found, output, _show)


@command.command("pause")
@click.option("--reason", default="by hand", show_default=True, help="Why; shown for all that waits for it.")
@common.pool_option
@common.output_option
@common.verb
def pause(reason: str, pool: str | None, output: str) -> None:
    """Pause automation: no drain continues, no lost session is placed again.

    Sessions run on, commands are obeyed, and a move that has begun is finished or
    undone. A session whose server is lost waits (`recovering`) until `rgpu pool resume`.
    """
    _set(True, reason, pool, output)


@command.command("resume")
@click.option("--reason", default="by hand", show_default=True, help="Why; kept in the history.")
@common.pool_option
@common.output_option
@common.verb
def resume(reason: str, pool: str | None, output: str) -> None:
    """Resume automation; what waited for it is checked again within some seconds."""
    _set(False, reason, pool, output)


@command.command("set")
@click.argument("name", type=click.Choice(["default-gpus", "max-kernel-seconds"]))
@click.argument("value")
@common.pool_option
@common.output_option
@common.verb
def set_one(name: str, value: str, pool: str | None, output: str) -> None:
    """Set NAME to VALUE for the whole pool.

    default-gpus: --gpus of runs that give neither --memory nor --gpus: 1, 2, 0.25; "auto" for the usual, one GPU where
    the pool has GPUs. Runs that have begun keep what they have.

    max-kernel-seconds: a session is ended, with a reason, when one of its kernels or graphs runs longer; "off" (the
    default): never. Measured in whole seconds, from when it was first observed to run.
    """
    args = {"name": name, "value": "" if value in ("auto", "off") else value}
    with connect(common.settings(pool=pool), role="operator") as client:
        result = client.call("pool.set", args, timeout=30)
    common.emit(result, output, lambda v: common.out.print(
        _kernels(v) if name == "max-kernel-seconds" else _default(v), markup=False))


def _kernels(found: dict[str, Any]) -> str:
    return f"max-kernel-seconds {found.get('max_kernel_seconds') or 'off'}"


def _default(found: dict[str, Any]) -> str:
    return f"default-gpus {found.get('default_gpus') or 'auto (1 where the devices are GPUs)'}"


def _set(paused: bool, reason: str, pool: str | None, output: str) -> None:
    with connect(common.settings(pool=pool), role="operator") as client:
        result = client.call("pool.pause", {"paused": paused, "reason": reason}, timeout=30)
    common.emit(result, output, lambda v: common.out.print(
        f"automation is {'paused' if v['paused'] else 'on'} ({v['reason']})", markup=False))


def _show(found: dict[str, Any]) -> None:
    automation = f"paused ({found['paused_reason']})" if found["paused"] else "on"
    sessions = ", ".join(f"{count} {state}" for state, count in sorted(found["sessions"].items())) or "none"
    common.out.print(
        f"coordinator  {found['leader'] or 'none at the moment'}\nautomation   {automation}\n"
        f"nodes        {found['nodes']}" + (f", away: {', '.join(found['away'])}" if found["away"] else "") +
        "".join(f", {host} lost since {common.moment(since)}" for host, since in found.get("lost", {}).items()) +
        f"\ndefault      {_default(found).removeprefix('default-gpus ')}: GPUs of a run that asks for nothing"
        f"\nkernels      {_kernels(found).removeprefix('max-kernel-seconds ')}: seconds that one may run"
        f"\nsessions     {sessions}\nqueue        {len(found.get('queue') or []) or 'empty'}"
        f"\nregistry     {found['cluster']}, revision {found['revision']}", markup=False)
