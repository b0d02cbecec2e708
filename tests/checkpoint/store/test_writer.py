"""Writing: incremental by page hashes, shared within a user, sparse packs left, memory bounded, errors told."""

from __future__ import annotations

import os
import random
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages.pages import Page
from rgpu.checkpoint.store import collect
from rgpu.checkpoint.store.archive import ArchiveReader, ArchiveWriter, copy_checkpoint
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, DirectoryStore
from rgpu.checkpoint.store.store_use import StoreUse
from rgpu.session.errors import AlreadyExists, Corrupt, LimitReached, StoreError, StoreFull, VersionMismatch
from tests.support.checkpoint.samples import KEY, fresh, sample_device, taken
from tests.support.checkpoint.store_helpers import BASE, FailingBlobs, checkpoint_of, many_pages, restores_as
from tests.support.eventually import eventually


def test_one_percent_changed_writes_one_percent(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(400)
    first = checkpoint_of(store, "a", device)
    for page in range(0, 400, 100):
        device.write(BASE + page * PAGE + 5, b"changed")
    second = checkpoint_of(store, "b", device, 8, base="a")
    assert second["unchanged_pages"] == 396 and second["stored_bytes"] <= 0.015 * first["stored_bytes"]
    assert restores_as(store.open("b"), device)


def test_moved_and_grown_regions(tmp_path: Path) -> None:
    """A region that is longer, shorter, gone or new: what is where it was is taken over, the rest is stored."""
    store, device = DirectoryStore(tmp_path / "s"), sample_device(pages=8)
    checkpoint_of(store, "a", device)
    region, data = device.memory.pop(BASE)
    device.add(BASE, 5 * PAGE, data=bytes(data[:5 * PAGE]))
    device.add(BASE + 64 * PAGE, PAGE, data=b"new")
    facts = checkpoint_of(store, "b", device, 8, base="a")
    assert facts["unchanged_pages"] == 5 + 1 + 1 + 2
    assert restores_as(store.open("b"), device)
    device.memory.pop(BASE)
    device.add(BASE, 9 * PAGE, data=bytes(data) + b"tail")
    checkpoint_of(store, "c", device, 9, base="b")
    assert restores_as(store.open("c"), device)


def test_another_hash_key_takes_nothing_over_but_chunks(tmp_path: Path) -> None:
    """After a key of page hashes changed, pages are read again; their content still finds its chunk."""
    store, device = DirectoryStore(tmp_path / "s"), many_pages(6)
    checkpoint_of(store, "a", device)
    state = cut.take(device, session="demo/1", epoch=3, position=8, hash_key=KEY[::-1], live=None)  # type: ignore
    with store.writer("b", "a") as writer:
        for page in cut.pages(device, state, writer.inherit(state)):  # type: ignore[arg-type]
            writer.add_page(page)
        facts = writer.finish(state)
    assert (facts["unchanged_pages"], facts["new_chunks"], facts["reused_chunks"]) == (0, 0, 6)


def test_sessions_of_one_user_share_chunks(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(6)
    checkpoint_of(store, "a", device)
    state = cut.take(device, session="other", epoch=1, position=1, hash_key=KEY[::-1], live=None)  # type: ignore
    with store.writer("b", None, others=["gone", "a"]) as writer:
        for page in cut.pages(device, state, writer.inherit(state)):  # type: ignore[arg-type]
            writer.add_page(page)
        assert writer.finish(state)["stored_bytes"] == 0
    store.forget("a")
    collect.collect(store, grace=0)
    store.verify("b")


def test_users_share_nothing(tmp_path: Path) -> None:
    device = many_pages(3)
    one, two = (DirectoryStore(tmp_path / name, bytes([n]) * 32) for n, name in enumerate("ab"))
    for store in (one, two):
        checkpoint_of(store, "i", device)
    names = [set(zip(*[iter(store.open("i").table.body.chunks.names)] * 32, strict=True)) for store in (one, two)]
    assert not names[0] & names[1]


def test_a_nearly_dead_pack_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.checkpoint.store.writer.THREADS", 1)  # pages stand in the packs in their order
    store, device = DirectoryStore(tmp_path / "s"), many_pages(400)
    store.blobs.pack_limit = 20 * PAGE
    checkpoint_of(store, "a", device)
    first = {pack.name for pack in store.open("a").table.body.packs}
    device.write(BASE, random.Random(9).randbytes(17 * PAGE))  # 3 of the first pack's 20 pages are left
    checkpoint_of(store, "b", device, 8, base="a")
    store.forget("a")
    assert collect.collect(store, grace=0).removed and len(first & {p.name for p in store.open("b").table.body.packs}) \
        < len(first)
    assert restores_as(store.open("b"), device)


def test_memory_is_bounded_on_both_ways(tmp_path: Path) -> None:
    """96 MiB through 4 MiB of staging, to a slow store; read back page by page."""
    pages, source = 1536, random.Random(4)
    block = source.randbytes(PAGE)
    region = Region(BASE, pages * PAGE, "mapped")

    def made(index: int) -> bytes:
        return index.to_bytes(8, "little") + block[8:]

    from rgpu.checkpoint.pages import pagehash
    hashes = [pagehash.hash_page(made(index), KEY) for index in range(pages)]
    packed = b"".join(a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in hashes)
    from rgpu.checkpoint.manifest.state import RegionState
    state = SessionState(session="demo/1", epoch=1, position=1, hash_key=KEY,
                         regions=[RegionState(BASE, pages * PAGE, "mapped", hashes=packed)])

    def slow(operation: str, name: str) -> None:
        if operation == "write":
            time.sleep(0.001)

    plain = DirectoryStore(tmp_path / "s")
    plain.blobs.pack_limit = 8 << 20
    store = CheckpointStore(FailingBlobs(plain.blobs, slow))
    tracemalloc.start()
    try:
        with store.writer("i", staging=4 << 20) as writer:
            for index in range(pages):
                writer.add_page(Page(region, index, made(index), hashes[index]))
            writer.finish(state)
        wrote = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with plain.open("i") as found:
            count = sum(1 for _, index, data in found.pages() if data == made(index))
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == pages
    assert wrote < 40 << 20, f"{wrote >> 20} MiB for 4 MiB of staging"
    # AHEAD batches of 8 MiB are the bound; here there are 12 batches in all.
    assert read < 200 << 20


def test_a_failing_store_ends_the_taking_of_pages_early(tmp_path: Path) -> None:
    """Whoever holds the session still learns of a full disk while it takes pages, not after the last one."""
    device, calls, before = many_pages(64), [0], threading.active_count()  # threads that other tests left

    def full(operation: str, name: str) -> None:
        if operation == "write":
            calls[0] += 1
            if calls[0] > 10:
                raise StoreFull("the disk is full")

    plain = DirectoryStore(tmp_path / "s")
    store = CheckpointStore(FailingBlobs(plain.blobs, full))
    state, added = taken(device), 0
    with pytest.raises(StoreFull), store.writer("i", staging=1 << 20) as writer:
        for page in cut.pages(device, state):  # type: ignore[arg-type]
            writer.add_page(page)
            added += 1
    assert added < 64
    assert [p for p in (tmp_path / "s").rglob("*") if p.is_file()] == []
    eventually(lambda: threading.active_count() <= before, threading.enumerate, 20)


def test_one_that_adds_more_than_it_may_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    """The bound is of what is added: pages that the store has are free. The manifest counts."""
    plain, device = DirectoryStore(tmp_path / "s"), many_pages(40)
    for most in (3 * PAGE, 40 * PAGE + 100):  # in the midst of its pages, and with its manifest alone
        with pytest.raises(LimitReached, match=f"adds more than {most} bytes") as caught:
            checkpoint_of(CheckpointStore(plain.blobs, most=most), "a", device)
        assert caught.value.detail["limit"] == "checkpoints"
        assert [path for path in (tmp_path / "s").rglob("*") if path.is_file()] == []
    checkpoint_of(CheckpointStore(plain.blobs, most=50 * PAGE), "a", device)
    device.write(BASE, b"changed")
    checkpoint_of(CheckpointStore(plain.blobs, most=2 * PAGE), "b", device, 8, base="a")
    assert restores_as(plain.open("b"), device)


def test_use_counts_what_checkpoints_share_once_and_nothing_that_none_needs(tmp_path: Path) -> None:
    store, device, use = DirectoryStore(tmp_path / "s"), many_pages(20), StoreUse()
    files = lambda: sum(path.stat().st_size for kind in ("*.pack", "*.image")  # noqa: E731
                        for path in (tmp_path / "s").rglob(kind))
    assert use.count([store]) == 0
    checkpoint_of(store, "a", device)
    assert use.count([store]) == files() > 20 * PAGE
    device.write(BASE, b"changed")
    checkpoint_of(store, "b", device, 8, base="a")
    assert use.count([store]) == files() < 23 * PAGE
    store.forget("a")
    assert use.count([store]) == files() > 20 * PAGE, "the other one needs its packs"
    store.forget("b")
    assert use.count([store]) == 0 < files(), "packs that wait for their collection"
    checkpoint_of(store, "a", many_pages(2))
    assert 2 * PAGE < use.count([store]) < 4 * PAGE, "another of that name"
    store.blobs.delete(store.manifest("a"))
    store.blobs.put(store.manifest("a"), b"damaged")
    assert use.count([store]) == len(b"damaged")


def test_a_page_that_was_not_added_is_noticed(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    state = taken(device)
    with pytest.raises(Corrupt, match="not written"), store.writer("i") as writer:
        for page in list(cut.pages(device, state))[:2]:  # type: ignore[arg-type]
            writer.add_page(page)
        writer.finish(state)
    assert store.ls() == []


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path / "s"), many_pages(3)
    state = taken(device)
    with pytest.raises(StoreError, match="exists"), store.writer("i") as late:
        checkpoint_of(store, "i", device)
        for page in cut.pages(device, state):  # type: ignore[arg-type]
            late.add_page(page)
        late.finish(state)
    store.verify("i")
    with pytest.raises(AlreadyExists):
        store.writer("i")


def test_the_newest_good_one(tmp_path: Path) -> None:
    store, device, bad = DirectoryStore(tmp_path / "s"), many_pages(3), []
    for position in (5, 6, 7):
        device.write(BASE, os.urandom(3 * PAGE))
        checkpoint_of(store, f"i{position}", device, position)
    newest = store.open("i7").table.body.packs[0].name
    pack = f"packs/{newest}.pack"
    data = bytearray(store.blobs.read(pack))
    data[PAGE] ^= 1
    store.blobs.put(pack, bytes(data))
    store.blobs.delete(f"packs/{store.open('i6').table.body.packs[0].name}.pack")
    found = store.newest_good(session="demo/1", warn=lambda name, error: bad.append((name, error.code)))
    assert found.name == "i5" and bad == [("i7", "corrupt"), ("i6", "store_missing")]


# -- archives ---------------------------------------------------------------------------------
def archive_of(tmp_path: Path) -> Path:
    device = sample_device(pages=2)
    store = DirectoryStore(tmp_path / "s", KEY)
    checkpoint_of(store, "demo/1@7", device)
    path = tmp_path / "a.rgpu"
    archive = ArchiveWriter(path)
    copy_checkpoint(store.open("demo/1@7"), CheckpointStore(archive), "demo/1@7")
    archive.commit()
    return path


def test_archives(tmp_path: Path) -> None:
    path, device = archive_of(tmp_path), sample_device(pages=2)
    with ArchiveReader(path) as archive:
        checkpoint = archive.checkpoint()
        checkpoint.verify()
        assert restores_as(checkpoint, device)
        target = DirectoryStore(tmp_path / "t", KEY[::-1])
        copy_checkpoint(checkpoint, target, "brought")
    assert restores_as(target.open("brought"), device) and fresh(device)
    target.verify("brought")


def test_damaged_archives(tmp_path: Path) -> None:
    path, chance = archive_of(tmp_path), random.Random(3)
    whole = path.read_bytes()
    offsets = {*range(16), *range(len(whole) - 200, len(whole)), *(chance.randrange(len(whole)) for _ in range(200))}
    for offset in offsets:
        data = bytearray(whole)
        data[offset] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        with pytest.raises((Corrupt, VersionMismatch, StoreError)), ArchiveReader(path) as archive:
            archive.checkpoint().verify()
    for length in (0, 10, 16, 64, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises((Corrupt, StoreError)), ArchiveReader(path) as archive:
            archive.checkpoint().verify()
