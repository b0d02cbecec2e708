"""``rgpu attach NAME``: follow a detached run to its end."""

from __future__ import annotations

import sys

import click

from rgpu.cli import common
from rgpu.cli.runs import finding, following


@click.command("attach")
@click.argument("name", shell_complete=finding.complete)
@click.option("-n", "--tail", default=10, show_default=True, type=click.IntRange(0), help="How many of the newest "
              "lines to begin with.")
@common.verb
def command(name: str, tail: int) -> None:
    """Follow the output of the detached run NAME, and exit as its program does.

    Ctrl-C detaches: the program runs on.
    """
    run = finding.find(name)
    try:
        following.follow(run, tail, run.ended())
    except KeyboardInterrupt:
        common.err.print(f"rgpu: detached from {name}, which goes on: 'rgpu attach {name}' follows it again, "
                         f"'rgpu signal {name} INT' interrupts it", markup=False)
        sys.exit(130)
    sys.exit(run.end().exit_code)
