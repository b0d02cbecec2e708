"""``rgpu run -- CMD…``: run a program with its CUDA calls on the pool."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from rgpu.api.report import Report
from rgpu.cli import common
from rgpu.cli.runs import detaching, limits
from rgpu.cli.selecting import read_labels
from rgpu.cli.sessions import gangs, starting
from rgpu.session.devices import MAX_RANKS
from rgpu.session.errors import RgpuError, UsageError


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--name", metavar="S", help="The session's name (default: the program's name and a number).")
@click.option("--memory", metavar="SIZE", help="Device memory of the session (default: with --gpus that share of a "
              "device's; else the pool's default).")
@click.option("--gpus", metavar="N", help="Number of whole GPUs of one host, or a share of one such as 0.25: that "
              "much of their compute is promised to no other session. --memory is for each of them. (Default, without "
              "--memory: 1, or the pool's default.)")
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), metavar="N", help="The program has N processes that use "
              "GPUs, as torchrun starts them: each gets --gpus, all at once or none, near each other, if need be on "
              "several hosts. All of them see one list of devices.")
@click.option("--spread", is_flag=True, help="With --gpus N: N devices in one list, of several hosts where one has too "
              "few. Each process uses any of them.")
@click.option("--gang", metavar="NAME", help="Name of the ranks' gang (default: the run's): runs of several machines "
              "that name the same gang are placed together, once --of ranks in all have arrived.")
@click.option("--of", type=click.IntRange(1, MAX_RANKS), metavar="M",
              help="With --gang: ranks of all runs together (default: this run's alone).")
@click.option("--gang-deadline", metavar="AGE", help="With --ranks: how long the gang's other runs may take to arrive, "
              "and its processes to use their devices after the first did (default 10m).")
@click.option("--compute", type=click.IntRange(1, 100), metavar="PERCENT",
              help="Share of the GPU's compute, instead of that of --gpus.")
@click.option("--gpu-model", "models", multiple=True, metavar="NAME",
              help="Only GPUs of that model, for example H200; may be given several times.")
@click.option("--priority", type=click.IntRange(-1000, 1000), default=0, show_default=True,
              help="The highest is served first; sessions of a lower one may be parked for it, and are resumed later.")
@click.option("--anti-affinity", metavar="GROUP", help="No two sessions of GROUP share a host.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="To find the session by: `rgpu ps --label "
              "KEY=VALUE`; may be given several times.")
@click.option("--queue", is_flag=True, help="Wait for a place when there is none, before the program starts; with "
              "--lazy the program starts, and waits in its first CUDA call.")
@click.option("--lazy", is_flag=True, help="Start the program at once; its session is placed with its first CUDA call. "
              "For programs that may need no GPU, or only after a long time.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print at the start what was given, and where.")
@click.option("--host", help="Start on this host (default: the coordinator chooses).")
@click.option("--recover", type=click.Choice(["on", "off"]),
              help="Keep the journal, to outlive a server (default: on).")
@click.option("--journal-limit", metavar="SIZE", help="Journal kept in memory before it is spilled.")
@click.option("--journal-dir", metavar="DIR", help="Where it is spilled to.")
@click.option("--on-full", type=click.Choice(["block", "unprotected"]), default="block", show_default=True,
              help="When no more journal can be kept: wait, or run on without the possibility of recovery.")
@click.option("--checkpoint-every", type=float, default=0.0, metavar="SECONDS",
              help="Take a checkpoint when the last one is older (default: only when the journal's limit asks for it).")
@click.option("--max-replay", type=float, default=0.0, metavar="SECONDS",
              help="Take a checkpoint when a recovery would have to replay longer, by the calls' measured rate.")
@click.option("--divergence", type=click.Choice(["warn", "stop"]), default="warn", show_default=True,
              help="When a recovered session answers otherwise than before: warn, or end the program's session.")
@click.option("--same-host", type=click.Choice(["auto", "off"]), default="auto", show_default=True,
              help="Bulk data through shared memory where the session's server is this host, or all over TCP.")
@click.option("--client-grace", metavar="AGE", help="How long this host may be silent before the session is "
              "checkpointed and ended, for example 1h (default: the pool's).")
@click.option("--record", type=click.Path(path_type=Path), metavar="DIR",
              help="Record the session's calls into DIR, for `rgpu journal`.")
@click.option("-d", "--detach", is_flag=True, help="Return when the program runs, with the run's name on stdout; it "
              "outlives this terminal. See `rgpu logs`, `attach`, `wait`, `signal`.")
@click.option("--log-limit", metavar="SIZE", help="With --detach: keep so much of the program's output, its first "
              "quarter and the end (default 64MiB).")
@click.option("--time-limit", metavar="AGE", help="End the program when it has run so long, for example 2h: SIGTERM, "
              "and SIGKILL after --kill-after.")
@click.option("--kill-after", metavar="AGE", help="From SIGTERM by --time-limit to SIGKILL (default 30s).")
@click.option("--signal-before", metavar="SIGNAL@AGE", help="Send the program a signal so long before its time limit, "
              "for example USR1@5m.")
@click.option("--supervised", hidden=True, help="For a detached run: the state that its supervisor shares.")
@click.option("--report-fd", type=int, hidden=True, help="Descriptor for the report of the start to rgpu.Pool.run.")
@common.pool_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@common.verb
def command(name: str | None, memory: str | None, host: str | None, recover: str | None, journal_limit: str | None,
            journal_dir: str | None, on_full: str, checkpoint_every: float, max_replay: float, divergence: str,
            record: Path | None, pool: str | None, program: tuple[str, ...], gpus: str | None, compute: int | None,
            models: tuple[str, ...], priority: int, anti_affinity: str | None, queue: bool, same_host: str,
            client_grace: str | None, lazy: bool, labels: tuple[str, ...], quiet: bool, report_fd: int | None,
            detach: bool, log_limit: str | None, time_limit: str | None, kill_after: str | None,
            signal_before: str | None, supervised: str | None, ranks: int | None, spread: bool, gang: str | None,
            of: int | None, gang_deadline: str | None) -> None:
    """Run PROGRAM here; its CUDA calls are executed by a session on the pool.

    The session is placed before PROGRAM starts; where that is refused, nothing is started. Exits as the program does.
    """
    with _reported(report_fd) as report:
        limit = limits.read(time_limit, kill_after, signal_before)
        if detach:
            detaching.start(common.settings(pool=pool, log_limit=log_limit), name, program, limit, report)
            return
        if log_limit is not None and supervised is None:
            raise UsageError("--log-limit is for --detach: in the foreground the output is the terminal's")
        from rgpu.client.detached.standby import Standby, Supervised
        from rgpu.client.run.launcher import default_name

        standby = Standby(Supervised.read(supervised)) if supervised is not None else None
        settings = common.settings(pool=pool, memory=memory, recover=recover, journal_limit=journal_limit,
                                   journal_dir=journal_dir, client_grace=client_grace, quiet=quiet or None)
        if ranks is not None or spread or gang is not None or of is not None or gang_deadline is not None:
            name = name or default_name(program)
            asked, gpus = gangs.read(name, gpus, ranks, spread, gang, of, gang_deadline, lazy)
            options = {**starting.requested(host, gpus, compute, models, priority, anti_affinity, queue), "gang": asked}
        else:
            options = starting.requested(host, gpus, compute, models, priority, anti_affinity, queue)
        if labels:
            options["labels"] = read_labels(labels)
        starting.start(program, settings, options, name=name, on_full=on_full, checkpoint_every=checkpoint_every,
                       max_replay=max_replay, divergence=divergence, record=record, same_host=same_host == "auto",
                       lazy=lazy, started=report.started, limit=limit, standby=standby)


@contextlib.contextmanager
def _reported(fd: int | None) -> Iterator[Report]:
    """Yield the report to the process that started the run; an error is sent there, and not to stderr too."""
    report = Report(fd)
    try:
        yield report
    except RgpuError as error:
        if report.refused(error):
            sys.exit(error.exit_code)
        raise
