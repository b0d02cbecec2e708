"""The embedded registry: the common suite, and what only a file can get wrong."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import sqlite3
import stat
import time
from pathlib import Path

import pytest

from rgpu.link.inotify import FileWatch
from rgpu.migrate.registry import clock, embedded, place, store
from rgpu.migrate.registry.base import Put, absent
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.migrate.registry.store import Store
from rgpu.session.errors import NotFound, PoolUnavailable, Refused, UnknownOutcome, VersionMismatch
from tests.support.registry.conformance import Conformance


class TestEmbedded(Conformance):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"embedded:{tmp_path / 'registry.db'}"


def test_the_file_is_private(tmp_path: Path) -> None:
    opened = Store(tmp_path / "r.db")
    opened.txn([], [Put("a", b"1")])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    opened.close()
    assert set(modes.values()) == {0o600}, modes
    (tmp_path / "r.db").chmod(0o644)
    with pytest.raises(Refused, match="0644"):
        Store(tmp_path / "r.db")


def test_it_is_durable_and_logged_ahead(tmp_path: Path) -> None:
    opened = Store(tmp_path / "r.db")
    assert opened._db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    assert opened._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    opened.close()


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.file_system_type(Path("/proc")) == 0x9FA0  # the call itself works: PROC_SUPER_MAGIC
    for magic, name in ((0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x65735546, "FUSE")):
        monkeypatch.setattr(place, "file_system_type", lambda path, magic=magic: magic)
        with pytest.raises(Refused, match=name):
            Store(tmp_path / "r.db")
    assert not (tmp_path / "r.db").exists()


def test_a_symbolic_link_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "nowhere" / "r.db"):
        with pytest.raises(PoolUnavailable):
            Store(path)


def test_leases_end_with_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store(tmp_path / "r.db")
    lease = opened.lease_grant(3600)
    opened.txn([], [Put("n", b"1", lease)])
    monkeypatch.setattr(store, "boot_id", lambda: "another boot")
    assert opened.get("n") is None
    opened.close()


def test_a_lease_is_renewed_while_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    opened, other = Store(tmp_path / "r.db", lock_seconds=0.2), Store(tmp_path / "r.db", lock_seconds=0.2)
    lease = opened.lease_grant(0.3)
    opened.txn([], [Put("n", b"1", lease)])
    with open(tmp_path / "r.db.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a writer holds it until its commit is on the disk
        for _ in range(6):
            time.sleep(0.1)
            assert opened.keepalive(lease) == pytest.approx(0.3)
    assert other.get("n") is not None, "its row ended long ago, the lease did not"
    due = other.next_expiry()
    assert due is not None and 0 < due - clock.boot_time_ns() <= 0.3e9
    time.sleep(0.35)
    assert other.get("n") is None
    with pytest.raises(NotFound):
        opened.keepalive(lease)
    opened.close()
    other.close()


def test_of_renewal_and_end_one_comes_first(tmp_path: Path) -> None:
    """A lease that has ended for one process has for all, though its transaction came to nothing; and the reverse."""
    one, two = Store(tmp_path / "r.db"), Store(tmp_path / "r.db")
    kept, lost = one.lease_grant(0.2), one.lease_grant(0.2)
    one.txn([], [Put("kept", b"1", kept), Put("lost", b"1", lost)])
    one.keepalive(kept)
    time.sleep(0.1)
    one.keepalive(kept)
    time.sleep(0.12)
    assert two._over() == [lost]  # and then it is killed
    for store_of in (one, two):
        with pytest.raises(NotFound):
            store_of.keepalive(lost)
    assert one.keepalive(kept) == pytest.approx(0.2)
    assert one.get("lost") is None and one.get("kept") is not None
    one.close()
    two.close()


def test_a_number_that_meant_another_lease_before(tmp_path: Path) -> None:
    """The registry was restored from a copy, the file beside it was not."""
    opened = Store(tmp_path / "r.db")
    number = opened.lease_grant(3600)
    opened._leases.end_due([(number, 0)], clock.boot_time_ns())
    opened._db.execute("DELETE FROM leases")
    opened._db.execute("UPDATE sqlite_sequence SET seq = seq - 1")
    assert opened.lease_grant(3600) == number and opened.keepalive(number) == 3600
    opened.close()


def test_a_registry_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    opened = Store(tmp_path / "r.db")
    lease = opened.lease_grant(3600)
    opened.txn([], [Put("n", b"1", lease)])
    opened._db.execute("PRAGMA user_version = 1")
    opened.close()
    (tmp_path / "r.db.leases").unlink()
    opened = Store(tmp_path / "r.db")
    assert opened.get("n") is not None and opened.keepalive(lease) == 3600
    assert opened._db.execute("PRAGMA user_version").fetchone()[0] == store.SCHEMA_VERSION
    opened.close()


def test_the_clock_is_the_hosts_in_every_time_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(clock.boot_time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) < 10**9
    clock._namespace_offset.cache_clear()
    monkeypatch.setattr(Path, "read_text", lambda self: "monotonic 0 0\nboottime 100 5\n")
    assert clock._namespace_offset() == 100 * 10**9 + 5
    clock._namespace_offset.cache_clear()


def test_a_damaged_file_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    path.touch(mode=0o600)
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(PoolUnavailable, match="not a database"):
        Store(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "r.db").close()
    with sqlite3.connect(tmp_path / "r.db") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(VersionMismatch, match="99"):
        Store(tmp_path / "r.db")


def test_a_frozen_writer_makes_the_registry_unavailable_and_reads_go_on(tmp_path: Path) -> None:
    opened = Store(tmp_path / "r.db", lock_seconds=0.2)
    opened.txn([], [Put("a", b"1")])
    with open(tmp_path / "r.db.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PoolUnavailable, match="holds"):
            opened.txn([], [Put("a", b"2")])
        entry = opened.get("a")
        assert entry is not None and entry.value == b"1"
    assert opened.txn([], [Put("a", b"2")]).succeeded
    opened.close()


def test_a_failing_commit_is_unknown_and_what_comes_before_it_is_not(tmp_path: Path) -> None:
    opened = Store(tmp_path / "r.db")

    class Failing:
        def __init__(self, inner: sqlite3.Connection, word: str) -> None:
            self.inner, self.word = inner, word

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def execute(self, text: str, *arguments: object) -> object:
            if text.startswith(self.word):
                raise sqlite3.OperationalError("disk I/O error")
            return self.inner.execute(text, *arguments)  # type: ignore[arg-type]

    real = opened._db
    for word, error in (("COMMIT", UnknownOutcome), ("INSERT INTO changes", PoolUnavailable)):
        opened._db = Failing(real, word)  # type: ignore[assignment]
        with pytest.raises(error, match="disk I/O"):
            opened.txn([], [Put("a", b"1")])
        opened._db = real
        assert opened.get("a") is None
    assert opened.txn([absent("a")], [Put("a", b"1")]).succeeded
    opened.close()


def test_the_loop_is_not_held(tmp_path: Path) -> None:
    """While a write waits for another process's lock, the loop runs on."""
    async def test() -> None:
        registry = await EmbeddedRegistry.open(tmp_path / "r.db")
        fd = os.open(tmp_path / "r.db.lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        writing = asyncio.ensure_future(registry.txn([], [Put("a", b"1")]))
        for _ in range(10):  # a write that held the loop would have failed, after 5 s, before the first of them
            await asyncio.sleep(0.01)
            assert not writing.done()
        os.close(fd)
        assert (await writing).succeeded
        await registry.close()

    asyncio.run(test())


def test_closing_ends_watches(tmp_path: Path) -> None:
    async def test() -> None:
        registry = await EmbeddedRegistry.open(tmp_path / "r.db")

        async def watch() -> None:
            async for _ in registry.watch("a/"):
                pass

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0.05)
        await registry.close()
        with pytest.raises(PoolUnavailable):
            await asyncio.wait_for(watching, 30)
        await registry.close()

    asyncio.run(test())


