"""``rgpu context``: the pools that this user is logged in to."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from rgpu.api.contexts import LOCAL, Contexts
from rgpu.cli import common
from rgpu.link import description
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.session.errors import NotFound, PoolUnavailable


def names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the contexts that begin with ``incomplete``, for shell completion."""
    return [name for name in [*Contexts().names(), LOCAL] if name.startswith(incomplete)]


@click.group("context")
def command() -> None:
    """Choose between the pools that this machine is logged in to (`rgpu login`)."""


@command.command("ls")
@common.output_option
@common.verb
def ls(output: str) -> None:
    """List the contexts; * marks the current one."""
    contexts = Contexts()
    rows = [msgspec.to_builtins(contexts.show(name)) for name in contexts.names()]
    common.emit(rows, output, _list)


@command.command("use")
@click.argument("name", shell_complete=names)
@common.output_option
@common.verb
def use(name: str, output: str) -> None:
    """Make NAME the current context; `local` means the pool of this machine (`rgpu up`)."""
    Contexts().use(name)
    common.emit({"current": "" if name == LOCAL else name}, output, lambda value: common.out.print(
        f"verbs talk to {name if value['current'] else 'the pool of this machine'} from now on", markup=False))


@command.command("rm")
@click.argument("name", shell_complete=names)
@common.output_option
@common.verb
def rm(name: str, output: str) -> None:
    """Delete the context NAME with its key. The pool accepts that key until `rgpu keys revoke` there."""
    contexts = Contexts()
    shown = contexts.show(name)
    contexts.remove(name)
    common.emit({"removed": name, "user": shown.user}, output, lambda value: common.out.print(
        f"removed {name}; an operator of the pool takes its key off by `rgpu keys revoke {shown.user or 'NAME'}`",
        markup=False))


@command.command("show")
@click.argument("name", required=False, shell_complete=names)
@common.output_option
@common.verb
def show(name: str | None, output: str) -> None:
    """Show a context (default: the current one): pool, user, role, addresses; never its secret key."""
    contexts = Contexts()
    name = name or contexts.current()
    if not name:
        raise NotFound("no context is current: `rgpu context use NAME` chooses one, `rgpu login` makes one")
    common.emit(msgspec.to_builtins(contexts.show(name)), output, _show)


@command.command("set")
@click.argument("name", shell_complete=names)
@click.option("--address", required=True, metavar="HOST:PORT", help="Where a node of the pool answers control messages "
              "now.")
@common.output_option
@common.verb
def set_address(name: str, address: str, output: str) -> None:
    """Find the pool of NAME again after all its addresses changed: one of its nodes answers at HOST:PORT.

    The node must prove one of the keys that the context records; then it reports the other nodes' addresses.
    """
    contexts = Contexts()
    files = contexts.existing(name)
    described, pair = files.read_description(), KeyPair.load(files.key_for("user"))
    at = address if address.startswith("tcp://") else f"tcp://{address}"
    for known in described.endpoints:
        try:
            with ControlClient(pair, [Endpoint(at, known.public, known.host)]) as client:
                living = description.named(client.call("pool.ping", {}, timeout=5).get("endpoints"))
        except PoolUnavailable:
            continue
        description.remember(files, living, most=description.MOST)
        common.emit(msgspec.to_builtins(contexts.show(name)), output, _show)
        return
    raise PoolUnavailable(f"no node that the context {name} knows answers at {at}: is that a control port of its pool? "
                          "Where all its hosts were replaced, log in anew by an invitation", address=at)


def _list(rows: list[dict[str, Any]]) -> None:
    if not rows:
        common.out.print("no context: `rgpu login rgpu-join-…` makes one")
        return
    common.table(("", "NAME", "POOL", "USER", "ROLE", "ADDRESSES"), (
        ("*" if row["current"] else "", row["name"], row["pool"], row["user"], row["role"],
         row["wrong"] or ", ".join(row["addresses"])) for row in rows), drop=("ADDRESSES", "POOL", "ROLE"))


def _show(row: dict[str, Any]) -> None:
    for title in ("name", "current", "pool", "user", "role", "public", "addresses", "directory", "wrong"):
        value = row[title]
        if value or title == "current":
            text = ", ".join(value) if title == "addresses" else "yes" if value is True else value or "no"
            common.out.print(f"{title:10} {text}", markup=False)
