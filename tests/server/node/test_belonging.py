"""To which pool and registry a node belongs: each way to start it otherwise than before, and what is said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rgpu.link.keys import PoolDescription, PoolFiles
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.server.node import belonging
from rgpu.server.node.belonging import Found, Known, Remembered
from rgpu.session.errors import Corrupt, Refused

ROOT = Path("/pool")
HERE, ETCD, OTHER = "embedded:/pool/registry.db", "etcd://a:2379,b:2379/p?ca=/ca.pem", "etcd://x:2379/p"
IN_ETCD = Remembered("P", ETCD, "data-1")


def known(*, described: str = "", pool: str = "P", remembered: Remembered | None = None, guarded: str = "",
          embedded: bool = False) -> Known:
    return Known("node-a", ROOT, PoolDescription(id=pool, registry=described), remembered, guarded, embedded)


@pytest.mark.parametrize(("said", "folder", "opened"), [
    ("", known(), HERE), ("embedded", known(), HERE), (ETCD, known(), ETCD),  # a new pool
    ("", known(described=ETCD), ETCD),  # joined, or the folder of another node of it
    ("", known(remembered=IN_ETCD), ETCD), (ETCD, known(remembered=IN_ETCD), ETCD),
    (OTHER, known(remembered=IN_ETCD), OTHER),  # its members moved, or another pool's: what is found there decides
    (ETCD, known(guarded="data-1"), ETCD),  # of an older version
    ("", known(embedded=True), HERE), ("embedded", known(embedded=True), HERE),
    ("", known(remembered=Remembered("P", "embedded", "d")), HERE),
    ("", known(described="embedded:/other/registry.db"), "embedded:/other/registry.db"),
    ("embedded", known(described="embedded:/other/registry.db"), "embedded:/other/registry.db"),
])
def test_what_is_opened(said: str, folder: Known, opened: str) -> None:
    assert belonging.choose(said, folder) == opened


@pytest.mark.parametrize(("said", "folder", "says"), [
    ("embedded", known(remembered=IN_ETCD), r"node-a belongs to pool P, whose registry is etcd://a:2379,b:2379/p, not"),
    ("embedded", known(described=ETCD), "belongs to pool P"),
    ("", known(guarded="data-1", embedded=True), r"in etcd \(data data-1\).*--registry etcd://"),
    ("embedded", known(guarded="data-1"), r"in etcd \(data data-1\)"),
    (ETCD, known(embedded=True), r"whose registry is embedded:/pool/registry.db, not etcd://a:2379,b:2379/p"),
    (ETCD, known(remembered=Remembered("P", "embedded", "d")), "start it without --registry"),
    ("", known(pool="Q", remembered=IN_ETCD), r"belongs to pool P \(registry etcd://.*describes pool Q"),
])
def test_what_is_refused_before_anything_is_opened(said: str, folder: Known, says: str) -> None:
    with pytest.raises(Refused, match=says) as refused:
        belonging.choose(said, folder)
    assert "ca.pem" not in refused.value.message


def found(address: str = ETCD, cluster: str = "data-1", pool: str = "", members: tuple[str, ...] = ()) -> Found:
    return Found(address, cluster, pool, members)


@pytest.mark.parametrize(("folder", "there"), [
    (known(), found()),  # a new pool in a new registry
    (known(), found(pool="P", members=("k",))),  # a host that joined
    (known(described=ETCD), found(members=("ours", "k"))),  # joined, of an older version
    (known(remembered=IN_ETCD), found(pool="P")),
    (known(guarded="data-1"), found(members=("k",))),
    (known(remembered=IN_ETCD), found(address=OTHER)),  # the same data by another address
    (known(remembered=IN_ETCD), found(cluster="data-2")),  # wiped: for the guard, and `rgpu pool adopt`
    (known(remembered=IN_ETCD), found(address=OTHER, cluster="data-2", pool="P")),  # restored elsewhere: the same
])
def test_data_that_are_this_pools(folder: Known, there: Found) -> None:
    assert belonging.judge(folder, there, {"ours"})


@pytest.mark.parametrize(("folder", "there", "says"), [
    (known(), found(pool="Q"), r"belongs to pool P, and etcd://a:2379,b:2379/p holds pool Q"),
    (known(remembered=IN_ETCD), found(pool="Q"), r"pool P \(registry etcd://a.*holds pool Q"),
    (known(remembered=IN_ETCD), found(address=OTHER, cluster="data-2"), "holds other data than those it served by"),
    (known(guarded="data-1"), found(address=OTHER, cluster="data-2"), "holds other data"),
    (known(), found(members=("k",)), "holds another pool, none of whose keys is known here"),
])
def test_data_of_others_are_refused(folder: Known, there: Found, says: str) -> None:
    with pytest.raises(Refused, match=says):
        belonging.judge(folder, there, {"ours"})


def test_settled_once_it_is_remembered(tmp_path: Path) -> None:
    """Two pools by real registries: the first node claims, its folder remembers, the other pool's node is refused."""
    one, two = PoolFiles(tmp_path / "one"), PoolFiles(tmp_path / "two")
    for files in (one, two):
        files.create()
        files.add_node("node-a")

    async def serve(files: PoolFiles, address: str) -> None:
        await belonging.settle(files, "node-a", address, asyncio.Event())
        registry = await EmbeddedRegistry.open(address.partition(":")[2])
        try:
            await belonging.claim(registry, files.read_description().id)
        finally:
            await registry.close()

    at = belonging.choose("", belonging.look(one, "node-a"))
    asyncio.run(serve(one, at))
    asyncio.run(serve(one, at))
    remembered = belonging.look(one, "node-a").remembered
    assert remembered is not None and remembered.registry == "embedded" and remembered.cluster
    assert one.read_description().registry == "", "the folder may be moved"
    with pytest.raises(Refused, match=f"holds pool {one.read_description().id}"):
        asyncio.run(serve(two, at))
    assert belonging.look(two, "node-a").remembered is None
    (one.node_directory("node-a") / "belongs.json").write_text("{")
    with pytest.raises(Corrupt, match=r"belongs\.json cannot be read"):
        belonging.look(one, "node-a")


def test_of_two_pools_that_begin_at_once_one_has_the_registry(tmp_path: Path) -> None:
    async def race() -> list[object]:
        registry = await EmbeddedRegistry.open(tmp_path / "registry.db")
        try:
            return await asyncio.gather(*(belonging.claim(registry, pool) for pool in "PQ"), return_exceptions=True)
        finally:
            await registry.close()

    (tmp_path / "x").mkdir()
    outcome = asyncio.run(race())
    assert outcome.count(None) == 1 and sum(isinstance(one, Refused) for one in outcome) == 1, outcome
