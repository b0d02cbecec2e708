"""What the etcd registry does when etcd is slow, cut off, compacted, full, frozen, restored, or loses its leader."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rgpu.migrate.membership.leases import NODE_SLOT, LeaseKeeper
from rgpu.migrate.registry.base import Compacted, Delete, Put, absent, created, txn_certain, unchanged
from rgpu.migrate.registry.clock import boot_time_ns
from rgpu.migrate.registry.etcd import registry as etcd
from rgpu.migrate.registry.etcd import rpc as etcd_rpc
from rgpu.migrate.registry.etcd.registry import EtcdRegistry
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError, UnknownOutcome
from tests.support.eventually import eventually_async
from tests.support.pools.proxy import Proxy
from tests.support.registry.etcd_cluster import EtcdCluster, Member, needs_etcd
from tests.support.registry.etcd_use import Follower, eventually, prefix, use, works

pytestmark = needs_etcd



@pytest.fixture
def single(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), size=3) as cluster:
        yield cluster


@pytest.fixture
def three(shared_three: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members; whatever a test did to them is undone."""
    yield shared_three
    for member in shared_three.members:
        if member.process is None:
            shared_three.start(member)
        else:
            member.resume()
    shared_three.wait_ready()


@pytest.fixture
def proxies(three: EtcdCluster) -> Iterator[list[Proxy]]:
    """One in front of each member, for clients."""
    made = [Proxy(("127.0.0.1", member.client)) for member in three.members]
    yield made
    for proxy in made:
        proxy.close()


def through(proxies: list[Proxy], **options: object) -> str:
    endpoints = ",".join(f"127.0.0.1:{proxy.address[1]}" for proxy in proxies)
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"etcd://{endpoints}/{prefix()}?{query}" if query else f"etcd://{endpoints}/{prefix()}"


# -- slow and cut off -----------------------------------------------------------------


def test_a_slow_etcd_is_only_slow(proxies: list[Proxy]) -> None:
    async def test(registry: EtcdRegistry) -> None:
        for proxy in proxies:
            proxy.late = 0.1
            proxy.set("delay")
        first = await registry.put_if(absent("a"), b"1")
        assert await registry.put_if(unchanged("a", first), b"2") > first
        follower = Follower(registry, "", first + 1)
        await follower.reached(first + 1)
        await follower.stop()

    use(through(proxies), test)


def test_too_slow_is_unknown_and_is_read_back(proxies: list[Proxy]) -> None:
    """The change is made, its answer comes too late: unknown, never "failed"; and it is made once."""
    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"1")
        for proxy in proxies:
            proxy.late = 1.5
            proxy.set("delay")
        with pytest.raises((UnknownOutcome, PoolUnavailable)) as caught:
            await registry.txn([unchanged("a", first)], [Put("a", b"2")])
        sent = isinstance(caught.value, UnknownOutcome)
        for proxy in proxies:
            proxy.set("pass")
        result = await eventually(lambda: txn_certain(registry, [unchanged("a", first)], [Put("a", b"2")]))
        entry = await registry.get("a")
        assert entry is not None and entry.value == b"2" and entry.mod_revision == first + 1
        assert result.succeeded != sent or not sent or entry.mod_revision == first + 1

    use(through(proxies, timeout=1), test)


def test_a_member_that_clients_do_not_reach_is_left(proxies: list[Proxy]) -> None:
    """Held (nothing comes back) or refused: the others answer, and watches go on in order, without gaps."""
    async def test(registry: EtcdRegistry) -> None:
        start = await registry.revision()
        follower = Follower(registry, "", start + 1)
        revisions = []
        for index, mode in itertools.product(range(3), ("stall", "drop")):
            proxies[index].set(mode)
            for number in range(3):
                key = f"{mode}-{index}-{number}"
                began = time.monotonic()
                result = await txn_certain(registry, [absent(key)], [Put(key, b"")])
                assert result.succeeded and time.monotonic() - began < 12
                entry = await registry.get(key)
                assert entry is not None
                revisions.append(entry.mod_revision)
            proxies[index].set("pass")
        await follower.reached(revisions[-1])
        await follower.stop()
        assert [change.revision for change in follower.changes] == revisions

    use(through(proxies, timeout=2), test)


