"""The pool and the registry that a node belongs to: recorded in its folder, with the refusal to serve in another one.

Two registries with one pool's keys are two independent pools: each elects a leader, and both claim
the same sessions. So a node that has served in one registry does not start in another one because an option was left
out or mistyped.

======================================  =====================================================
started with                            a folder that records
======================================  =====================================================
no ``--registry``                       a registry: that one is used. The etcd of an older version,
                                        without its address: refused. Nothing: the embedded one
``embedded``                            etcd: refused
``etcd://…``                            the embedded one: refused. etcd: the data found there
                                        must be this pool's (:func:`judge`)
======================================  =====================================================

The registry's record ``pool/identity`` names its pool; the first node that opens the registry writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from rgpu.link import description
from rgpu.link.keys import KeyPair, PoolDescription, PoolFiles
from rgpu.link.private_files import write_file
from rgpu.migrate.records.keys import IDENTITY, KEYS
from rgpu.migrate.records.schema import IdentityRecord, KeyRecord, decode, encode
from rgpu.migrate.registry.base import Put, Registry, absent, txn_certain
from rgpu.migrate.registry.open import open_registry
from rgpu.session.errors import Corrupt, PoolUnavailable, Refused, RgpuError

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 0.5  #: between two attempts to reach the registry


class Remembered(msgspec.Struct, frozen=True):
    """``nodes/HOST/belongs.json``: the pool that the node serves in, its registry's address and cluster id."""

    pool: str
    registry: str  #: etcd://…, embedded:PATH; ``embedded``: registry.db of the pool's own folder
    cluster: str
    v: int = 1


@dataclass(frozen=True, slots=True)
class Known:
    """The content of the folder about the node called ``host``."""

    host: str
    root: Path
    described: PoolDescription
    remembered: Remembered | None = None
    guarded: str = ""  #: cluster id of the etcd that a node of the folder has seen, by nodes/HOST/registry.json
    embedded: bool = False  #: registry.db is in the folder

    @property
    def registry(self) -> str:
        """Address of the pool's registry, as recorded in the folder; "" where it is not recorded."""
        if self.remembered is not None:
            return self.remembered.registry
        if self.described.registry or self.guarded or not self.embedded:
            return self.described.registry
        return "embedded"

    @property
    def cluster(self) -> str:
        """Cluster id of the registry that the node has served in; "" for a node that has not served."""
        return self.remembered.cluster if self.remembered is not None else self.guarded

    @property
    def at_home(self) -> str:
        """The address of the embedded registry of this folder."""
        return f"embedded:{self.root / 'registry.db'}"


@dataclass(frozen=True, slots=True)
class Found:
    """Identity of a registry. ``pool``: the pool that it holds, "" where that was never written."""

    address: str
    cluster: str
    pool: str
    members: tuple[str, ...]  #: public keys on record


def look(files: PoolFiles, host: str) -> Known:
    """Read the folder's records about a node. Raises :class:`NotFound`, :class:`Corrupt`."""
    node = files.node_directory(host)
    guards = [node / "registry.json", *sorted(files.root.glob("nodes/*/registry.json"))]
    return Known(host, files.root, files.read_description(), _remembered(node / "belongs.json"),
                 next(filter(None, map(_guarded, guards)), ""), (files.root / "registry.db").exists())


def choose(said: str, known: Known) -> str:
    """Return the address of the registry to open; ``said``: the option, "" without one. Raises :class:`Refused`."""
    pool, registry = known.described.id, known.registry
    if known.remembered is not None and known.remembered.pool != pool:
        raise Refused(f"{known.host} belongs to pool {known.remembered.pool} (registry {without_options(registry)}), "
                      f"and {known.root}/pool.json describes pool {pool}: put the pool's own pool.json back, or start "
                      "with another folder (--pool)", pool=known.remembered.pool, registry=registry)
    belongs = f"{known.host} belongs to pool {pool}, whose registry is"
    if said in ("", "embedded") and not registry and known.guarded:
        raise Refused(f"{belongs} in etcd (data {known.guarded}), and this folder does not say where: start it with "
                      "the --registry etcd://… (or RGPU_REGISTRY) that it had before", pool=pool)
    if not said:
        return known.at_home if registry in ("", "embedded") else registry
    if said == "embedded":
        if registry.startswith("etcd"):
            raise Refused(f"{belongs} {without_options(registry)}, not the embedded one: start it without --registry, "
                          "which takes that one", pool=pool, registry=registry)
        return known.at_home if registry in ("", "embedded") else registry
    if registry.startswith("embedded"):
        where = known.at_home if registry == "embedded" else registry
        raise Refused(f"{belongs} {where}, not {without_options(said)}: start it without --registry; a pool of several "
                      "hosts begins with `rgpu keys init` in a fresh folder", pool=pool, registry=where)
    return said


