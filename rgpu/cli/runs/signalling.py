"""``rgpu signal NAME SIGNAL``: send a signal to the program of a detached run."""

from __future__ import annotations

import click

from rgpu.cli import common
from rgpu.cli.runs import finding
from rgpu.link.local.processes import alive, read_signal, signal_program
from rgpu.link.runs.folder import this_host
from rgpu.session.errors import NotFound, Refused


@click.command("signal")
@click.argument("name", shell_complete=finding.complete)
@click.argument("number", metavar="SIGNAL")
@common.output_option
@common.verb
def command(name: str, number: str, output: str) -> None:
    """Send SIGNAL (TERM, SIGUSR1, 9) to the program of the detached run NAME, and to all of its process group."""
    wanted = read_signal(number)
    record, now = finding.find(name).look()
    if record.host != this_host():
        raise Refused(f"{name} runs on {record.host}: send the signal there", run=name)
    program = record.program
    try:
        if record.ended or not alive(program.pid, program.started):
            raise ProcessLookupError
        signal_program(program.pid, wanted)
    except ProcessLookupError:
        raise NotFound(f"the program of {name} has ended: there is nothing to signal", run=name) from None
    common.emit({"name": name, "signal": wanted.name, "pid": program.pid}, output,
                lambda sent: common.out.print(f"{name}: {wanted.name} sent to process {program.pid}"))
