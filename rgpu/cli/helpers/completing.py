"""Names for shell completion, requested from the pool; none if it does not answer quickly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rgpu.cli import common

ASK_SECONDS = 1.5


def sessions(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the live sessions that begin with ``incomplete``."""
    return _ask(context, incomplete, "session.list", lambda answer: [row["session"] for row in answer["sessions"]])


def sessions_and_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the live sessions and this machine's detached runs that begin with ``incomplete``."""
    from rgpu.cli.runs.finding import complete

    return sorted({*complete(context, parameter, incomplete), *sessions(context, parameter, incomplete)})


def hosts(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the hosts of the pool that begin with ``incomplete``."""
    return _ask(context, incomplete, "node.list",
                lambda answer: [row["host"] for row in [*answer["nodes"], *answer.get("lost", [])]])


def _ask(context: click.Context, incomplete: str, verb: str, names: Callable[[Any], list[str]]) -> list[str]:
    from rgpu.cli.pool import connect

    try:
        with connect(common.settings(pool=context.params.get("pool"))) as client:
            return sorted(name for name in names(client.call(verb, {}, timeout=ASK_SECONDS))
                          if name.startswith(incomplete))
    except Exception:  # noqa: BLE001 - a shell waits for the next key: no pool means no proposals
        return []
