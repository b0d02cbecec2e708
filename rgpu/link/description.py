"""Updates of pool.json: the pool's members as they join and leave, so that no particular one is needed to find it.

A node's daemon writes all members, and removes those that left for good; a client, which cannot detect that, keeps as
many as are worth trying. Every change is one atomic replacement under a lock of the folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Container, Iterable
from typing import Any

from rgpu.link.keys import Endpoint, PoolDescription, PoolFiles, check_public
from rgpu.session.errors import Corrupt

MOST = 16  #: addresses that a client keeps


def _anyone(endpoint: Endpoint) -> bool:
    return True


def merged(known: Iterable[Endpoint], living: Iterable[Endpoint], stays: Callable[[Endpoint], bool] = _anyone,
           most: int | None = None, own_word: Container[str] = ()) -> list[Endpoint]:
    """Return the members to write: living ones first, by name, then those known before that ``stays`` keeps.

    ``living``: the pool's current members; they replace known ones of the same host or key, except hosts in
    ``own_word``, which write their addresses themselves, before they register. ``most``: the longest list to make;
    None: no limit.
    """
    known = list(known)
    written = {(endpoint.host, endpoint.public): endpoint for endpoint in known if endpoint.host in own_word}
    fresh = sorted(dict.fromkeys(written.get((endpoint.host, endpoint.public), endpoint) for endpoint in living),
                   key=lambda endpoint: endpoint.host)
    hosts, keys = {endpoint.host for endpoint in fresh if endpoint.host}, {endpoint.public for endpoint in fresh}
    others = [endpoint for endpoint in dict.fromkeys(known)
              if endpoint.host not in hosts and endpoint.public not in keys and stays(endpoint)]
    return [*fresh, *others][:most]


def named(raw: Any) -> list[Endpoint]:
    """Return the endpoints in a reply of the pool; invalid ones are left out."""
    found = []
    for item in raw if isinstance(raw, list) else []:
        if not isinstance(item, dict):
            continue
        address, public = item.get("address"), item.get("public")
        if isinstance(address, str) and address.startswith("tcp://") and isinstance(public, str):
            try:
                found.append(Endpoint(address, check_public(public), str(item.get("host") or "")))
            except Corrupt:
                continue
    return found


def change(files: PoolFiles, how: Callable[[PoolDescription], None]) -> bool:
    """Change the description by ``how``; return whether it changed. Several processes may do so at once.

    The folder of another user is not changed: that user's daemon could not read the files that root writes.
    Raises :class:`NotFound`, :class:`Corrupt`, :class:`OSError`.
    """
    if os.stat(files.root).st_uid != os.geteuid():
        return False
    with open(os.open(files.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, description = files.read_description(), files.read_description()
        how(description)
        if description == before:
            return False
        files.write_description(description)
        return True


def remember(files: PoolFiles, living: Iterable[Endpoint], stays: Callable[[Endpoint], bool] = _anyone,
             most: int | None = None, own_word: Container[str] = ()) -> bool:
    """Write the members as :func:`merged` orders them; return whether that changed them. Raises as :func:`change`."""
    fresh = list(living)

    def how(description: PoolDescription) -> None:
        description.endpoints = merged(description.endpoints, fresh, stays, most, own_word)

    return change(files, how)


def update_endpoint(files: PoolFiles, endpoint: Endpoint) -> None:
    """Put a node's control address into pool.json, in place of its older one. Raises as :func:`change`."""

    def how(description: PoolDescription) -> None:
        others = [known for known in description.endpoints if known.host != endpoint.host]
        description.endpoints = sorted([*others, endpoint], key=lambda known: known.host)

    change(files, how)


def drop_endpoint(files: PoolFiles, host: str) -> None:
    """Remove a host that left the pool from pool.json. Raises as :func:`change`."""

    def how(description: PoolDescription) -> None:
        description.endpoints = [known for known in description.endpoints if known.host != host]

    change(files, how)
