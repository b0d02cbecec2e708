"""Questions before harm: what a verb will end or delete is said, and a person at a terminal is asked.

Without a terminal there is nobody to ask: ``kill``, ``leave`` and ``image rm`` go on, as scripts know them; what cannot
be had back at all (``down --purge``, the last operator's key) is refused there without ``--yes``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from rgpu.session.errors import Refused


def yes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--yes``: do not ask."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(command)


def somebody_there() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(yes: bool, consequences: Callable[[], Sequence[str]], always: bool = False) -> None:
    """Say what will happen and ask. ``consequences()``: lines, looked up only where they are shown.

    ``always``: without a terminal ``--yes`` must be given. Raises :class:`Refused` for a no.
    """
    if yes or not somebody_there() and not always:
        return
    lines = list(consequences())
    if not somebody_there():
        raise Refused("; ".join(lines) + ": --yes does it without asking")
    for line in lines:
        click.echo(line, err=True)
    if not click.confirm("go on?", default=False, err=True):
        raise Refused("nothing was done")
