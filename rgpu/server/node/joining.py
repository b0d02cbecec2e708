"""A host joins a pool by its invitation: keys of its own, the pool's secret, where the registry is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import structlog

from rgpu.link.control.control_client import ControlClient
from rgpu.link.invitations import Token, decode
from rgpu.link.keys import (
    SECRET_BYTES,
    Endpoint,
    KeyPair,
    PoolDescription,
    PoolFiles,
    check_public,
    private_directory,
    write_file,
)
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.session.errors import AlreadyExists, AuthenticationFailed, Corrupt, Refused

log = structlog.get_logger(__name__)

#: A node may hear of an invitation a moment after it was made.
LET_IN_SECONDS = 10.0
AGAIN_SECONDS = 0.5


def join(files: PoolFiles, host: str, text: str) -> None:
    """Make ``files`` this host's part of the pool; nothing to do where it is that already.

    The node's secret key is made here and never leaves. Raises :class:`UsageError` (the token),
    :class:`AuthenticationFailed` (used, expired, for another host), :class:`AlreadyExists` (the
    folder belongs to another pool, the name to another node), :class:`Refused` (a pool whose
    registry serves one host), :class:`PoolUnavailable`.
    """
    token = decode(text)
    if files.description_path.exists():
        known = files.read_description().id
        if known != token.pool:
            raise AlreadyExists(f"{files.root} belongs to pool {known}, the invitation is to {token.pool}: name "
                                "another folder with --pool")
        if files.node_key_path(host).exists():
            log.info("this host belongs to the pool already", host=host, pool=known)
            return
    pair = _node_key(files, host)
    answer = _ask(token, host, pair)
    registry, cluster = str(answer["registry"]), str(answer["cluster"])
    _check_registry(registry, cluster, host)
    secret = answer["secret"]
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise Corrupt("the pool answered without its secret", reason="secret")
    endpoints = [Endpoint(str(e["address"]), check_public(str(e["public"])), str(e.get("host") or ""))
                 for e in answer["endpoints"]]
    write_file(files.root / "secret", secret, mode=0o600, replace=True)
    # The description comes last: a folder with one is a whole part of the pool.
    files.write_description(PoolDescription(id=token.pool, endpoints=endpoints, registry=registry))
    log.info("joined", host=host, pool=token.pool, registry=registry)


def _node_key(files: PoolFiles, host: str) -> KeyPair:
    path = files.node_key_path(host)
    if path.exists():
        return KeyPair.load(path)
    private_directory(files.root)
    private_directory(path.parent)
    pair = KeyPair.create("node", host)
    pair.save(path)
    return pair


def _ask(token: Token, host: str, pair: KeyPair) -> dict[str, Any]:
    deadline = time.monotonic() + LET_IN_SECONDS
    with ControlClient(token.keys(), token.endpoints) as client:
        while True:
            try:
                return dict(client.call("pool.join", {"host": host, "public": pair.public}, timeout=30))
            except AuthenticationFailed as error:
                # Only "this key is not known" may pass; an invitation that was used stays used.
                if "address" not in error.detail:
                    raise
                if time.monotonic() > deadline:
                    raise AuthenticationFailed("the pool knows no such invitation: it has expired, was used, or was "
                                               "withdrawn; ask for another one (`rgpu keys invite`)") from error
                time.sleep(AGAIN_SECONDS)


def _check_registry(address: str, cluster: str, host: str) -> None:
    """An embedded registry is a file of one host: it must be the very one (OWNERSHIP 11)."""
    kind, _, place = address.partition(":")
    if kind != "embedded":
        return
    refusal = Refused(f"this pool's registry is a file on another host ({place}): it serves one host; a pool of "
                      f"several needs etcd before {host} can join", registry=address)
    if not Path(place).exists():
        raise refusal

    async def identity() -> str:
        registry = await EmbeddedRegistry.open(Path(place))
        try:
            return registry.cluster_id
        finally:
            await registry.close()

    if asyncio.run(identity()) != cluster:
        raise refusal
