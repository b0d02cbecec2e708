"""Keys that are taken away: which one is meant, whether it is the last operator's, and until no node lets it in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rgpu.cli.pool import connect, pool_files
from rgpu.cli.settings import Settings
from rgpu.cli.tables import did_you_mean
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.session.errors import AuthenticationFailed, NotFound, PoolUnavailable, RgpuError, TimedOut

ASK_SECONDS = 3.0
LOOK_SECONDS = 0.2


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


def wait_revoked(settings: Settings, public: str) -> list[str]:
    """Wait until no node that answers lets the key in; those that did not answer.

    Raises :class:`TimedOut` with the nodes that let it in still.
    """
    files = pool_files(settings)
    try:
        pair = KeyPair.load(files.key_path(_asker(files)))
        with connect(settings, role=_asker(files)) as client:
            known = client.call("pool.ping", {}, timeout=ASK_SECONDS)["endpoints"]
    except AuthenticationFailed:  # it was our own
        return []
    except (PoolUnavailable, NotFound):
        return []  # it does not run: whoever is started reads its folder
    silent, until = [], time.monotonic() + settings.timeout
    for one in known:
        try:
            while _lets_in(pair, Endpoint(one["address"], one["public"], one["host"]), public):
                if time.monotonic() > until:
                    raise TimedOut(f"{one['host']} lets the key in still, after {settings.timeout:.0f} s: is its "
                                   "daemon cut off from the registry?", host=one["host"])
                time.sleep(LOOK_SECONDS)
        except PoolUnavailable:
            silent.append(str(one["host"]))
    return silent


def _lets_in(pair: KeyPair, endpoint: Endpoint, public: str) -> bool:
    try:
        with ControlClient(pair, [endpoint]) as client:
            return any(key["public"] == public for key in client.call("keys.list", {}, timeout=ASK_SECONDS)["keys"])
    except AuthenticationFailed:  # our own key is the one that is let in no more
        return False


def _asker(files: PoolFiles) -> str:
    """The role whose key is here: an operator's if there is one."""
    try:
        return "operator" if files.key_path("operator").exists() else "user"
    except RgpuError:
        return "user"
