"""``rgpu keys``: who may talk to the pool."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import pool_files
from rgpu.link.keys import KeyPair


@click.group("keys")
def command() -> None:
    """Make and list the keys of a pool."""


@command.command("init")
@common.pool_option
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
@click.argument("name")
@common.pool_option
@common.output_option
@common.verb
def create(role: str, name: str, pool: str | None, output: str) -> None:
    """Make a key called NAME, authorize it, and print where its secret half lies."""
    files = pool_files(common.settings(pool=pool))
    files.read_description()
    pair = KeyPair.create(role, name)
    path = files.root / "keys" / f"{name}.key"
    pair.save(path)
    files.authorized.add(pair.public_key())
    common.emit({"name": name, "role": role, "public": pair.public, "path": str(path)}, output,
                lambda v: common.out.print(f"{v['role']} key {v['name']}: {v['path']}", markup=False))


@command.command("list")
@common.pool_option
@common.output_option
@common.verb
def list_keys(pool: str | None, output: str) -> None:
    """List the public keys that the pool answers."""
    files = pool_files(common.settings(pool=pool))
    files.read_description()
    rows: list[dict[str, Any]] = [{"name": k.name, "role": k.role, "public": k.public} for k in files.authorized.all()]
    common.emit(rows, output, lambda values: common.table(
        ("NAME", "ROLE", "PUBLIC KEY"), ((v["name"], v["role"], v["public"]) for v in values)))


@command.command("revoke")
@click.argument("name")
@common.pool_option
@common.output_option
@common.verb
def revoke(name: str, pool: str | None, output: str) -> None:
    """Stop answering the key called NAME."""
    files = pool_files(common.settings(pool=pool))
    files.read_description()
    files.authorized.remove(name)
    common.emit({"revoked": name}, output, lambda v: common.out.print(f"revoked {name}", markup=False))
