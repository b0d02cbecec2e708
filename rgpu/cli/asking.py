"""Confirmations: a verb prints what it will end or delete, and asks the person at the terminal.

Without a terminal ``kill``, ``leave`` and ``image rm`` continue without asking, for scripts; what cannot be undone
(``down --purge``, the last operator's key) is refused there without ``--yes``.
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
    """Print what will happen and ask. ``consequences``: returns the lines; called only where they are shown.

    ``always``: without a terminal ``--yes`` must be given. Raises :class:`Refused` when the answer is no.
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
