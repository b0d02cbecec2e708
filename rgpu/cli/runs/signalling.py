"""``rgpu signal NAME SIGNAL``: send a signal to the program of a detached run."""

from __future__ import annotations

import click

from rgpu.cli import common
from rgpu.cli.runs import finding
from rgpu.link.local.processes import read_signal


@click.command("signal")
@click.argument("name", shell_complete=finding.complete)
@click.argument("number", metavar="SIGNAL")
@common.output_option
@common.verb
def command(name: str, number: str, output: str) -> None:
    """Send SIGNAL (TERM, SIGUSR1, 9) to the program of the detached run NAME, and to all of its process group."""
    wanted = read_signal(number)
    pid = finding.find(name).signal(wanted)
    common.emit({"name": name, "signal": wanted.name, "pid": pid}, output,
                lambda sent: common.out.print(f"{name}: {wanted.name} sent to process {pid}"))
