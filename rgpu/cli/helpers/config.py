"""``rgpu config explain``: every setting and where its value came from."""

from __future__ import annotations

import click

from rgpu.cli import common
from rgpu.cli.groups import Group


@click.group("config", cls=Group)
def command() -> None:
    """Look at the configuration."""


@command.command("explain")
@common.output_option
@common.verb
def explain(output: str) -> None:
    """Print every setting, its value, and which option, variable or file it came from."""
    rows = common.settings().explain()
    common.emit(rows, output, lambda values: common.table(
        ("SETTING", "VALUE", "FROM", "MEANING"), [(v["name"], v["value"], v["source"], v["help"]) for v in values],
        drop=("MEANING", "FROM"), cut=("MEANING",)))
