"""Requests to a pool for its users, for the command line and for :class:`rgpu.Pool`: each returns the raw answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import NotFound, PoolUnavailable, Refused

Row = dict[str, Any]
Progress = Callable[[Row], None]

WAIT_SECONDS = 10.0  #: for which a node waits for an event before it answers
SILENCE_SECONDS = 60.0  #: without an answer from any node, after which :func:`follow` raises
CHECKPOINT_SECONDS = 3700.0  #: includes the wait for another checkpoint and the time of the store
RESTORE_SECONDS = 600.0
MOVE_SECONDS = 1300.0  #: without a message of progress
PLAN_SECONDS = 120.0


def sessions(client: ControlClient, *, everything: bool = False, all_users: bool = False) -> list[Row]:
    """Return the rows of `rgpu ps`: sessions, then requests that wait.

    ``everything``: also those that ended or failed. ``all_users``: all users', for an operator's key. Raises as
    :meth:`ControlClient.call`.
    """
    found = client.call("session.list", {"all": everything, "all_users": all_users})
    return [*found["sessions"], *found.get("queue", [])]


def hosts(client: ControlClient, timeout: float = 10.0) -> list[Row]:
    """Return the rows of the hosts in the pool, then of the hosts that stopped answering (``state`` lost)."""
    found = client.call("node.list", {}, timeout=timeout)
    return [*found["nodes"], *found.get("lost", [])]


def select(rows: Iterable[Row], hosts: Iterable[str] = (), states: Iterable[str] = (), users: Iterable[str] = (),
           labels: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows that fit: any of the hosts, any of the states, any of the users, all of the labels."""
    wanted = (labels or {}).items()
    any_of = [(name, set(values)) for name, values in (("host", hosts), ("state", states), ("user", users)) if values]
    return [row for row in rows if all(row.get(name) in values for name, values in any_of)
            and wanted <= (row.get("labels") or {}).items()]


def describe(client: ControlClient, session: str) -> Row:
    """Return everything that the pool records about one session. Raises :class:`NotFound`."""
    return dict(client.call("session.describe", {"session": session}))


def gangs(client: ControlClient, *, everything: bool = False, all_users: bool = False) -> list[Row]:
    """Return the rows of `rgpu ps --gangs`, each with its members; ``everything``: also those that ended."""
    return list(client.call("gang.list", {"all": everything, "all_users": all_users})["gangs"])


def describe_gang(client: ControlClient, gang: str) -> Row:
    """Return what the pool records about one gang and its members. Raises :class:`NotFound`."""
    return dict(client.call("gang.describe", {"session": gang}))


def describe_any(client: ControlClient, name: str) -> Row:
    """Return the description of a session, else of a gang, which has ``members``. Raises :class:`NotFound`."""
    try:
        return describe(client, name)
    except NotFound as none:
        try:
            return describe_gang(client, name)
        except (NotFound, Refused):  # a node of the previous version has no gangs
            raise none from None


def migrate(client: ControlClient, session: str, host: str, options: Row, on_progress: Progress | None = None) -> Row:
    """Move a session, or plan it with ``options["dry_run"]``. Raises :class:`Refused`, :class:`MoveFailed`."""
    timeout = PLAN_SECONDS if options.get("dry_run") else MOVE_SECONDS
    arguments = {"session": session, "host": host, "options": options}
    return dict(client.call("session.migrate", arguments, timeout=timeout, on_progress=on_progress))


def checkpoint(client: ControlClient, session: str, *, wait: bool = True) -> Row:
    """Write a checkpoint; with ``wait`` return when it is published. Raises :class:`NotFound`, :class:`StoreError`."""
    return dict(client.call("session.checkpoint", {"session": session, "wait": wait}, timeout=CHECKPOINT_SECONDS))


def restore(client: ControlClient, image: str, host: str | None = None) -> Row:
    """Restore a session from a checkpoint and its journal. Raises :class:`NotFound`, :class:`Refused`."""
    return dict(client.call("session.restore", {"image": image, "host": host}, timeout=RESTORE_SECONDS))


def kill(client: ControlClient, session: str) -> Row:
    """End a session now. Raises :class:`NotFound`."""
    return dict(client.call("session.kill", {"session": session}))


def past(client: ControlClient, last: int) -> tuple[list[Row], int]:
    """Return the ``last`` newest decisions, and the revision from which to :func:`follow`."""
    found = client.call("pool.history", {"limit": last})
    return list(found["events"]), int(found["revision"])


def follow(client: ControlClient, since: int) -> Iterator[Row]:
    """Yield the decisions after revision ``since``, without end.

    After a broken connection another node is asked for the following decisions: none is missed or repeated. Raises
    :class:`PoolUnavailable` after :data:`SILENCE_SECONDS` without an answer.
    """
    heard = time.monotonic()
    while True:
        try:
            found = client.call("pool.events", {"since": since, "wait": WAIT_SECONDS}, timeout=WAIT_SECONDS + 10)
        except PoolUnavailable:
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise
            time.sleep(0.5)
            continue
        since, heard = found["revision"], time.monotonic()
        yield from found["events"]
