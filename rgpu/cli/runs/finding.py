"""Detached runs by name, for the verbs about them."""

from __future__ import annotations

from pathlib import Path

import click

from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.tables import did_you_mean
from rgpu.link.runs.folder import KnownRun, Runs
from rgpu.session.errors import NotFound


def runs(settings: Settings | None = None) -> Runs:
    """Return the detached runs of this user on this machine."""
    return Runs(Path((settings or common.settings()).runs_dir))


def find(name: str) -> KnownRun:
    """Return a detached run. Raises :class:`NotFound` with the nearest name, :class:`UsageError` for no valid name."""
    known = runs()
    try:
        return known.run(name)
    except NotFound as error:
        near = did_you_mean(name, known.names())
        raise NotFound(error.message + (near or "; `rgpu ps --detached --all` lists them"), run=name) from None


def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the detached runs that begin with ``incomplete``."""
    try:
        return [name for name in runs(Settings()).names() if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a shell waits for the next key
        return []
