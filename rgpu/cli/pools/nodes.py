"""``rgpu nodes``: the hosts of the pool and their devices."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import connect


@click.command("nodes")
@common.pool_option
@common.output_option
@common.verb
def command(pool: str | None, output: str) -> None:
    """List hosts: address, state, devices and what is free on them."""
    with connect(common.settings(pool=pool)) as client:
        nodes = client.call("node.list", {})["nodes"]
    common.emit(nodes, output, _show)


def _show(nodes: list[dict[str, Any]]) -> None:
    common.table(("HOST", "STATE", "ADDRESS", "LEADER", "DEVICE", "MEMORY", "FREE", "SESSIONS", "NOTE"), (
        (n["host"], n["state"], n["address"], "*" if n.get("leader") else "", d.get("name", "none"),
         common.size(d.get("total_memory")), common.size(d.get("free_memory")), d.get("sessions"), _note(n, d))
        for n in nodes for d in n["devices"] or [{}]))


def _note(node: dict[str, Any], device: dict[str, Any]) -> str:
    """The host's reason, and that of a device which takes no sessions."""
    sick = "" if device.get("healthy", True) else f"{device['device']} is unhealthy: {device.get('reason') or '-'}"
    return "; ".join(filter(None, [node.get("reason"), sick]))
