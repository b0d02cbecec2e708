"""Selectors of the verbs that list things: ``--host``, ``--state``, ``--user``, ``--label``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
import msgspec

from rgpu.api import verbs
from rgpu.cli.helpers import completing
from rgpu.migrate.records.schema import LabelKey, LabelValue
from rgpu.session.errors import UsageError

MOST_LABELS = 16


def host_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--host`` and ``--state``."""
    command = click.option("--state", "states", multiple=True, metavar="STATE", help="Only those in that state; may be "
                           "given several times.")(command)
    return click.option("--host", "hosts", multiple=True, metavar="HOST", shell_complete=completing.hosts,
                        help="Only that host; may be given several times.")(command)


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--host``, ``--state``, ``--user`` and ``--label``."""
    for option in (
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Only sessions with that label "
                     "(`rgpu run --label`); given several times: with all of them."),
        click.option("--user", "users", multiple=True, metavar="NAME", help="Only sessions of that user.")):
        command = option(command)
    return host_options(command)


def read_labels(given: Iterable[str]) -> dict[str, str]:
    """Return ``("k=v", …)`` as a map. Raises :class:`UsageError`."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        try:
            msgspec.convert((key, value), tuple[LabelKey, LabelValue])
        except msgspec.ValidationError:
            equals = ""
        if not equals:
            raise UsageError(f"{text!r} is no label: write KEY=VALUE, each of 1 to 63 letters, digits and . _ / -; a "
                             "value may also have @ : + and may be empty")
        found[key] = value
    if len(found) > MOST_LABELS:
        raise UsageError(f"{len(found)} labels were given; {MOST_LABELS} are the most")
    return found


def select(rows: Iterable[dict[str, Any]], hosts: Iterable[str] = (), states: Iterable[str] = (),
           users: Iterable[str] = (), labels: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the rows that match: any of the hosts, any of the states, any of the users, all of the labels."""
    return verbs.select(rows, hosts, states, users, read_labels(labels))
