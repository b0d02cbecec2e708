"""Keys that are taken away: which one is meant, whether it is the last operator's, and where it does not hold yet."""

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
    """The keys that the pool lets in, or, of one that does not run, this folder's: {name, role, public}."""
    files = pool_files(settings)
    here = [{"name": key.name, "role": key.role, "public": key.public} for key in files.authorized.all()]
    try:
        with connect(settings, role=_asker(files)) as client:
            there = client.call("keys.list", {}, timeout=ASK_SECONDS)["keys"]
    except (PoolUnavailable, NotFound):
        return here
    return there + [key for key in here if key["public"] not in {one["public"] for one in there}]


def consequences(name: str, keys: Sequence[dict[str, Any]]) -> list[str]:
    """What cannot be done any more when the key is gone; nothing where somebody else still can.

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
    """Have the key taken away: {name, keys, holds, not_yet: {host: why}, sessions} (:class:`Revoking` of the leader).

    Of a pool that does not run this folder remembers it, and its daemon puts it on record as it starts. Raises what the
    pool answers.
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
