"""``rgpu wait NAME…``: wait for detached runs to end."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from rgpu.api.settings import parse_age
from rgpu.cli import common
from rgpu.cli.runs import finding
from rgpu.link.runs.record import RunRecord


@click.command("wait")
@click.argument("names", nargs=-1, required=True, shell_complete=finding.complete)
@click.option("--timeout", metavar="AGE", help="Wait no longer than this, for example 30m; then exit with status 10.")
@common.output_option
@common.verb
def command(names: tuple[str, ...], timeout: str | None, output: str) -> None:
    """Wait until the detached runs NAMES have ended, and exit as their programs did.

    With several, the exit status is the first one, in the order given, that is not 0.
    """
    until = None if timeout is None else time.monotonic() + parse_age(timeout)
    runs = [finding.find(name) for name in names]
    ended = [run.wait(None if until is None else max(0.0, until - time.monotonic())) for run in runs]
    common.emit([_row(record) for record in ended], output, lambda rows: _tell(rows) if len(rows) > 1 else None)
    sys.exit(next((record.exit_code for record in ended if record.exit_code), 0))


def _row(record: RunRecord) -> dict[str, Any]:
    return {"name": record.name, "exit_code": record.exit_code, "reason": record.reason, "ended": record.ended}


def _tell(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        common.out.print(f"{row['name']}: exit code {row['exit_code']}", markup=False)
