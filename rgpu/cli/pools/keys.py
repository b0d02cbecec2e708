"""``rgpu keys``: the keys that the pool accepts."""

from __future__ import annotations

import sys
from typing import Any

import click

from rgpu.api.settings import parse_age
from rgpu.cli import asking, common
from rgpu.cli.groups import Group
from rgpu.cli.pool import connect, pool_files
from rgpu.cli.pools import revoking, rotating
from rgpu.link.description import MOST
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.session.errors import NotFound, PoolUnavailable, UsageError, VersionMismatch


@click.group("keys", cls=Group)
def command() -> None:
    """Make and list the keys of a pool."""


command.add_command(rotating.command)


@command.command("init")
@common.local_pool_option
@common.output_option
@common.verb
def init(pool: str | None, output: str) -> None:
    """Make a pool's directory with its secret, a user's and an operator's key (mode 0600)."""
    files = pool_files(common.settings(pool=pool))
    description = files.create()
    common.emit({"pool": str(files.root), "id": description.id}, output,
                lambda v: common.out.print(f"pool {v['id']} in {v['pool']}", markup=False))


@command.command("create")
@click.option("--role", type=click.Choice(["user", "operator"]), required=True)
@click.option("--user", default="", metavar="USER", help="Whose key it is (default: of the user called NAME).")
@click.argument("name")
@common.local_pool_option
@common.output_option
@common.verb
def create(role: str, user: str, name: str, pool: str | None, output: str) -> None:
    """Make a key called NAME, authorize it, and print the path of its secret half."""
    files = pool_files(common.settings(pool=pool))
    files.read_description()
    pair = KeyPair.create(role, name, user)
    path = files.root / "keys" / f"{name}.key"
    pair.save(path)
    files.authorized.add(pair.public_key())
    made = {"name": name, "role": role, "user": pair.public_key().holder, "public": pair.public, "path": str(path)}
    common.emit(made, output, lambda v: common.out.print(f"{v['role']} key {v['name']}: {v['path']}", markup=False))


@command.command("invite")
@click.option("--host", default="", metavar="HOST", help="For a host; only one of this name may use it (default: any).")
@click.option("--user", default="", metavar="NAME", help="For a user, who will be called NAME in the pool.")
@click.option("--role", type=click.Choice(["user", "operator"]), default="user", show_default=True,
              help="With --user: what NAME may do.")
@click.option("--expires", default="60m", show_default=True, metavar="TIME", help="How long it may be used: 90s, 60m, "
              "24h, 7d at most.")
@common.pool_option
@common.output_option
@common.verb
def invite(host: str, user: str, role: str, expires: str, pool: str | None, output: str) -> None:
    """Print an invitation: with it one host may join (`rgpu server --join`), or one user (`rgpu login`).

    It works once. Its holder can become a node of the pool, or that user: hand it
    over as you would a key (RGPU_JOIN keeps it off command lines).
    """
    from rgpu.link import invitations

    if host and user:
        raise UsageError("an invitation is for a host or for a user: give --host or --user")
    if role != "user" and not user:
        raise UsageError("--role goes with --user NAME")
    pair, seconds, role = invitations.new_pair(), parse_age(expires), role if user else "node"
    with connect(common.settings(pool=pool), role="operator") as client:
        made = client.call("keys.invite", {"name": pair.name, "public": pair.public, "host": host, "seconds": seconds,
                                           "role": role, "member": user})
        if user and (made.get("role"), made.get("member")) != (role, user):
            raise VersionMismatch("the pool's coordinator is older and invites hosts only; the invitation that it made "
                                  f"was not printed and expires within {expires}: upgrade the nodes first")
        known = client.call("pool.ping", {})["endpoints"]
    token = invitations.encode(invitations.Token(
        pool=made["pool"], name=pair.name, public=pair.public, secret=pair.secret, expires=made["expires"],
        endpoints=[Endpoint(e["address"], e["public"], e["host"]) for e in known][:MOST], role=role, member=user))
    common.emit({"token": token, "name": pair.name, "host": host, "expires": made["expires"], "user": user,
                 "role": role}, output, lambda v: common.out.print(v["token"], markup=False))


@command.command("list")
@common.pool_option
@common.output_option
@common.verb
def list_keys(pool: str | None, output: str) -> None:
    """List the pool's public keys; if it does not run, those in its folder."""
    settings = common.settings(pool=pool)
    files = pool_files(settings)
    files.read_description()
    rows: list[dict[str, Any]] = [
        {"name": k.name, "role": k.role, "user": k.holder, "public": k.public} for k in files.authorized.all()]
    try:
        with connect(settings) as client:
            rows = client.call("keys.list", {})["keys"]
    except (PoolUnavailable, NotFound):
        common.err.print("no node answers: these are the keys of this folder alone")
    common.emit(rows, output, lambda values: common.table(
        ("NAME", "ROLE", "USER", "PUBLIC KEY"),
        ((v["name"], v["role"], v.get("user"), v["public"]) for v in values), drop=("PUBLIC KEY", "USER")))


@command.command("revoke")
@click.argument("name")
@click.option("--checkpoint", is_flag=True, help="Take a checkpoint of each session that the key runs before it ends.")
@asking.yes_option
@common.pool_option
@common.output_option
@common.verb
def revoke(name: str, checkpoint: bool, yes: bool, pool: str | None, output: str) -> None:
    """Refuse the key called NAME from now on, and end its sessions; returns when every node does.

    Its holder needs another key to be let in again. For the last operator's key it asks; without a terminal it needs
    --yes.
    """
    settings = common.settings(pool=pool)
    pool_files(settings).read_description()
    last = revoking.consequences(name, revoking.known_keys(settings))
    if last:
        asking.confirm(yes, lambda: last, always=True)
    value = revoking.revoke(settings, name, checkpoint=checkpoint, last=bool(last))
    common.emit({"revoked": name, "silent": sorted(value["not_yet"]), **value}, output, _show_revoked)
    for host, why in value["not_yet"].items():
        common.err.print(f"not yet on {host}: {why}", markup=False)
    if value["not_yet"]:
        sys.exit(PoolUnavailable.exit_code)


def _show_revoked(value: dict[str, Any]) -> None:
    ended = f"; ended {', '.join(value['sessions'])}" if value["sessions"] else ""
    common.out.print(f"revoked {value['name']}{ended}", markup=False)
