"""Collection of garbage while others write: every interleaving of writer and collector, dead writers, clocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.store import collect, intents, retention
from rgpu.checkpoint.store.checkpoint_store import CheckpointInfo, CheckpointStore, DirectoryStore
from rgpu.session.errors import Fenced, NotFound, RgpuError
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.samples import taken
from tests.support.checkpoint.store_helpers import BASE, PAGE, FailingBlobs, checkpoint_of, many_pages, restores_as


def packs(store: CheckpointStore) -> set[str]:
    return {Path(found.name).stem for found in store.blobs.ls("packs/")}


def test_only_what_no_manifest_names_goes(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(4)
    checkpoint_of(store, "a", device)
    first = packs(store)
    device.write(BASE, b"changed")
    checkpoint_of(store, "b", device, 8, base="a")
    store.forget("a")
    assert collect.collect(store, grace=0).removed == [], "b was built on a's pack"
    device.write(BASE, bytes(range(256)) * 1024)
    checkpoint_of(store, "c", device, 9)
    store.forget("b")
    done = collect.collect(store, grace=0, dry_run=True)
    assert first <= set(done.condemned) and not done.removed and packs(store) >= first
    done = collect.collect(store, grace=0)
    assert first <= set(done.removed) and done.freed > 4 * PAGE
    store.verify("c")


def test_readers_have_their_grace(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    checkpoint_of(store, "a", device)
    with store.open("a") as reading:
        store.forget("a")
        done = collect.collect(store, grace=100)
        assert not done.removed and len(done.condemned) == 1
        assert not collect.collect(store, grace=100).removed, "its time has not come"
        assert restores_as(reading, device)
    mark = next((tmp_path / "s" / "condemned").iterdir())
    os.utime(mark, (time.time() - 200, time.time() - 200))
    assert len(collect.collect(store, grace=100).removed) == 1
    assert not list((tmp_path / "s" / "condemned").iterdir())


def test_a_pack_that_is_named_again_is_pardoned(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    checkpoint_of(store, "a", device)
    manifest = store.blobs.read("images/a.image")
    store.forget("a")
    assert collect.collect(store, grace=100).condemned
    store.blobs.put("images/a.image", manifest)
    done = collect.collect(store, grace=0)
    assert not done.removed and not list((tmp_path / "s" / "condemned").iterdir())
    store.verify("a")


@pytest.mark.parametrize("name", ["images/bad.image", "intents/0123456789abcdef"])
def test_nothing_goes_while_something_cannot_be_read(tmp_path: Path, name: str) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    checkpoint_of(store, "a", device)
    store.forget("a")
    store.blobs.put(name, b"not what it should be")
    done = collect.collect(store, grace=0)
    assert done.blocked and not done.removed and len(packs(store)) == 1
    store.blobs.delete(name)
    assert collect.collect(store, grace=0).removed


@pytest.mark.parametrize("grace", [0.0, 100.0])
def test_a_collection_at_every_point_of_a_writer(tmp_path: Path, grace: float) -> None:
    """The base is removed and everything collected before the n-th request of a writer: what it says is true."""
    points = 0
    while True:
        folder, device = tmp_path / f"{points}", many_pages(3)
        plain = DirectoryStore(folder)
        checkpoint_of(plain, "a", device)
        device.write(BASE + PAGE, b"changed")
        count = [0]

        def strike(operation: str, name: str, at: int = points, plain: CheckpointStore = plain,
                   count: list[int] = count) -> None:
            count[0] += 1
            if count[0] == at + 1:
                if plain.blobs.size("images/a.image") is not None:
                    plain.forget("a")
                collect.collect(plain, grace=grace)
                collect.collect(plain, grace=grace)

        store = CheckpointStore(FailingBlobs(plain.blobs, strike))
        checkpoint_of(store, "b", device, 8, base="a")
        plain.verify("b")
        assert restores_as(plain.open("b"), device)
        collect.collect(plain, grace=0)
        plain.verify("b")
        if count[0] <= points:
            break
        points += 1
    assert points > 12


def test_a_writer_at_every_point_of_a_collection(tmp_path: Path) -> None:
    """A writer has read its base, which is then removed; it announces itself at the n-th request of a collection."""
    points = 0
    while True:
        plain, device = DirectoryStore(tmp_path / f"{points}"), many_pages(1)
        checkpoint_of(plain, "a", device)
        held, go, done = threading.Event(), threading.Event(), threading.Event()
        count = [0]

        def before_its_packs_are_announced(operation: str, name: str, plain: DirectoryStore = plain,
                                           held: threading.Event = held, go: threading.Event = go) -> None:
            # the second time the intent is put: the base's manifest is in the writer's memory
            if operation == "put" and name.startswith("intents/") and plain.blobs.size(name) is not None \
                    and not held.is_set():
                plain.forget("a")
                held.set()
                assert go.wait(30)

        def write(plain: DirectoryStore = plain, device: FakeDevice = device,
                  hook: Callable[[str, str], None] = before_its_packs_are_announced,
                  done: threading.Event = done) -> None:
            checkpoint_of(CheckpointStore(FailingBlobs(plain.blobs, hook)), "b", device, 8, base="a")
            done.set()

        def strike(operation: str, name: str, at: int = points, count: list[int] = count,
                   go: threading.Event = go, done: threading.Event = done) -> None:
            count[0] += 1
            if count[0] == at + 1:
                go.set()
                assert done.wait(30)

        writer = threading.Thread(target=write)
        writer.start()
        assert held.wait(30)
        collect.collect(CheckpointStore(FailingBlobs(plain.blobs, strike)), grace=0)
        go.set()
        writer.join()
        plain.verify("b")
        assert restores_as(plain.open("b"), device)
        if count[0] <= points:
            break
        points += 1
    assert points > 10


def test_a_writer_taken_for_dead_at_every_point(tmp_path: Path) -> None:
    """A clock that jumps: the intent looks old, the writer lives. Its checkpoint is whole, or it fails and is not
    there.
    """
    points, fenced = 0, 0
    while True:
        folder, device = tmp_path / f"{points}", many_pages(3)
        plain = DirectoryStore(folder)
        count = [0]

        def strike(operation: str, name: str, at: int = points, plain: DirectoryStore = plain,
                   folder: Path = folder, count: list[int] = count) -> None:
            count[0] += 1
            if count[0] == at + 1:
                for path in folder.glob("intents/*"):
                    os.utime(path, (1, 1))
                collect.collect(plain, grace=0)

        store = CheckpointStore(FailingBlobs(plain.blobs, strike))
        try:
            checkpoint_of(store, "b", device)
        except Fenced:
            fenced += 1
            with pytest.raises(NotFound):
                plain.open("b")
        except RgpuError as error:  # its unfinished file was removed under it
            assert error.code.startswith("store"), error
            with pytest.raises(NotFound):
                plain.open("b")
        else:
            plain.verify("b")
        checkpoint_of(plain, "after", device)
        collect.collect(plain, grace=0)
        plain.verify("after")
        if count[0] <= points:
            break
        points += 1
    assert points > 8 and fenced > 1


def test_a_beat_does_not_bring_a_dead_writer_back(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    with store.writer("late") as writer:
        os.utime(next((tmp_path / "s" / "intents").iterdir()), (1, 1))
        assert collect.collect(store, grace=0).intents_ended == 1
        writer._announced._put()  # a beat that was under way
        state = taken(device)
        for page in cut.pages(device, state):  # type: ignore[arg-type]
            writer.add_page(page)
        with pytest.raises(Fenced):
            writer.finish(state)
    assert store.ls() == []


def test_clocks_that_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's wall clock may say anything: only the store's own times are compared."""
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    checkpoint_of(store, "past", device, 7)
    monkeypatch.setattr(time, "time", lambda: 1e11)
    with store.writer("slow") as writer:
        assert collect.collect(store, grace=0).intents_ended == 0
        state = taken(device, 8)
        for page in cut.pages(device, state):  # type: ignore[arg-type]
            writer.add_page(page)
        writer.finish(state)
    monkeypatch.setattr(time, "time", lambda: 4.0)
    checkpoint_of(store, "newest", device, 9)
    newest = store.newest_good(session="demo/1")
    assert newest.name == "newest", "order is by position, not by clock"
    assert retention.superfluous(store.ls(), retention.Policy(1, 3600.0), (), 5.0) == ["past", "slow"]
    for name in ("past", "slow", "newest"):
        store.verify(name)