def judge(known: Known, found: Found, ours: Iterable[str]) -> str:
    """Return why the data found are this pool's. ``ours``: public keys that this folder admits or holds.

    Raises :class:`Refused` where they are not. The same address with other data passes here and is left to the
    registry's guard: the data were wiped or restored, and `rgpu pool adopt` repairs that.
    """
    pool, where = known.described.id, without_options(found.address)
    home = f"{known.host} belongs to pool {pool}" + (
        f" (registry {without_options(known.registry)})" if known.registry else "")
    if found.pool and found.pool != pool:
        raise Refused(f"{home}, and {where} holds pool {found.pool}: name this pool's registry, or a prefix of its own "
                      "in that etcd", pool=pool, registry=found.address, holds=found.pool)
    if found.pool:
        return f"{where} holds pool {pool}"
    if known.cluster and found.cluster != known.cluster:
        if found.address == known.registry:
            return f"{where} is the pool's address, with other data than before"
        raise Refused(f"{home}, and {where} holds other data than those it served by ({found.cluster}, not "
                      f"{known.cluster}): start it without --registry, which takes the pool's own", pool=pool,
                      registry=found.address)
    if not known.cluster and found.members and not set(found.members) & set(ours):
        raise Refused(f"{home}, and {where} holds another pool, none of whose keys is known here: name a prefix of its "
                      "own for this pool", pool=pool, registry=found.address)
    return f"{where} is new to pool {pool}" if not found.members else f"{where} knows keys of pool {pool}"


async def read(address: str) -> Found:
    """Read the identity of the registry at ``address``. Raises what opening and reading it raise."""
    registry = await open_registry(address)
    try:
        entry = await registry.get(IDENTITY)
        keys = []
        for one in (await registry.list(KEYS)).entries:
            with contextlib.suppress(RgpuError):
                keys.append(decode(one.value, KeyRecord, one.key).public)
        return Found(address, registry.cluster_id, decode(entry.value, IdentityRecord, IDENTITY).pool if entry else "",
                     tuple(keys))
    finally:
        await registry.close()


def ours(files: PoolFiles, host: str) -> set[str]:
    """Public keys by which the folder recognises its pool: admitted ones, its node's, and its peers'."""
    known = {key.public for key in files.authorized.all()}
    if files.node_key_path(host).exists():
        known.add(KeyPair.load(files.node_key_path(host)).public)
    return known | {endpoint.public for endpoint in files.read_description().endpoints}


async def settle(files: PoolFiles, host: str, address: str, stopping: asyncio.Event) -> None:
    """Check that the registry at ``address`` holds this node's pool, and record that in the folder.

    Waits for a registry that does not answer, as the daemon does. Raises :class:`Refused`; :class:`PoolUnavailable`
    for an embedded one that does not answer, or once ``stopping`` is set.
    """
    known = look(files, host)
    while True:
        try:
            found = await read(address)
            break
        except PoolUnavailable as error:
            if stopping.is_set() or address.startswith("embedded:"):
                raise
            log.warning("waiting for the registry", reason=error.message)
            await asyncio.sleep(AGAIN_SECONDS)
    reason = judge(known, found, ours(files, host))
    remember(files, known, address, found.cluster)
    log.info("the node's pool", host=host, pool=known.described.id, registry=without_options(address), reason=reason)


def remember(files: PoolFiles, known: Known, address: str, cluster: str) -> None:
    """Record the node's registry: in its own folder, and in pool.json for other nodes of this folder."""
    at = "embedded" if address == known.at_home else address
    fresh = Remembered(known.described.id, at, cluster)
    if fresh != known.remembered:
        write_file(files.node_directory(known.host) / "belongs.json", msgspec.json.encode(fresh) + b"\n", mode=0o600,
                   replace=True)

    def how(pool: PoolDescription) -> None:
        pool.registry = "" if at == "embedded" else at

    description.change(files, how)


async def claim(registry: Registry, pool: str) -> None:
    """Write into the registry which pool it holds, if it has no such record yet.

    Raises :class:`Refused` where a node of another pool wrote first, and what the registry raises.
    """
    while (entry := await registry.get(IDENTITY)) is None:
        await txn_certain(registry, [absent(IDENTITY)], [Put(IDENTITY, encode(
            IdentityRecord(pool=pool, since=time.time())))])
    holds = decode(entry.value, IdentityRecord, IDENTITY).pool
    if holds != pool:
        raise Refused(f"this registry has just become pool {holds}'s; this folder belongs to pool {pool}: name a "
                      "prefix of its own for each", pool=pool, holds=holds)


def without_options(address: str) -> str:
    """The address as shown in messages, without options: those may name key files."""
    return address.partition("?")[0]


def _remembered(path: Path) -> Remembered | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Remembered)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Corrupt(f"{path} cannot be read ({error}): remove it if pool.json beside it is right",
                      path=str(path)) from error


def _guarded(path: Path) -> str:
    """The cluster id in the guard's file, "" where it is unreadable: the guard reports errors of that file."""
    try:
        return str(json.loads(path.read_bytes())["cluster"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
