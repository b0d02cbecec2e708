"""``rgpu nodes``: the hosts of the pool and their devices."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common, selecting
from rgpu.cli.common import size
from rgpu.cli.pool import connect
from rgpu.cli.tables import Column, Listing, list_options

COLUMNS = (
    Column("HOST", lambda n: n["host"]), Column("STATE", lambda n: n["state"]),
    Column("ADDRESS", lambda n: n.get("address"), drop=9),
    Column("LEADER", lambda n: "*" if n.get("leader") else "", drop=5),
    Column("DEVICE", lambda n: n["device"].get("device") or "none", drop=1),
    Column("MODEL", lambda n: n["device"].get("name"), drop=8),
    Column("MEMORY", lambda n: n["device"].get("total_memory"), size, drop=3),
    Column("FREE", lambda n: n["device"].get("free_memory"), size, drop=2),
    Column("USED", lambda n: n["device"].get("memory_used"), size, drop=6),
    Column("BUSY", lambda n: n["device"].get("utilization"), lambda share: f"{share:.0%}", drop=4),
    Column("SESSIONS", lambda n: n["device"].get("sessions"), drop=7),
    Column("DATA", lambda n: n.get("data"), wide=True), Column("VERSION", lambda n: n.get("version"), wide=True),
    Column("PID", lambda n: n.get("pid"), wide=True), Column("NOTE", lambda n: _note(n, n["device"]), cut=True))


@click.command("nodes")
@selecting.host_options
@common.pool_option
@list_options
@common.verb
def command(pool: str | None, output: str, sort: str | None, watch: float | None, hosts: tuple[str, ...],
            states: tuple[str, ...]) -> None:
    """List hosts: address, state, devices and what is free on them; also those that are lost, until `rgpu leave`.

    FREE: memory not promised to any session. USED, BUSY: memory in use and recent share of the time in which the
    device worked, as its driver reports them, else as its sessions do.
    """
    listing = Listing(COLUMNS, "host", output, sort)
    with connect(common.settings(pool=pool)) as client:

        def look() -> list[dict[str, Any]]:
            found = selecting.select(verbs.hosts(client), hosts, states)
            if output in ("json", "yaml"):
                return found
            return [{**node, "device": device} for node in found for device in node["devices"] or [{}]]

        listing.follow(look, watch)


def _note(node: dict[str, Any], device: dict[str, Any]) -> str:
    """The host's reason, and that of a device which takes no sessions."""
    sick = "" if device.get("healthy", True) else f"{device['device']} is unhealthy: {device.get('reason') or '-'}"
    lost = f"lost since {common.moment(node['lost_since'])}; `rgpu leave {node['host']}` removes it" \
        if node.get("lost_since") else ""
    return "; ".join(filter(None, [lost, node.get("reason"), sick]))