def test_many_writers_and_a_collector(tmp_path: Path) -> None:
    """In threads: sessions of one user write, share, and forget, while everything is collected without grace."""
    root, stop, failures = tmp_path / "s", threading.Event(), []

    def collector() -> None:
        store = DirectoryStore(root)
        while not stop.is_set():
            collect.collect(store, grace=0)

    def session(number: int) -> None:
        store, device, last = DirectoryStore(root), many_pages(4, seed=number % 2), None
        try:
            for step in range(8):
                device.write(BASE + PAGE * (step % 4), os.urandom(64))
                name = f"{number}-{step}"
                checkpoint_of(store, name, device, step, base=last)
                store.verify(name)
                if last:
                    store.forget(last)
                last = name
            store.verify(str(last))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=session, args=(number,)) for number in range(4)]
    cleaner = threading.Thread(target=collector)
    cleaner.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    cleaner.join()
    assert not failures, failures
    store = DirectoryStore(root)
    collect.collect(store, grace=0)
    assert len(store.ls()) == 4
    for info in store.ls():
        store.verify(info.name)
    assert intents.INTENTS and not list((root / "intents").iterdir())


def info(name: str, session: str, position: int, created: float = 0.0, epoch: int = 1,
         error: str = "") -> CheckpointInfo:
    return CheckpointInfo(name, created, session, position, epoch, error=error)


@pytest.mark.parametrize("policy, named, now, gone", [
    (retention.Policy(2), (), 0.0, ["a1"]),
    (retention.Policy(1), (), 0.0, ["a1", "a2"]),
    (retention.Policy(1), ("a1",), 0.0, ["a2"]),
    (retention.Policy(None, 50.0), (), 100.0, ["a1", "a2"]),
    (retention.Policy(None, 50.0), ("a2", "a1"), 100.0, []),
    (retention.Policy(None, None), (), 1e12, []),
    (retention.Policy(0), (), 0.0, ["a1", "a2"])])
def test_retention(policy: retention.Policy, named: tuple[str, ...], now: float, gone: list[str]) -> None:
    checkpoints: list[CheckpointInfo] = [
        info("a2", "a", 5, 20.0), info("a3", "a", 4, 10.0, epoch=2), info("a1", "a", 3, 999.0 if now < 100 else 9.0),
        info("b1", "b", 1), info("bad", "a", 0, error="unreadable")]
    assert retention.superfluous(checkpoints, policy, named, now) == gone
    kept: Callable[[str], bool] = lambda name: name not in gone  # noqa: E731
    assert kept("a3") and kept("b1") and kept("bad"), "the newest of each session stays, and what cannot be read"