def test_nobody_there_is_unavailable_and_nothing_was_changed(proxies: list[Proxy]) -> None:
    async def test(registry: EtcdRegistry) -> None:
        for proxy in proxies:
            proxy.set("drop")
        began = time.monotonic()
        for work in (registry.get("a"), registry.lease_grant(5), registry.revision()):
            with pytest.raises(PoolUnavailable, match="no member"):
                await work
        await asyncio.sleep(0.2)  # the connections are known to be gone
        with pytest.raises(PoolUnavailable):
            await registry.txn([], [Put("a", b"1")])
        assert time.monotonic() - began < 12
        for proxy in proxies:
            proxy.set("pass")
        assert await eventually(lambda: registry.get("a")) is None

    use(through(proxies, timeout=1), test)


# -- members frozen and killed ----------------------------------------------------------


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_a_frozen_member(three: EtcdCluster, which: str) -> None:
    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"0")
        member = three.leader() if which == "leader" else three.followers()[0]
        registry._client._at = three.members.index(member)  # the watch is with it, and so is what is asked next
        follower = Follower(registry, "", first)
        await follower.reached(first)
        member.pause()
        revision = first
        for number in range(5):
            put, compare = [Put("a", b"%d" % number)], [unchanged("a", revision)]
            assert (await eventually(lambda put=put, compare=compare: txn_certain(registry, compare, put))).succeeded
            entry = await eventually(lambda: registry.get("a"))
            revision = entry.mod_revision
        await follower.reached(revision)  # while it is frozen
        await follower.stop()
        assert [change.revision for change in follower.changes] == list(range(first, first + 6))

    use(three.address(prefix(), timeout=2), test)


def test_a_majority_frozen_is_said_at_once_and_watches_return(three: EtcdCluster) -> None:
    """A member without a leader must not look like a quiet one."""
    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"0")
        follower = Follower(registry, "", first + 1)
        away = three.followers()
        for member in away:
            member.pause()
        with pytest.raises((PoolUnavailable, UnknownOutcome)):
            await registry.txn([unchanged("a", first)], [Put("a", b"1")])
        await asyncio.sleep(3.0)
        until = time.monotonic() + 30
        while True:
            with pytest.raises(PoolUnavailable) as caught:
                await registry.get("a")  # no read that might be old
            if "no leader" in caught.value.message:  # else the one that lives had no time to say so
                break
            assert time.monotonic() < until, caught.value.message
        for member in away:
            member.resume()
        await eventually(lambda: txn_certain(registry, [unchanged("a", first)], [Put("a", b"1")]))
        entry = await eventually(lambda: registry.get("a"))
        assert entry.value == b"1" and entry.mod_revision == first + 1
        await follower.reached(first + 1)
        await follower.stop()

    use(three.address(prefix(), timeout=2), test)


