"""Joining of a host to a pool by an invitation: a key of its own, the pool's secret, the registry's address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from rgpu.link import admission
from rgpu.link.invitations import decode
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
from rgpu.link.secrets import write_joined
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.session.errors import AlreadyExists, Corrupt, Refused, UsageError

log = structlog.get_logger(__name__)


def join(files: PoolFiles, host: str, text: str) -> None:
    """Make ``files`` this host's part of the pool; does nothing where it is already.

    The node's secret key is made here and never leaves the host. Raises :class:`UsageError` (the token),
    :class:`AuthenticationFailed` (used, expired, for another host), :class:`AlreadyExists` (the
    folder belongs to another pool, the name to another node), :class:`Refused` (a pool whose
    registry serves one host), :class:`PoolUnavailable`.
    """
    token = decode(text)
    if token.role != "node":
        raise UsageError(f"this invitation is for the {token.role} {token.member}, who uses it by `rgpu login`; a "
                         "host's is made by `rgpu keys invite --host NAME`")
    if files.description_path.exists():
        known = files.read_description().id
        if known != token.pool:
            raise AlreadyExists(f"{files.root} belongs to pool {known}, the invitation is to {token.pool}: name "
                                "another folder with --pool")
        if files.node_key_path(host).exists():
            log.info("this host belongs to the pool already", host=host, pool=known)
            return
    pair = _node_key(files, host)
    answer = admission.ask(token, "pool.join", {"host": host, "public": pair.public})
    registry, cluster = str(answer["registry"]), str(answer["cluster"])
    _check_registry(registry, cluster, host)
    secret = answer["secret"]
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise Corrupt("the pool answered without its secret", reason="secret")
    endpoints = [Endpoint(str(e["address"]), check_public(str(e["public"])), str(e.get("host") or ""))
                 for e in answer["endpoints"]]
    write_file(files.root / "secret", secret, mode=0o600, replace=True)
    write_joined(files, answer.get("secrets"))
    # The description is written last: a folder that has one is complete.
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


def _check_registry(address: str, cluster: str, host: str) -> None:
    """Check that an embedded registry, a file of one host, is the pool's own file (OWNERSHIP 11)."""
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
