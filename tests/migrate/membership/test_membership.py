"""Leases kept by a process of their own, membership and election: against freezes, kills and lost leases."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rgpu.migrate.membership.election import Election, current_leader
from rgpu.migrate.membership.lease_keeper import DeadlinePage, Keeper, granted_until, renewal_interval
from rgpu.migrate.membership.leases import NODE_SLOT, LeaseKeeper
from rgpu.migrate.membership.registration import Membership
from rgpu.migrate.records.keys import LEADER, node_key
from rgpu.migrate.records.ownership import Leader
from rgpu.migrate.records.schema import NodeRecord, decode
from rgpu.migrate.registry.clock import NANOSECOND, boot_time_ns
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.session.errors import AlreadyExists, NotFound, PoolUnavailable
from tests.support.eventually import eventually_async

ROOT = Path(__file__).resolve().parents[3]


def record(host: str = "a", incarnation: int = 1) -> NodeRecord:
    return NodeRecord(host=host, incarnation=incarnation, control="tcp://x:1", data="x:2")


def with_registry(folder: Path, test: Callable[[EmbeddedRegistry, LeaseKeeper], Awaitable[None]],
                  patience: float = 10.0) -> None:
    async def body() -> None:
        registry = await EmbeddedRegistry.open(folder / "r.db")
        keeper = LeaseKeeper(f"embedded:{folder / 'r.db'}", patience=patience)
        try:
            await asyncio.wait_for(test(registry, keeper), 60)
        finally:
            keeper.close()
            await registry.close()

    asyncio.run(body())


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> float:
    began = time.monotonic()
    await eventually_async(condition, within=seconds, every=0.01)
    return time.monotonic() - began


def lives(pid: int) -> bool:
    """A process that is neither gone nor only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- the keeper ---------------------------------------------------------------------------


def test_the_deadline_is_from_when_the_keep_alive_was_sent() -> None:
    assert granted_until(7 * NANOSECOND, 5.0) == 11 * NANOSECOND, "granted time less one second"
    assert granted_until(0, 1.0) == NANOSECOND // 2, "a short lease keeps half"
    assert renewal_interval(5.0) == pytest.approx(4 / 3) and renewal_interval(2.0) == pytest.approx(1 / 3)


class Registry:
    """A lease client with answers at will."""

    def __init__(self) -> None:
        self.answers: list[float | Exception] = []
        self.asked = 0

    def keepalive(self, lease: int) -> float:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else 3.0
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_keeper_s_page() -> None:
    page, client = DeadlinePage.create(), Registry()
    keeper = Keeper(client, page, patience=10)
    page.sign_of_life()
    keeper.take("keep 1 77 3.0")
    sent = boot_time_ns()
    assert 0 < keeper.renew_due() <= renewal_interval(3.0)
    assert page.lease(1) == 77 and page.in_time(1)
    assert sent <= page.deadline(1) - 2 * NANOSECOND <= boot_time_ns()
    before = page.deadline(1)
    client.answers = [PoolUnavailable("away")]
    keeper._kept[1].next_at = 0
    keeper.renew_due()
    assert page.deadline(1) == before and page.in_time(1), "an unanswered keep-alive moves no deadline"
    keeper._kept[1].next_at = 0
    client.answers = [NotFound("ended")]
    keeper.renew_due()
    assert page.deadline(1) == 0 and not page.in_time(1)
    keeper.take("drop 1")
    with pytest.raises(ValueError):
        keeper.take("keep everything")
    page.close()


def test_the_keeper_lets_go_for_a_frozen_parent() -> None:
    page, client = DeadlinePage.create(), Registry()
    keeper = Keeper(client, page, patience=1.0)
    page.sign_of_life()
    keeper.take("keep 0 1 3.0")
    time.sleep(1.1)
    keeper.renew_due()
    assert client.asked == 0
    page.sign_of_life()
    keeper.renew_due()
    assert client.asked == 1
    page.close()


def test_a_reader_of_the_page_cannot_write_it() -> None:
    page = DeadlinePage.create()
    reader = DeadlinePage(os.dup(page.fd), writable=False)
    page.write(0, 5, 6, 1)
    assert (reader.deadline(0), reader.lease(0), reader.state(0)) == (5, 6, 1)
    with pytest.raises(TypeError):
        reader.write(0, 1, 1, 1)
    with pytest.raises(ValueError):
        page.deadline(8)
    reader.close()
    page.close()