def test_the_leader_killed_during_operations(three: EtcdCluster) -> None:
    """Counters raised by compare-and-swap while leaders die: every success counts once, and nothing else does."""
    async def test(registry: EtcdRegistry) -> None:
        start = await registry.revision()
        follower = Follower(registry, "count/", start + 1)
        done = asyncio.Event()
        successes = [0, 0, 0]

        async def count(worker: int, client: EtcdRegistry) -> None:
            key = f"count/{worker}"  # of its own: reading back cannot tell "lost" from "overwritten since"
            while not done.is_set():
                entry = await eventually(lambda: client.get(key))
                number, revision = (int(entry.value), entry.mod_revision) if entry else (0, 0)
                put, unknown = [Put(key, b"%d" % (number + 1))], False
                while True:
                    try:
                        result = await txn_certain(client, [unchanged(key, revision)], put)
                        break
                    except UnknownOutcome:  # still not known: the same one again, which fails if this one was done
                        unknown = True
                        await asyncio.sleep(0.1)
                    except PoolUnavailable:
                        await asyncio.sleep(0.1)
                successes[worker] += result.succeeded or unknown  # nobody else writes this key

        clients = [await EtcdRegistry.open(three.address(registry._client.address.prefix, timeout=2)) for _ in range(3)]
        counting = [asyncio.ensure_future(count(n, client)) for n, client in enumerate(clients)]
        for _ in range(3):
            await asyncio.sleep(1.0)
            leader = await asyncio.to_thread(three.leader)
            leader.kill()
            await asyncio.sleep(3.0)
            three.start(leader)
            await asyncio.to_thread(three.wait_ready)
        done.set()
        await asyncio.gather(*counting)
        entries = (await eventually(lambda: registry.list("count/"))).entries
        assert sum(int(entry.value) for entry in entries) == sum(successes) > 10
        last = max(entry.mod_revision for entry in entries)
        await follower.reached(last)
        await follower.stop()
        seen = [change.revision for change in follower.changes]
        assert seen == sorted(set(seen)) and len(seen) == sum(successes), "each change once, in order"
        for client in clients:
            await client.close()

    use(three.address(prefix(), timeout=2), test)


def test_leases_outlive_their_leader(three: EtcdCluster) -> None:
    """The keeper, a process of its own, keeps a lease of five seconds while the raft leader is killed."""
    async def test(registry: EtcdRegistry) -> None:
        keeper = LeaseKeeper(three.address(registry._client.address.prefix))
        try:
            asked = boot_time_ns()
            lease = await registry.lease_grant(5.0)
            first = await registry.put_if(absent("nodes/a"), b"", lease)
            kept = keeper.keep(NODE_SLOT, lease, 5.0, asked)
            await asyncio.sleep(2.0)
            leader = await asyncio.to_thread(three.leader)
            leader.kill()
            await asyncio.sleep(8.0)
            entry = await eventually(lambda: registry.get("nodes/a"))
            assert entry is not None and entry.create_revision == first, "the lease was lost"
            assert kept.in_time()
            await registry.lease_revoke(lease)
            await eventually_async(lambda: not kept.deadline(), "the keeper did not notice that the lease had ended", 5)
        finally:
            keeper.close()

    use(three.address(prefix()), test)


# -- compacted, full, restored -----------------------------------------------------------


def test_compacted_under_a_watch_that_lost_its_stream(three: EtcdCluster) -> None:
    proxy = Proxy(("127.0.0.1", three.members[0].client))

    async def test(registry: EtcdRegistry) -> None:
        writer = await EtcdRegistry.open(three.address(registry._client.address.prefix))
        first = await writer.put_if(absent("a"), b"0")
        follower = Follower(registry, "", first)
        await follower.reached(first)
        proxy.set("drop")
        for number in range(10):
            await writer.txn([], [Put("a", b"%d" % number)])
        await writer.compact(await writer.revision())
        proxy.set("pass")
        with pytest.raises(Compacted):
            await asyncio.wait_for(follower.task, 30)
        listing = await registry.list("")  # and so the watcher lists again, and watches from there
        last = await writer.put_if(unchanged("a", listing.entries[0].mod_revision), b"after")
        follower = Follower(registry, "", listing.revision + 1)
        await follower.reached(last)
        await follower.stop()
        await writer.close()

    use(through([proxy]).replace("faults/", "faults/compacted-"), test)
    proxy.close()


def test_a_deletion_at_the_compacted_revision_is_not_missed(single: EtcdCluster) -> None:
    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"0")
        deleted = (await registry.txn([], [Delete("a")])).revision
        after = (await registry.txn([], [Put("b", b"0")])).revision
        await registry.compact(deleted)
        follower = Follower(registry, "", deleted)
        with pytest.raises(Compacted):
            await asyncio.wait_for(follower.task, 30)
        follower = Follower(registry, "", after)
        await follower.reached(after)
        await follower.stop()
        assert first < deleted and [change.revision for change in follower.changes] == [after]

    use(single.address(prefix()), test)


