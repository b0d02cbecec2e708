"""What every implementation of the registry must do. Subclass it, give ``address``, and pytest runs it.

The tests use one event loop each and, where it matters, other processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rgpu.migrate.registry.base import (
    Change,
    Compacted,
    Compare,
    Delete,
    Operation,
    Put,
    Registry,
    TxnResult,
    absent,
    created,
    has_value,
    txn_certain,
    unchanged,
)
from rgpu.migrate.registry.open import open_registry
from rgpu.session.errors import Conflict, NotFound, UnknownOutcome

ROOT = Path(__file__).resolve().parents[3]


def spawn(address: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process at the same registry."""
    return subprocess.Popen([sys.executable, "-m", "tests.support.registry.child", address, *arguments], cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


async def take(registry: Registry, prefix: str, revision: int, count: int, seconds: float = 60.0) -> list[Change]:
    """The first ``count`` changes of a watch."""
    found: list[Change] = []

    async def collect() -> None:
        async for change in registry.watch(prefix, revision):
            found.append(change)
            if len(found) == count:
                return

    await asyncio.wait_for(collect(), seconds)
    return found


class LosesAnswers:
    """A registry whose transactions sometimes have no answer: before or after they were applied."""

    def __init__(self, inner: Registry, plan: Sequence[str]) -> None:
        self._inner = inner
        self._plan = list(plan)  #: for each transaction: "", "request" or "answer"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        lost = self._plan.pop(0) if self._plan else ""
        if lost == "request":
            raise UnknownOutcome("the request was lost")
        result = await self._inner.txn(compares, operations)
        if lost == "answer":
            raise UnknownOutcome("the answer was lost")
        return result


class Conformance:
    """See the module docstring. ``ttl``: a lease that the implementation grants as asked for; ``late``: how much later
    than granted it may end one (seconds both)."""

    ttl = 2.0
    late = 0.1

    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        raise NotImplementedError

    def run(self, address: str, test: Callable[[Registry], Awaitable[None]]) -> None:
        async def body() -> None:
            registry = await open_registry(address)
            try:
                await test(registry)
            finally:
                await registry.close()

        asyncio.run(body())

    # -- entries and transactions -------------------------------------------------
    def test_entries_carry_their_revisions(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            start = await registry.revision()
            assert await registry.get("a") is None
            first = (await registry.txn([absent("a")], [Put("a", b"1")])).revision
            second = await registry.put_if(unchanged("a", first), b"2")
            entry = await registry.get("a")
            assert entry is not None
            assert (entry.value, entry.create_revision, entry.mod_revision) == (b"2", first, second)
            assert start < first < second == await registry.revision()
            gone = await registry.txn([created("a", first)], [Delete("a")])
            assert gone.succeeded and gone.revision == second + 1 and await registry.get("a") is None
            again = (await registry.txn([absent("a")], [Put("a", b"3")])).revision
            fresh = await registry.get("a")
            assert fresh is not None and fresh.create_revision == again

        self.run(address, test)

    def test_a_transaction_is_all_or_nothing(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            await registry.txn([], [Put("a", b"1"), Put("b", b"1")])
            before = await registry.revision()
            refused = await registry.txn([has_value("a", b"1"), has_value("b", b"other")],
                                         [Put("a", b"2"), Put("c", b"2"), Delete("b")])
            assert not refused.succeeded and refused.revision == before == await registry.revision()
            assert refused.entries["b"] is not None and refused.entries["b"].value == b"1"
            done = await registry.txn([has_value("a", b"1"), absent("c")],
                                      [Put("a", b"2"), Put("c", b"2"), Delete("b")])
            listing = await registry.list("")
            assert {entry.key: entry.value for entry in listing.entries} == {"a": b"2", "c": b"2"}
            assert {entry.mod_revision for entry in listing.entries} == {done.revision} == {listing.revision}

        self.run(address, test)

    def test_a_transaction_that_changes_nothing_has_no_revision(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            before = await registry.revision()
            assert (await registry.txn([absent("x")], [])).succeeded
            assert (await registry.txn([], [Delete("x")])).revision == before == await registry.revision()

        self.run(address, test)

    def test_limits(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            for operations in ([Put("a", b""), Delete("a")], [Put(f"{n}", b"") for n in range(129)],
                               [Put("a", bytes(2_000_000))], [Put("", b"")], [Put("k" * 1025, b"")]):
                with pytest.raises(ValueError):
                    await registry.txn([], operations)
            assert (await registry.list("")).entries == ()

        self.run(address, test)

    def test_a_lost_race_is_a_conflict(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            revision = await registry.put_if(absent("a"), b"1")
            await registry.put_if(unchanged("a", revision), b"2")
            for compare in (unchanged("a", revision), absent("a")):
                with pytest.raises(Conflict):
                    await registry.put_if(compare, b"3")

        self.run(address, test)

    def test_a_listing_is_one_moment(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            await registry.txn([], [Put(key, b"1") for key in ("p/b", "p/a", "p0", "o", "p/%")])
            assert [entry.key for entry in (await registry.list("p/")).entries] == ["p/%", "p/a", "p/b"]

            async def write() -> None:
                for number in range(50):
                    await registry.txn([], [Put("p/a", b"%d" % number), Put("p/b", b"%d" % number)])

            writing = asyncio.ensure_future(write())
            while not writing.done():
                values = {e.key: e.value for e in (await registry.list("p/")).entries}
                assert values["p/a"] == values["p/b"]
            await writing

        self.run(address, test)

    # -- several processes ----------------------------------------------------------
    def test_compare_and_swap_between_processes(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            children = [spawn(address, "count", "number", "40") for _ in range(3)]
            lost = [int(child.communicate(timeout=60)[0]) for child in children]
            entry = await registry.get("number")
            assert entry is not None and entry.value == b"120"
            assert entry.mod_revision - entry.create_revision == 119, f"races lost: {lost}"

        self.run(address, test)

    def test_a_killed_writer_leaves_whole_transactions(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            seen = 0
            for _ in range(4):
                child = spawn(address, "pairs", "pair/")
                until_ready(child)
                await asyncio.sleep(random.uniform(0.02, 0.2))
                child.kill()
                child.communicate()
                values = {entry.key: int(entry.value) for entry in (await registry.list("pair/")).entries}
                assert values["pair/left"] == values["pair/right"] > 0
                seen += values["pair/left"]
                await registry.txn([], [Put("after", b"%d" % seen)])  # nothing stays locked
            changes = await take(registry, "pair/", 1, 3)
            assert all(len(change.events) == 2 for change in changes)

        self.run(address, test)

    def test_reopening_finds_everything(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            await registry.put_if(absent("a"), b"1")
            other = await open_registry(address)
            assert other.cluster_id == registry.cluster_id
            entry = await other.get("a")
            assert entry == await registry.get("a") and entry is not None
            await other.close()

        self.run(address, test)
        self.run(address, lambda registry: self._has(registry, "a", b"1"))

    async def _has(self, registry: Registry, key: str, value: bytes) -> None:
        entry = await registry.get(key)
        assert entry is not None and entry.value == value

    # -- leases -----------------------------------------------------------------------
    def test_a_lease_takes_its_keys_with_it(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            lease = await registry.lease_grant(self.ttl)
            await registry.txn([], [Put("n/a", b"1", lease), Put("n/b", b"1", lease), Put("n/c", b"1")])
            assert (await registry.get("n/a")).lease == lease  # type: ignore[union-attr]
            for _ in range(4):
                await asyncio.sleep(self.ttl / 2)
                assert 0.7 * self.ttl < await registry.keepalive(lease) <= self.ttl
            assert len((await registry.list("n/")).entries) == 3
            await asyncio.sleep(self.ttl + self.late)
            assert [entry.key for entry in (await registry.list("n/")).entries] == ["n/c"]
            with pytest.raises(NotFound):
                await registry.keepalive(lease)
            with pytest.raises(NotFound):
                await registry.txn([], [Put("n/d", b"1", lease)])

        self.run(address, test)

    def test_the_end_of_a_lease_is_judged_in_the_transaction(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            lease = await registry.lease_grant(self.ttl)
            await registry.txn([absent("leader")], [Put("leader", b"old", lease)])
            assert not (await registry.txn([absent("leader")], [Put("leader", b"new")])).succeeded
            await asyncio.sleep(self.ttl + self.late)
            # The first word that anybody says after the end is this one.
            assert (await registry.txn([absent("leader")], [Put("leader", b"new")])).succeeded

        self.run(address, test)

    def test_revoking(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            lease = await registry.lease_grant(30)
            await registry.txn([], [Put("n", b"1", lease)])
            await registry.lease_revoke(lease)
            assert await registry.get("n") is None
            await registry.lease_revoke(lease)

        self.run(address, test)

    def test_a_put_without_the_lease_detaches(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            lease = await registry.lease_grant(self.ttl)
            await registry.txn([], [Put("n", b"1", lease)])
            await registry.txn([], [Put("n", b"2")])
            await asyncio.sleep(self.ttl + self.late)
            await self._has(registry, "n", b"2")

        self.run(address, test)

    def test_a_frozen_holder_loses_its_lease(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            revision = await registry.revision()
            child = spawn(address, "lease", "nodes/x", str(self.ttl))
            try:
                until_ready(child)
                os.kill(child.pid, signal.SIGSTOP)
                began = time.monotonic()
                _, change = await take(registry, "nodes/", revision + 1, 2)  # made, and gone
                assert change.events[0].key == "nodes/x" and change.events[0].entry is None
                assert time.monotonic() - began < self.ttl + self.late + 8
            finally:
                child.kill()
                child.communicate()

        self.run(address, test)

    # -- watches ------------------------------------------------------------------------
    def test_a_watch_misses_nothing_and_repeats_nothing(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            other = await open_registry(address)
            start = await registry.revision()
            watching = asyncio.ensure_future(take(registry, "w/", start + 1, 60))
            expected = []
            for number in range(60):
                writer = (registry, other)[number % 2]
                operations: list[Operation] = [Put(f"w/{number % 7}", b"%d" % number), Put(f"x/{number}", b"")]
                if number % 5 == 4:
                    operations[0] = Delete(f"w/{(number - 1) % 7}")
                expected.append((await writer.txn([], operations)).revision)
            changes = await watching
            assert [change.revision for change in changes] == expected
            assert all(len(change.events) == 1 and change.events[0].key.startswith("w/") for change in changes)
            await other.close()

        self.run(address, test)

    def test_a_watch_resumes_anywhere(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            start = await registry.revision()
            for number in range(20):
                await registry.txn([], [Put("w/a", b"%d" % number), Put("w/b", b"%d" % number)])
            everything = await take(registry, "w/", start + 1, 20)
            assert [len(change.events) for change in everything] == [2] * 20
            for at in (0, 7, 19):
                rest = await take(registry, "w/", everything[at].revision + 1 - 1, 20 - at)
                assert rest == everything[at:]

        self.run(address, test)

    def test_list_then_watch(self, address: str) -> None:
        """The way every observer keeps a copy: it ends equal to the truth."""
        async def test(registry: Registry) -> None:
            generator = random.Random(4)

            async def write() -> None:
                for number in range(80):
                    key = f"w/{generator.randrange(6)}"
                    await registry.txn([], [Delete(key) if generator.random() < 0.3 else Put(key, b"%d" % number)])
                    await asyncio.sleep(0)
                await registry.txn([], [Put("w/end", b"")])

            writing = asyncio.ensure_future(write())
            while not (listing := await registry.list("w/")).entries:  # in the middle of the writing, not after it
                await asyncio.sleep(0)
            copy = {entry.key: entry.value for entry in listing.entries}
            if "w/end" not in copy:
                async for change in registry.watch("w/", listing.revision + 1):
                    for event in change.events:
                        if event.entry is None:
                            copy.pop(event.key, None)
                        else:
                            copy[event.key] = event.entry.value
                    if "w/end" in copy:
                        break
            await writing
            assert copy == {entry.key: entry.value for entry in (await registry.list("w/")).entries}

        self.run(address, test)

    def test_what_was_compacted_is_said_to_be(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            revisions = [(await registry.txn([], [Put("w/a", b"%d" % n)])).revision for n in range(10)]
            await registry.compact(revisions[4])
            with pytest.raises(Compacted):
                await take(registry, "w/", revisions[4], 1)
            assert [c.revision for c in await take(registry, "w/", revisions[5], 5)] == revisions[5:]
            await self._has(registry, "w/a", b"9")

        self.run(address, test)

    def test_the_end_of_a_lease_reaches_watches_without_any_writer(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            lease = await registry.lease_grant(self.ttl)
            start = (await registry.txn([], [Put("n/a", b"1", lease)])).revision
            (change,) = await take(registry, "n/", start + 1, 1, seconds=self.ttl + self.late + 10)
            assert change.events[0].entry is None and change.revision == start + 1

        self.run(address, test)

    # -- lost answers ---------------------------------------------------------------------
    @pytest.mark.parametrize("plan", [["request"], ["answer"]])
    def test_a_lost_answer_is_read_back(self, address: str, plan: list[str]) -> None:
        async def test(registry: Registry) -> None:
            first = await registry.put_if(absent("s"), b"1")
            lossy: Any = LosesAnswers(registry, plan)
            result = await txn_certain(lossy, [unchanged("s", first)], [Put("s", b"2")])
            entry = await registry.get("s")
            assert result.succeeded and entry is not None and entry.value == b"2"
            assert entry.mod_revision == first + 1, "applied exactly once"

        self.run(address, test)

    def test_a_lost_answer_of_a_lost_race(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            first = await registry.put_if(absent("s"), b"1")
            await registry.put_if(unchanged("s", first), b"theirs")
            lossy: Any = LosesAnswers(registry, ["answer"])
            assert not (await txn_certain(lossy, [unchanged("s", first)], [Put("s", b"ours")])).succeeded
            await self._has(registry, "s", b"theirs")

        self.run(address, test)

    def test_what_stays_unknown_is_said_to_be(self, address: str) -> None:
        async def test(registry: Registry) -> None:
            first = await registry.put_if(absent("s"), b"1")
            lossy: Any = LosesAnswers(registry, ["request", "request"])
            with pytest.raises(UnknownOutcome):
                await txn_certain(lossy, [unchanged("s", first)], [Put("s", b"2")])
            with pytest.raises(ValueError, match="read back"):
                await txn_certain(registry, [has_value("s", b"1")], [Put("s", b"2")])

        self.run(address, test)
