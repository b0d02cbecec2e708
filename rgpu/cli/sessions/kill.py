"""``rgpu kill S``: end a session and its program's GPU side, or all of a gang's."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import asking, common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect
from rgpu.link.control.control_client import ControlClient


@click.command("kill")
@click.argument("session", shell_complete=completing.sessions)
@common.operator_option
@asking.yes_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, operator: bool, yes: bool, pool: str | None, output: str) -> None:
    """End SESSION: its memory returns to the pool, its program's next call fails. A gang's name: all of its ranks.

    A person at a terminal is asked first.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        asking.confirm(yes, lambda: [_ends(client, session)])
        value = verbs.kill(client, session)
    common.emit(value, output, lambda v: common.out.print(f"{session} ended"))


def _ends(client: ControlClient, name: str) -> str:
    found = verbs.describe_any(client, name)
    if "members" not in found:
        return _what_ends(found)
    hosts = f" on {', '.join(found['hosts'])}" if found.get("hosts") else ""
    return f"gang {found['gang']}, {found['ranks']} ranks, {found['state']}{hosts}: all of them end"


def _what_ends(found: dict[str, Any]) -> str:
    where = f" on {found['host']}" if found.get("host") else ""
    memory = f" with {common.size(found['memory_bytes'])}" if found.get("memory_bytes") else ""
    return (f"{found['session']} ({found.get('command') or 'no program'}), {found['state']}{where} for "
            f"{common.age(found.get('age_s') or 0.0)}{memory}, ends: its program's next call fails")
