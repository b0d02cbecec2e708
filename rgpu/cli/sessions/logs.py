"""``rgpu logs S``: the output of a detached run's program, or the log of a session's worker."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect
from rgpu.cli.runs import finding, following
from rgpu.link.runs.folder import KnownRun
from rgpu.session.errors import NotFound, UsageError
from rgpu.session.printable import printable

WORKER_LINES = 100  #: of a worker's log, where no number is given


@click.command("logs")
@click.argument("session", shell_complete=completing.sessions_and_runs)
@click.option("-n", "--lines", "--tail", type=click.IntRange(0), help="How many of the newest lines (default: all "
              f"that is kept of a program's output, {WORKER_LINES} of a worker's log).")
@click.option("-f", "--follow", is_flag=True, help="Continue with the program's new output, until it ends.")
@click.option("--worker", is_flag=True, help="The log of the session's worker, also of a detached run.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, lines: int | None, follow: bool, worker: bool, operator: bool, pool: str | None,
            output: str) -> None:
    """Print what the program of SESSION wrote, where it is a detached run of this machine; else its worker's log.

    The output of a program in the foreground went to its terminal and is not kept.
    """
    run = None if worker or operator else _run(session)
    if run is not None:
        _of_program(run, lines, follow, output)
        return
    if follow:
        raise UsageError(f"-f follows the output of detached runs, and {session} is none of this machine" if not worker
                         else "-f does not follow a worker's log")
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        value = client.call("session.logs", {"session": session, "lines": WORKER_LINES if lines is None else lines})
    common.emit(value, output, lambda v: print("\n".join(printable(line, keep="\t") for line in v["lines"])))


def _run(session: str) -> KnownRun | None:
    try:
        return finding.runs().run(session)
    except (NotFound, UsageError):  # a session's name need not be a valid run's: S/2
        return None


def _of_program(run: KnownRun, lines: int | None, follow: bool, output: str) -> None:
    if output == "text":
        if follow:
            following.follow(run, lines, run.ended())
        else:
            following.show(run.output(lines).read())
        return
    if follow:
        raise UsageError("-f prints what the program writes as it is: leave out -o")
    value: dict[str, Any] = {"session": run.name, "source": "program", "lines": following.lines(run, lines)}
    common.emit(value, output, lambda v: None)