def test_more_changes_than_one_message_takes(single: EtcdCluster) -> None:
    """A watch from far back: etcd sends a thousand revisions at once, in fragments only if it is asked for them."""
    async def test(registry: EtcdRegistry) -> None:
        start = await registry.revision()
        last = start
        for number in range(70):
            last = (await registry.txn([], [Put(f"k{number}", bytes(1_000_000))])).revision
        follower = Follower(registry, "", start + 1)
        await follower.reached(last, 60)
        await follower.stop()
        assert [change.revision for change in follower.changes] == list(range(start + 1, last + 1))

    use(single.address(prefix(), timeout=60), test)  # 70 MB on a loaded machine's disk take their time


def test_a_listing_of_many_pages_is_one_moment(single: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "PAGE", 7)

    async def test(registry: EtcdRegistry) -> None:
        await registry.txn([], [Put(f"p/{number:03}", b"0") for number in range(100)])
        await registry.txn([], [Put("q", b"")])

        async def write() -> None:
            for number in range(60):
                value = b"%d" % number
                result = await registry.txn([], [Put(f"p/{at:03}", value) for at in range(0, 100, 3)])
                if number % 20 == 19:
                    await registry.compact(result.revision)

        writing = asyncio.ensure_future(write())
        while not writing.done():
            listing = await registry.list("p/")
            assert [entry.key for entry in listing.entries] == [f"p/{number:03}" for number in range(100)]
            assert len({entry.value for entry in listing.entries[::3]}) == 1
        await writing

    use(single.address(prefix()), test)


def test_the_space_alarm(tmp_path: Path) -> None:
    """Full: writes are refused with what to do; reads, keep-alives and watches go on; then it is mended."""
    with EtcdCluster(tmp_path / "etcd", arguments=("--quota-backend-bytes", str(16 << 20))) as cluster:
        async def test(registry: EtcdRegistry) -> None:
            lease = await registry.lease_grant(30)
            first = await registry.put_if(absent("a"), b"1", lease)
            with pytest.raises(PoolUnavailable, match="space alarm") as caught:
                for _ in range(60):
                    await registry.txn([], [Put("big", bytes(1_000_000))])
            assert caught.value.detail["reason"] == "space"
            with pytest.raises(PoolUnavailable, match="space alarm"):
                await registry.txn([unchanged("a", first)], [Put("a", b"2")])
            entry = await registry.get("a")
            assert entry is not None and entry.value == b"1" and await registry.keepalive(lease) > 20
            rpc, member = etcd_rpc.load(), cluster.members[0]
            await registry.compact(await registry.revision())
            cluster.ask(member, "Maintenance.Defragment", rpc.DefragmentRequest(), seconds=30)
            cluster.ask(member, "Maintenance.Alarm", rpc.AlarmRequest(
                action=rpc.AlarmRequest.DEACTIVATE, memberID=cluster.status(member).header.member_id, alarm=1))
            assert await registry.put_if(unchanged("a", first), b"2") > first

        use(cluster.address(prefix()), test)


@pytest.mark.parametrize("how", ["restored", "wiped", "restarted"])
def test_a_registry_that_went_back(single: EtcdCluster, tmp_path: Path, how: str) -> None:
    """Restored from a backup, or empty: nothing is read from it and nothing written, by anybody who remembers."""
    seen = tmp_path / "registry.json"
    member, address = single.members[0], single.address(prefix(), timeout=2)
    data, backup = member.folder / "data", member.folder / "backup"

    def again(change: Callable[[], object] = lambda: None) -> None:
        member.kill()
        change()
        single.start(member)
        single.wait_ready()

    def restore() -> None:
        shutil.rmtree(data)
        if how == "restored":
            shutil.copytree(backup, data)

    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"1")
        await asyncio.to_thread(again, lambda: shutil.copytree(data, backup))
        second = await eventually(lambda: registry.txn([created("a", first)], [Put("a", b"2")]))
        assert second.succeeded
        await asyncio.to_thread(again, restore if how != "restarted" else lambda: None)
        if how == "restarted":
            entry = await eventually(lambda: registry.get("a"))
            assert entry.value == b"2"
            return
        for attempt in (lambda: registry.get("a"), lambda: registry.list(""), registry.revision,
                        lambda: registry.txn([], [Put("a", b"3")]), lambda: registry.lease_grant(5)):
            with pytest.raises(RgpuError) as caught:
                await attempt()
            if "went back" not in caught.value.message and "identity" not in caught.value.message:
                assert "no member" in caught.value.message  # the connection is being made again
                await asyncio.sleep(0.5)
                with pytest.raises(PoolUnavailable, match="went back|identity"):
                    await attempt()

    use(address, test, seen)
    if how != "restarted":
        with pytest.raises(PoolUnavailable, match="went back|identity"):  # a daemon that is started again remembers
            use(address, lambda registry: registry.revision(), seen)
    use(address, works)  # who has never seen it takes it as it is


