"""``rgpu quota``: the limits of each user of the pool, and what is in use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click

from rgpu.api.settings import parse_size
from rgpu.cli import common
from rgpu.cli.groups import Group
from rgpu.cli.pool import connect
from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import NotFound, UsageError, VersionMismatch

ASK_SECONDS = 30.0
UNLIMITED, INHERIT = "unlimited", "default"


@click.group("quota", cls=Group)
def command() -> None:
    """Limit what users may have at a time: sessions, device memory, shares of GPUs, queueing, checkpoints."""


def _whose(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``USER`` and ``--default``."""
    command = click.option("--default", "default", is_flag=True, help="The limits of all users who have none of their "
                           "own.")(command)
    return click.argument("user", required=False)(command)


@command.command("set")
@_whose
@click.option("--sessions", metavar="N", help="Sessions at a time.")
@click.option("--memory", metavar="SIZE", help="Device memory of all sessions together: 16GiB.")
@click.option("--gpus", metavar="N", help="GPUs of all sessions together, shares count as such: 2, 0.5.")
@click.option("--queued", metavar="N", help="Requests that wait for a place.")
@click.option("--checkpoints", metavar="SIZE", help="Bytes of all checkpoints together in the store: 100GiB.")
@common.pool_option
@common.output_option
@common.verb
def set_some(user: str | None, default: bool, sessions: str | None, memory: str | None, gpus: str | None,
             queued: str | None, checkpoints: str | None, pool: str | None, output: str) -> None:
    """Limit what USER may have at a time, or with --default what all users may. Limits that are not named stay.

    "unlimited" removes a limit, "default" sets it to that of all users. Sessions above a lower limit run on; nothing
    more is admitted until USER is below it.
    """
    args = {**_asked(user, default), **wanted(default, sessions=sessions, memory=memory, gpus=gpus, queued=queued,
                                              checkpoints=checkpoints)}
    with connect(common.settings(pool=pool), role="operator") as client:
        found = _call(client, "quota.set", args)
    common.emit(found, output, _tell)


@command.command("unset")
@_whose
@common.pool_option
@common.output_option
@common.verb
def unset(user: str | None, default: bool, pool: str | None, output: str) -> None:
    """Remove all limits of USER: those of all users apply again. With --default: remove those of all users."""
    args = _asked(user, default)
    with connect(common.settings(pool=pool), role="operator") as client:
        found = _call(client, "quota.unset", args)
    common.emit(found, output, _tell)


@command.command("show")
@click.argument("user", required=False)
@click.option("--all-users", is_flag=True, help="Those of all users, with the operator's key.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def show(user: str | None, all_users: bool, operator: bool, pool: str | None, output: str) -> None:
    """Show your limits and what you have in use; as an operator those of USER, or of all users."""
    if user and all_users:
        raise UsageError("one user's quota, or all: give USER or --all-users")
    with connect(common.settings(pool=pool), common.role(operator or all_users)) as client:
        found = _call(client, "quota.show", {"user": user, "all_users": all_users})
    common.emit(found, output, _show)


def _call(client: ControlClient, verb: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the pool's answer. Raises :class:`VersionMismatch` where the node that answers has no quotas."""
    try:
        return dict(client.call(verb, args, timeout=ASK_SECONDS))
    except NotFound as error:
        if error.detail.get("verb") != verb:
            raise
        raise VersionMismatch("the pool's nodes are of an earlier version, which knows no quotas: upgrade them "
                              "(`rgpu doctor` names their versions)") from error


def wanted(default: bool, **given: str | None) -> dict[str, Any]:
    """Parse the options of ``set``: {limits, inherit}. Raises :class:`UsageError`."""
    limits: dict[str, Any] = {}
    inherit: list[str] = []
    for name, text in given.items():
        if text is None:
            continue
        word = text.strip().lower()
        if word == INHERIT and not default:
            inherit.append(name)
        elif word in (UNLIMITED, INHERIT):
            limits[name] = None
        else:
            limits[name] = _READ[name](name, word)
    if not limits and not inherit:
        raise UsageError("say which limit: --sessions, --memory, --gpus, --queued or --checkpoints")
    return {"limits": limits, "inherit": inherit}


def _asked(user: str | None, default: bool) -> dict[str, Any]:
    if bool(user) == default:
        raise UsageError("a quota is one user's, or everybody's: give USER or --default")
    return {"default": True} if default else {"user": user}


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"--{name} takes a whole number, or {UNLIMITED}, or {INHERIT}, not {text!r}")
    return int(text)


def _size(name: str, text: str) -> int:
    try:
        size = parse_size(text)
    except UsageError as error:
        raise UsageError(f"--{name}: {error.message}, or {UNLIMITED}, or {INHERIT}") from None
    if size >= 2**63:
        raise UsageError(f"--{name} {text} is more than any pool has: {UNLIMITED} is no limit")
    return size


def _gpus(name: str, text: str) -> float:
    try:
        gpus = float(text)
    except ValueError:
        gpus = math.nan
    if not 0 <= gpus <= 1e6:
        raise UsageError(f"--{name} takes a number of GPUs such as 2 or 0.5, or {UNLIMITED}, or {INHERIT}, not "
                         f"{text!r}")
    return gpus


_READ: dict[str, Callable[[str, str], float]] = {"sessions": _count, "memory": _size, "gpus": _gpus, "queued": _count,
                                                 "checkpoints": _size}


def _cell(name: str, used: float | None, most: float | None) -> str:
    """``3 of 4``; only what is in use where there is no limit; ``?`` where that is not known."""
    has = "?" if used is None else _amount(name, used)
    return has if most is None else f"{has} of {_amount(name, most)}"


def _show(found: dict[str, Any]) -> None:
    _table(found["quotas"])
    limits = [f"{name} {_amount(name, most)}" for name, most in found["default"].items() if most is not None]
    common.out.print(f"everybody may have: {', '.join(limits) or 'no limits'}", markup=False)
    _notes([line for row in found["quotas"] for line in row["over"]])


def _amount(name: str, most: float) -> str:
    return common.size(most) if _READ.get(name) is _size else f"{most:g}"


def _table(rows: list[dict[str, Any]]) -> None:
    common.table(("USER", "SESSIONS", "MEMORY", "GPUS", "QUEUED", "CHECKPOINTS", "OWN"), (
        (row["user"], *(_cell(name, row["use"].get(name), row["limits"].get(name)) for name in _READ),
         ",".join(sorted(row["own"]))) for row in rows), drop=("OWN", "CHECKPOINTS"))


def _tell(found: dict[str, Any]) -> None:
    if found["user"] is None:
        limits = [f"{name} {_amount(name, most)}" for name, most in found["limits"].items() if most is not None]
        common.out.print(f"everybody may have: {', '.join(limits) or 'no limits'}", markup=False)
    else:
        _table([found])
    _notes(found["notes"])


def _notes(lines: list[str]) -> None:
    for line in lines:
        common.err.print(f"rgpu: {line}", markup=False)
