"""``rgpu run --detach``: hand the run to a supervisor of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rgpu.api.report import Report
from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.pool import pool_files, require_pool
from rgpu.client.detached.channels import Order
from rgpu.client.detached.starting import start as start_supervisor
from rgpu.client.detached.time_limit import TimeLimit
from rgpu.link.keys import check_name
from rgpu.link.runs.output import LEAST_LIMIT
from rgpu.session.errors import UsageError

#: Options that are not passed to the supervisor's `rgpu run`: they are for this one, or passed otherwise.
_OURS = frozenset({"detach", "log_limit", "pool", "name", "report_fd", "supervised"})


def start(settings: Settings, name: str | None, program: Sequence[str], limit: TimeLimit, report: Report) -> None:
    """Start the run and print its name; exits with the status of a program that cannot be executed.

    Raises the errors of a run in the foreground, before anything was started.
    """
    from rgpu.client.run.launcher import default_name

    if settings.log_limit < LEAST_LIMIT:
        raise UsageError(f"--log-limit {settings.log_limit}: 64KiB at least")
    files = pool_files(settings)
    require_pool(files)
    name = check_name(name or default_name(program))
    order = Order(name=name, root=str(Path(settings.runs_dir).absolute()), pool=str(files.root.resolve()), how="",
                  log_limit=settings.log_limit, report=-1, keep=settings.keep_runs,
                  time_limit=(limit.seconds, limit.kill_after),
                  arguments=["--pool", str(files.root.absolute()), "--name", name,
                             *_given(click.get_current_context())])
    said = start_supervisor(order, program)
    if isinstance(said, int):
        sys.exit(said)
    report.started(name, int(said["pid"]), order.root)
    common.out.print(name, markup=False)


def _given(context: click.Context) -> list[str]:
    """The options that this `rgpu run` was given, for the one that the supervisor starts."""
    found: list[str] = []
    for parameter in context.command.params:
        key = parameter.name or ""
        if not isinstance(parameter, click.Option) or key in _OURS or key not in context.params or \
                context.get_parameter_source(key) is not click.core.ParameterSource.COMMANDLINE:
            continue
        option, value = parameter.opts[-1], context.params[key]
        if parameter.is_flag:
            found.append(option)
        else:
            values: tuple[Any, ...] = value if parameter.multiple else (value,)
            found += [part for one in values for part in (option, str(one))]
    return found