def test_data_that_went_back_are_believed_when_a_person_says_so(single: EtcdCluster, tmp_path: Path) -> None:
    """Afterwards it reads, writes and watches; a watch that waited for the other data's revisions is told."""
    seen, member = tmp_path / "registry.json", single.members[0]
    data, backup = member.folder / "data", member.folder / "backup"
    address = single.address(prefix(), timeout=2)

    def set_back() -> None:
        member.kill()
        shutil.rmtree(data)
        shutil.copytree(backup, data)
        single.start(member)
        single.wait_ready()

    def keep() -> None:
        member.kill()
        shutil.copytree(data, backup)
        single.start(member)
        single.wait_ready()

    async def test(registry: EtcdRegistry) -> None:
        first = await registry.put_if(absent("a"), b"1")
        await asyncio.to_thread(keep)
        for number in range(20):
            await eventually(lambda number=number: registry.txn([], [Put("b", b"%d" % number)]))
        follower = Follower(registry, "", await registry.revision() + 1)
        await asyncio.to_thread(set_back)
        until = time.monotonic() + 20
        while not registry.mistrust:
            assert time.monotonic() < until
            with pytest.raises(RgpuError):
                await registry.get("a")
            await asyncio.sleep(0.1)
        fresh = await EtcdRegistry.open(address)
        registry.believe(fresh.cluster_id, await fresh.revision())
        await fresh.close()
        with pytest.raises(Compacted):
            await asyncio.wait_for(follower.task, 30)
        assert registry.mistrust == "" and await registry.get("b") is None
        follower = Follower(registry, "", first + 1)
        last = (await registry.txn([created("a", first)], [Put("a", b"2")])).revision
        await follower.reached(last)
        await follower.stop()

    use(address, test, seen)
    use(address, works, seen)  # a daemon that is started again believes it, too


# -- closing ----------------------------------------------------------------------------------


def test_closing_ends_watches_and_requests(three: EtcdCluster) -> None:
    async def test(registry: EtcdRegistry) -> None:
        follower = Follower(registry, "", 0)
        await asyncio.sleep(0.3)
        await registry.close()
        with pytest.raises(PoolUnavailable, match="closed"):
            await asyncio.wait_for(follower.task, 30)
        with pytest.raises(PoolUnavailable, match="closed"):
            await registry.get("a")

    use(three.address(prefix()), test)


def test_an_ended_lease_is_not_found(three: EtcdCluster) -> None:
    async def test(registry: EtcdRegistry) -> None:
        with pytest.raises(NotFound):
            await registry.keepalive(123456789)
        with pytest.raises(NotFound):
            await registry.txn([], [Put("a", b"1", 123456789)])
        await registry.lease_revoke(123456789)
        lease = await registry.lease_grant(2)
        assert isinstance(lease, int) and lease > 0

    use(three.address(prefix()), test)


def test_members_are_spread_and_any_one_is_enough(three: EtcdCluster) -> None:
    dead: Member = three.followers()[0]
    dead.kill()
    for _ in range(4):
        use(three.address(prefix()), works)