def test_old_changes_are_forgotten_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEEP_CHANGES", 20)
    monkeypatch.setattr(store, "_COMPACT_EVERY", 10)
    opened = Store(tmp_path / "r.db")
    for number in range(100):
        opened.txn([], [Put("a", b"%d" % number)])
    assert opened._db.execute("SELECT count(*) FROM changes").fetchone()[0] <= 30
    opened.close()


def test_commits_of_other_processes_are_told_and_an_idle_registry_is_left_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With looks an hour apart, watches hear of commits, of a committer's death and of leases that end."""
    monkeypatch.setattr(embedded, "LOOK_SECONDS", 3600.0)

    async def test() -> None:
        registry = await EmbeddedRegistry.open(tmp_path / "registry.db")
        other = Store(tmp_path / "registry.db")
        watch = registry.watch("a/")
        coming = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.3)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        await asyncio.sleep(1.0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - used < 10, "nothing wakes it"
        other.txn([], [Put("a/1", b"1")])
        assert (await asyncio.wait_for(coming, 5)).events[0].key == "a/1"
        lease = other.lease_grant(0.5)
        coming = asyncio.ensure_future(anext(watch))
        other.txn([], [Put("a/2", b"2", lease)])
        assert (await asyncio.wait_for(coming, 5)).events[0].entry is not None
        assert (await asyncio.wait_for(anext(watch), 5)).events[0].entry is None, "its lease is over"
        # One that dies between its commit and the sign of it: the sign is never written, its file is closed.
        coming = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.3)  # the sign of that end is over
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: 0)
            other.txn([], [Put("a/3", b"3")])
        await asyncio.sleep(0.3)
        assert not coming.done()
        other.close()
        assert (await asyncio.wait_for(coming, 5)).events[0].key == "a/3"
        await watch.aclose()
        await registry.close()

    asyncio.run(test())


def test_watches_go_on_where_the_kernel_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(watch: FileWatch) -> None:
        raise OSError(24, "no more instances")

    monkeypatch.setattr(FileWatch, "__init__", refused)

    async def test() -> None:
        registry = await EmbeddedRegistry.open(tmp_path / "registry.db")
        watch = registry.watch("a/")
        coming = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.2)
        other = Store(tmp_path / "registry.db")
        other.txn([], [Put("a/1", b"1")])
        assert (await asyncio.wait_for(coming, 5)).events[0].key == "a/1"
        other.close()
        await watch.aclose()
        await registry.close()

    asyncio.run(test())
