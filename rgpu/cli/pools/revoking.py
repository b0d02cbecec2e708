"""Revoking keys: which key is selected, whether it is the last operator's, and which nodes do not refuse it yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rgpu.api.settings import Settings
from rgpu.cli.pool import connect, pool_files
from rgpu.cli.tables import did_you_mean
from rgpu.link.keys import PoolFiles
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError

ASK_SECONDS = 3.0
REVOKE_SECONDS = 3700.0  #: with checkpoints of what the key runs


def known_keys(settings: Settings) -> list[dict[str, Any]]:
    """Return the keys that the pool accepts and this folder's; only these if it does not run: {name, role, public}."""
    files = pool_files(settings)
    here = [{"name": key.name, "role": key.role, "public": key.public} for key in files.authorized.all()]
    try:
        with connect(settings, role=_asker(files)) as client:
            there = client.call("keys.list", {}, timeout=ASK_SECONDS)["keys"]
    except (PoolUnavailable, NotFound):
        return here
    return there + [key for key in here if key["public"] not in {one["public"] for one in there}]


def consequences(name: str, keys: Sequence[dict[str, Any]]) -> list[str]:
    """Return what cannot be done any more without the key; nothing where another operator's key remains.

    Raises :class:`NotFound` for a name that no key has.
    """
    found = [key for key in keys if key["name"] == name]
    if not found:
        raise NotFound(f"no key is named {name!r}{did_you_mean(name, [str(key['name']) for key in keys])}; `rgpu keys "
                       "list` names them", name=name)
    operators = {str(key["name"]) for key in keys if key["role"] == "operator"}
    if operators != {name}:
        return []
    return [f"{name} is the last operator's key: without one nobody can invite, revoke, cordon or drain (`rgpu keys "
            "create --role operator NAME` makes another)"]


def revoke(settings: Settings, name: str, *, checkpoint: bool, last: bool) -> dict[str, Any]:
    """Revoke a key: {name, keys, holds, not_yet: {host: why}, sessions} (:class:`Revoking` of the leader).

    If the pool does not run, the revocation is stored in this folder, and its daemon records it when it starts. Raises
    the error that the pool answers.
    """
    files = pool_files(settings)
    known = next((key for key in files.authorized.all() if key.name == name), None)
    args = {"name": name, "public": known.public if known else "", "checkpoint": checkpoint, "last": last}
    try:
        with connect(settings, role="operator") as client:
            return dict(client.call("keys.revoke", args, timeout=REVOKE_SECONDS))
    except PoolUnavailable:
        if known is None:
            raise
    files.authorized.revoked.read()
    files.authorized.revoke({known.public: name})
    return {"name": name, "keys": [known.public], "holds": [], "sessions": [],
            "not_yet": {"the pool": f"it does not run; it holds once a node starts in {files.root}"}}


def _asker(files: PoolFiles) -> str:
    """The role whose key is here: an operator's if there is one."""
    try:
        return "operator" if files.key_path("operator").exists() else "user"
    except RgpuError:
        return "user"