# -- membership -----------------------------------------------------------------------------


def test_a_node_stays_while_its_loop_is_busy(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        member = Membership(registry, keeper, record(), ttl=4.0)
        await member.start()
        created = (await registry.get(node_key("a"))).create_revision  # type: ignore[union-attr]
        time.sleep(5.0)  # the loop does nothing else, for longer than the lease
        entry = await registry.get(node_key("a"))
        assert entry is not None and entry.create_revision == created and member.in_time()
        assert member.registered_for() > 5.0
        await member.stop()
        assert await registry.get(node_key("a")) is None, "leaving is noticed at once"
        assert member.registered_for() == 0.0

    with_registry(tmp_path, test)


def test_a_dead_keeper_is_replaced(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        member = Membership(registry, keeper, record(), ttl=6.0)
        await member.start()
        kept = member.kept
        assert kept is not None
        created = (await registry.get(node_key("a"))).create_revision  # type: ignore[union-attr]
        old = keeper.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: keeper.pid != old)
        before = kept.deadline()
        await until(lambda: kept.deadline() > before)  # the new one renews it
        entry = await registry.get(node_key("a"))
        assert keeper.pid != old and entry is not None and entry.create_revision == created
        await member.stop()

    with_registry(tmp_path, test)


def test_the_deadline_comes_before_the_lease_ends_and_the_node_returns(tmp_path: Path) -> None:
    """The keeper is frozen: the holder stops acting first, then the registry forgets it, then it comes back."""
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        seen: list[str] = []
        member = Membership(registry, keeper, record(), ttl=3.0, on_lost=lambda: seen.append("lost"),
                            on_return=lambda: seen.append("back"))
        await member.start()
        kept = member.kept
        assert kept is not None
        first = (await registry.get(node_key("a"))).create_revision  # type: ignore[union-attr]
        assert member._task is not None
        member._task.cancel()  # nobody but the keeper renews now
        renewed = kept.deadline()
        await until(lambda: kept.deadline() > renewed)  # just now: it holds no lock when it is frozen
        os.kill(keeper.pid, signal.SIGSTOP)
        try:
            await until(lambda: not kept.in_time())
            assert member.registered_for() == 0.0
            lost = time.monotonic()
            assert await registry.get(node_key("a")) is not None, "it stops before others may take over"
            while await registry.get(node_key("a")) is not None:
                await asyncio.sleep(0.02)
        finally:
            os.kill(keeper.pid, signal.SIGCONT)
        member._task = asyncio.create_task(member._stay())
        await until(lambda: member.in_time())
        await until(lambda: seen == ["lost", "back"])
        entry = await registry.get(node_key("a"))
        assert entry is not None and entry.create_revision > first, "a new place in the pool, not the old one"
        assert 0.0 < member.registered_for() < time.monotonic() - lost, "of the new lease alone"
        await member.stop()

    with_registry(tmp_path, test)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_a_daemon_that_is_gone_loses_its_place_and_a_frozen_one_comes_back(tmp_path: Path, how: signal.Signals) -> None:
    """Its keeper alone must not keep it: it lets go of a frozen parent, and ends with a dead one."""
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        child = subprocess.Popen([sys.executable, "-m", "tests.support.leader.member", f"{tmp_path}/r.db", "2.0"],
                                 cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                                 text=True)
        try:
            assert child.stdout is not None
            line = next(line for line in child.stdout if line.startswith("ready"))
            keeper_pid = int(line.split()[1])
            first = await registry.get(node_key("child"))
            assert first is not None
            os.kill(child.pid, how)
            deadline = time.monotonic() + 20
            while await registry.get(node_key("child")) is not None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            if how is signal.SIGSTOP:
                os.kill(child.pid, signal.SIGCONT)
                while (again := await registry.get(node_key("child"))) is None:
                    assert time.monotonic() < deadline + 20
                    await asyncio.sleep(0.05)
                assert again.create_revision > first.create_revision
        finally:
            child.kill()
            child.communicate()
        await until(lambda: not lives(keeper_pid))  # its input has ended

    with_registry(tmp_path, test)


def test_names(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        member = Membership(registry, keeper, record(), ttl=3.0)
        await member.start()
        other = LeaseKeeper(f"embedded:{tmp_path / 'r.db'}")
        with pytest.raises(AlreadyExists, match="living node"):
            await Membership(registry, other, record(incarnation=2), ttl=3.0).start()
        assert member._task is not None
        member._task.cancel()
        first = (await registry.get(node_key("a"))).create_revision  # type: ignore[union-attr]
        restarted = Membership(registry, other, record(incarnation=2), ttl=3.0, take_over=True)
        began = time.monotonic()
        await restarted.start()
        entry = await registry.get(node_key("a"))
        assert entry is not None and entry.create_revision > first and time.monotonic() - began < 3.0
        assert decode(entry.value, NodeRecord, entry.key).incarnation == 2
        await restarted.update(state="cordoned", reason="by hand")
        entry = await registry.get(node_key("a"))
        assert entry is not None and decode(entry.value, NodeRecord, entry.key).state == "cordoned"
        assert entry.create_revision > first and entry.lease == restarted.kept.lease  # type: ignore[union-attr]
        await restarted.stop()
        other.close()

    with_registry(tmp_path, test)


def test_a_killed_node_s_name_is_free_after_its_lease(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        member = Membership(registry, keeper, record(), ttl=3.0)
        await member.start()
        assert member._task is not None
        member._task.cancel()
        keeper.drop(NODE_SLOT)  # as if its process were gone
        other = LeaseKeeper(f"embedded:{tmp_path / 'r.db'}")
        later = Membership(registry, other, record(incarnation=2), ttl=3.0)
        await later.start()
        assert later.in_time()
        await later.stop()
        other.close()

    with_registry(tmp_path, test)


# -- the election ------------------------------------------------------------------------------


def test_one_leader_at_a_time_and_each_with_a_higher_revision(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        terms: list[Leader] = []
        leading: set[str] = set()

        async def lead(leader: Leader) -> None:
            assert not leading, "two lead"
            leading.add(leader.host)
            terms.append(leader)
            try:
                await asyncio.sleep(60)
            finally:
                leading.discard(leader.host)

        keepers = [LeaseKeeper(f"embedded:{tmp_path / 'r.db'}") for _ in range(3)]
        elections = {host: Election(registry, k, host, 1, 5.0, lead) for host, k in zip("abc", keepers, strict=True)}
        tasks = {host: asyncio.ensure_future(election.run()) for host, election in elections.items()}
        for _ in range(3):
            await until(lambda: bool(leading))
            (host,) = leading
            found = await current_leader(registry)
            assert found is not None and found[1] == terms[-1] == elections[host].leader
            tasks.pop(host).cancel()  # it resigns
            await until(lambda host=host: host not in leading)  # type: ignore[misc]
        assert [t.revision for t in terms] == sorted({t.revision for t in terms}) and len(terms) == 3
        for k in keepers:
            k.close()

    with_registry(tmp_path, test)


def test_a_leader_that_loses_its_lease_stops_leading(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        cancelled = 0

        async def lead(leader: Leader) -> None:
            nonlocal cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                raise

        election = Election(registry, keeper, "a", 1, 5.0, lead)
        task = asyncio.ensure_future(election.run())
        await until(lambda: election.leader is not None)
        first = election.leader
        entry = await registry.get(LEADER)
        assert entry is not None and first is not None
        await registry.lease_revoke(entry.lease)
        await until(lambda: cancelled == 1)
        await until(lambda: election.leader is not None)
        again = election.leader
        assert again is not None and again.revision > first.revision, "elected again, with a new token"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await registry.get(LEADER) is None, "resigning is noticed at once"

    with_registry(tmp_path, test)


def test_a_term_that_fails_is_followed_by_another(tmp_path: Path) -> None:
    async def test(registry: EmbeddedRegistry, keeper: LeaseKeeper) -> None:
        terms = 0

        async def lead(leader: Leader) -> None:
            nonlocal terms
            terms += 1
            raise PoolUnavailable("on purpose")

        task = asyncio.ensure_future(Election(registry, keeper, "a", 1, 1.0, lead).run())
        await until(lambda: terms >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with_registry(tmp_path, test)
