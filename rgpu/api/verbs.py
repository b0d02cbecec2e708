"""What a pool is asked for its users, for the command line and for :class:`rgpu.Pool`: each answer as it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import NotFound, PoolUnavailable, Refused

Row = dict[str, Any]
Progress = Callable[[Row], None]

WAIT_SECONDS = 10.0  #: that a node waits for something to tell
SILENCE_SECONDS = 60.0  #: without a node that answers, after which events are given up
CHECKPOINT_SECONDS = 3700.0  #: perhaps behind another one, and as long as the store takes
RESTORE_SECONDS = 600.0
MOVE_SECONDS = 1300.0  #: without a word of progress
PLAN_SECONDS = 120.0


def sessions(client: ControlClient, *, everything: bool = False, all_users: bool = False) -> list[Row]:
    """Return the rows of `rgpu ps`: sessions, then requests that wait.

    ``everything``: also what ended or failed. ``all_users``: everybody's, for an operator's key. Raises as
    :meth:`ControlClient.call`.
    """
    found = client.call("session.list", {"all": everything, "all_users": all_users})
    return [*found["sessions"], *found.get("queue", [])]


def hosts(client: ControlClient, timeout: float = 10.0) -> list[Row]:
    """Return the rows of the hosts that are there, then of those that went without a word (``state`` lost)."""
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
    """Return everything that the pool knows about one session. Raises :class:`NotFound`."""
    return dict(client.call("session.describe", {"session": session}))


def gangs(client: ControlClient, *, everything: bool = False, all_users: bool = False) -> list[Row]:
    """Return the rows of `rgpu ps --gangs`, each with its members; ``everything``: also those that ended."""
    return list(client.call("gang.list", {"all": everything, "all_users": all_users})["gangs"])


def describe_gang(client: ControlClient, gang: str) -> Row:
    """Return what the pool knows about one gang and its members. Raises :class:`NotFound`."""
    return dict(client.call("gang.describe", {"session": gang}))


def describe_any(client: ControlClient, name: str) -> Row:
    """Return what the pool knows about a session, else about a gang, which has ``members``. Raises :class:`NotFound`.
    """
    try:
        return describe(client, name)
    except NotFound as none:
        try:
            return describe_gang(client, name)
        except (NotFound, Refused):  # a node of the version before knows of no gangs
            raise none from None


def migrate(client: ControlClient, session: str, host: str, options: Row, on_progress: Progress | None = None) -> Row:
    """Move a session, or plan it with ``options["dry_run"]``. Raises :class:`Refused`, :class:`MoveFailed`."""
    timeout = PLAN_SECONDS if options.get("dry_run") else MOVE_SECONDS
    arguments = {"session": session, "host": host, "options": options}
    return dict(client.call("session.migrate", arguments, timeout=timeout, on_progress=on_progress))


def checkpoint(client: ControlClient, session: str, *, wait: bool = True) -> Row:
    """Write a checkpoint; with ``wait`` return when it counts. Raises :class:`NotFound`, :class:`StoreError`."""
    return dict(client.call("session.checkpoint", {"session": session, "wait": wait}, timeout=CHECKPOINT_SECONDS))


def restore(client: ControlClient, image: str, host: str | None = None) -> Row:
    """Bring a session back from a checkpoint and its journal. Raises :class:`NotFound`, :class:`Refused`."""
    return dict(client.call("session.restore", {"image": image, "host": host}, timeout=RESTORE_SECONDS))


def kill(client: ControlClient, session: str) -> Row:
    """End a session now. Raises :class:`NotFound`."""
    return dict(client.call("session.kill", {"session": session}))


def past(client: ControlClient, last: int) -> tuple[list[Row], int]:
    """Return the ``last`` decisions of the past, and the revision to :func:`follow` them from."""
    found = client.call("pool.history", {"limit": last})
    return list(found["events"]), int(found["revision"])


def follow(client: ControlClient, since: int) -> Iterator[Row]:
    """Yield the decisions after revision ``since``, for ever.

    After a broken connection another node is asked for what came since: nothing is missed or told twice. Raises
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
