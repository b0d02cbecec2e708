"""Checkpoints: round trips, every flipped bit, truncation, missing packs, versions, full disks, removal."""

from __future__ import annotations

import os
import random
import re
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.blobs import files
from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest import manifest as manifests
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store import collect
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, write_checkpoint
from rgpu.session.errors import (
    AlreadyExists,
    Corrupt,
    DeviceError,
    Fenced,
    NotFound,
    RecoveryFailed,
    RgpuError,
    StoreError,
    StoreFull,
    TimedOut,
    UsageError,
    VersionMismatch,
)
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.samples import BASE, GLOBAL, KEY, PINNED, fresh, same, sample_device, taken


def store_with(path: Path, device: FakeDevice, name: str = "i", **options: object) -> DirectoryStore:
    store = DirectoryStore(path / "store")
    write_checkpoint(store, name, device, taken(device), **options)  # type: ignore[arg-type]
    return store


# -- round trips ------------------------------------------------------------------------
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([150_000, 1 << 28]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int, pages: int, limit: int) -> None:
    device = sample_device(seed, pages)
    store = DirectoryStore(tmp_path_factory.mktemp("r") / "store")
    store.blobs.pack_limit = limit
    write_checkpoint(store, "i", device, taken(device))  # type: ignore[arg-type]
    with store.open("i") as found:
        assert found.state == taken(device)
        target = fresh(device)
        restore.restore(target, found.state, [], print, found.pages())  # type: ignore[arg-type]
    assert same(device, target)
    assert target.events == device.events and target.now == device.now
    counted = store.verify("i")
    assert counted["pages"] == pages + 1 + 1 + 2
    assert (counted["packs"] > 1) == (limit == 150_000 and pages > 8)


def test_statistics_compression_and_elision(tmp_path: Path) -> None:
    device = sample_device(pages=8)
    store = DirectoryStore(tmp_path / "s")
    facts = write_checkpoint(store, "i", device, taken(device), statistics={"why": "test"})  # type: ignore[arg-type]
    # two random pages, one page of abcd (twice), one "same page" (twice), a mirror, a variable
    assert (facts["pages"], facts["new_chunks"], facts["reused_chunks"]) == (12, 6, 0)
    assert facts["unchanged_pages"] == 0
    assert facts["zero_pages"] == 2 + 2 and facts["why"] == "test"
    assert 2 * PAGE < facts["stored_bytes"] < 2 * PAGE + 6000 < facts["raw_bytes"]
    assert 0 < facts["compressed_chunks"] < facts["new_chunks"]


def test_the_next_checkpoint_stores_only_what_changed(tmp_path: Path) -> None:
    device = sample_device()
    store = store_with(tmp_path, device)
    device.write(BASE + 3 * PAGE, b"changed")
    facts = write_checkpoint(store, "j", device, taken(device, 9), base="i")  # type: ignore[arg-type]
    assert (facts["new_chunks"], facts["reused_chunks"], facts["unchanged_pages"]) == (1, 5, 9)
    store.verify("j")
    freed = store.rm("i")
    assert freed < PAGE, "the first checkpoint's pack is still used"
    store.verify("j")
    store.rm("j")
    assert not leftovers(tmp_path / "store")


def test_listing(tmp_path: Path) -> None:
    device = sample_device()
    store = store_with(tmp_path, device, "demo/1@7")
    write_checkpoint(store, "b", device, taken(device))  # type: ignore[arg-type]
    (tmp_path / "store" / "images" / "broken.image").write_bytes(b"junk")
    infos = {info.name: info for info in store.ls()}
    assert set(infos) == {"demo/1@7", "b", "broken"}
    assert (infos["b"].session, infos["b"].position, infos["b"].epoch) == ("demo/1", 7, 3)
    assert infos["broken"].error and not infos["b"].error
    shown = store.show("demo/1@7")
    assert shown["session"] == "demo/1" and shown["chunks"] == 6 and len(shown["regions"]) == 4
    assert DirectoryStore(tmp_path / "nothing").ls() == []


def test_names_and_absence(tmp_path: Path) -> None:
    store = store_with(tmp_path, sample_device())
    with pytest.raises(AlreadyExists):
        store.writer("i")
    for call in (store.open, store.verify, store.rm, store.show):
        with pytest.raises(NotFound):
            call("j")
    for name in ("", ".hidden", "a\nb", "x" * 200):
        with pytest.raises(UsageError):
            store.open(name)
    (tmp_path / "escape.image").write_bytes(b"x")
    with pytest.raises((NotFound, UsageError)):
        store.open("../../escape")


# -- damage ---------------------------------------------------------------------------------
def small_store(path: Path) -> DirectoryStore:
    device = FakeDevice(events={20: 5})
    device.add(PINNED, 300, "pinned", data=bytes(range(200)))
    device.add(GLOBAL, 12, "global", 17, "counter", b"counter val!")
    device.add(GLOBAL + 256, 300, "global", 17, "text", b"abcd" * 75)
    return store_with(path, device)


def paths(path: Path) -> list[Path]:
    return sorted((path / "store" / "images").iterdir()) + sorted((path / "store" / "packs").iterdir())


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    """All bits of the headers, one of each further byte; with RGPU_SWEEP all."""
    store, chance = small_store(tmp_path), random.Random(8)
    for path in paths(tmp_path):
        whole = path.read_bytes()
        assert 100 < len(whole) < 3500
        heads = 8 * (110 if path.suffix == ".image" else 100)
        bits = [*range(heads), *(8 * at + chance.randrange(8) for at in range(heads // 8, len(whole)))]
        for bit in range(8 * len(whole)) if os.environ.get("RGPU_SWEEP") else bits:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises((Corrupt, VersionMismatch)) as caught:
                store.verify("i")
            assert isinstance(caught.value, VersionMismatch) or {"offset", "reason"} <= caught.value.detail.keys()
        path.write_bytes(whole)
    store.verify("i")


def test_every_truncation_and_any_extension_is_detected(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    for path in paths(tmp_path):
        whole = path.read_bytes()
        for changed in [whole[:n] for n in range(len(whole))] + [whole + b"\0", whole + whole]:
            path.write_bytes(changed)
            with pytest.raises(Corrupt):
                store.verify("i")
        path.write_bytes(whole)
    store.verify("i")


def test_a_missing_pack(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    paths(tmp_path)[1].unlink()
    with pytest.raises(StoreError):
        store.verify("i")
    device = FakeDevice()
    device.add(PINNED, 300, "pinned", data=bytes(range(200)))
    facts = write_checkpoint(store, "j", device, taken(device), base="i")  # type: ignore[arg-type]
    assert facts["reused_chunks"] == 0, "a base whose packs are gone is not built upon"
    store.verify("j")


def test_swapped_chunks_packs_and_manifests(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    device = sample_device()
    write_checkpoint(store, "j", device, taken(device))  # type: ignore[arg-type]
    folder = tmp_path / "store" / "images"
    (folder / "k.image").write_bytes((folder / "i.image").read_bytes())
    with pytest.raises(Corrupt, match="another|of checkpoint 'i'"):
        store.open("k")
    one, two = sorted((tmp_path / "store" / "packs").iterdir())
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    for name in "ij":
        with pytest.raises(Corrupt):
            store.verify(name)


def test_another_key(tmp_path: Path) -> None:
    small_store(tmp_path)
    with pytest.raises(Corrupt, match="another key"):
        DirectoryStore(tmp_path / "store", bytes(32)).open("i")
    with pytest.raises(UsageError):
        DirectoryStore(tmp_path, b"short")


def rewritten(path: Path, **header: int) -> None:
    """A well-sealed manifest with other header fields: as a future writer would make."""
    data = bytearray(path.read_bytes())
    fields = {"version": manifests.VERSION, "minimum": manifests.MINIMUM_READER, "length": len(data) - 64, **header}
    head = struct.pack("<8sIIQ8s", manifests.MAGIC, fields["version"], fields["minimum"], fields["length"],
                       manifests.key_id(manifests.DEFAULT_KEY))
    size = int.from_bytes(data[64:68], "little")
    data[72:104] = manifests._checksum(head, data[104:104 + size], key=manifests.DEFAULT_KEY)
    path.write_bytes(head + manifests._checksum(head, data[64:], key=manifests.DEFAULT_KEY) + data[64:])


def test_newer_versions(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    manifest = paths(tmp_path)[0]
    rewritten(manifest, version=3)  # newer, but it says that we may read it
    store.verify("i")
    rewritten(manifest, version=3, minimum=3)
    with pytest.raises(VersionMismatch) as caught:
        store.open("i")
    assert caught.value.detail["needed"] == 3
    assert "needs a reader of version 3" in store.ls()[0].error
    rewritten(manifest, length=1 << 60)
    with pytest.raises(Corrupt):
        store.open("i")
    raw = chunk.encode(b"x" * 100, chunk.chunk_name(b"x" * 100, KEY))
    head = raw[:4] + struct.pack("<H", 9) + raw[6:60]
    newer = head + struct.pack("<I", __import__("zlib").crc32(head)) + raw[64:]
    with pytest.raises(VersionMismatch):
        chunk.decode(newer, KEY, 0)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest_chunk_or_state(data: bytes) -> None:
    with pytest.raises((Corrupt, VersionMismatch)):
        manifests.decode(data, KEY, "x")
    with pytest.raises((Corrupt, VersionMismatch)):
        chunk.decode(data, KEY, 0)
    with pytest.raises(Corrupt):
        SessionState.decode(data)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_manifests_under_the_right_key(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whoever has the key may still lie in every number: an error, never a wild read."""
    device = sample_device(pages=2)
    store = DirectoryStore(tmp_path_factory.mktemp("h") / "s")
    write_checkpoint(store, "i", device, taken(device))  # type: ignore[arg-type]
    body = manifests.decode(store.blobs.read("images/i.image"), manifests.DEFAULT_KEY, "i").body
    column = data.draw(st.sampled_from(["names", "packs", "offsets", "lengths", "pages", "size"]))
    if column == "pages":
        body.pages[0] = data.draw(st.binary(max_size=12))
    elif column == "size":
        body.packs[0] = manifests.Pack(body.packs[0].name, data.draw(st.integers(0, 2**62)))
    else:
        fields = {name: getattr(body.chunks, name) for name in ("names", "packs", "offsets", "lengths")}
        garbled = bytearray(fields[column])
        garbled[data.draw(st.integers(0, len(garbled) - 1))] ^= data.draw(st.integers(1, 255))
        body.chunks = manifests.Chunks(**{**fields, column: bytes(garbled)})
    store.blobs.put("images/i.image", manifests.encode(body, manifests.DEFAULT_KEY))
    try:
        store.verify("i")
    except (Corrupt, VersionMismatch):
        return
    assert [np.frombuffer(c, "<u4").tolist() for c in body.pages]


# -- failures while writing ---------------------------------------------------------------------
def leftovers(path: Path) -> list[str]:
    """Everything but the store's empty folders."""
    return [p.name for p in path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("limit", [1_000, 10_000, 70_000, 140_000])
def test_a_full_disk_leaves_no_torn_checkpoint(tmp_path: Path, limit: int) -> None:
    """A real failing write: no file may grow above the limit."""
    device = sample_device()
    store = DirectoryStore(tmp_path / "s")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        if limit == 140_000:  # enough for the packs and the manifest
            write_checkpoint(store, "i", device, taken(device))  # type: ignore[arg-type]
        else:
            with pytest.raises(StoreFull, match="disk is full"):
                write_checkpoint(store, "i", device, taken(device))  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if limit < 140_000:
        assert leftovers(tmp_path / "s") == [] and store.ls() == []
        write_checkpoint(store, "i", device, taken(device))  # type: ignore[arg-type]
    store.verify("i")


@pytest.mark.parametrize("function", ["write", "fsync", "rename", "link"])
@pytest.mark.parametrize("number", range(1, 9))
def test_any_failing_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """Whatever fails at whatever point: the old checkpoint stays, the new one is whole or not there."""
    device = sample_device()
    store = store_with(tmp_path, device, "old")
    device.write(BASE, b"new")
    real, calls = getattr(os, function), [0]

    def failing(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(files.os, function, failing)
    try:
        write_checkpoint(store, "new", device, taken(device), base="old")  # type: ignore[arg-type]
        wrote = True
    except StoreError as error:
        wrote = False
        assert error.detail["reason"] == "the disk is full"
    monkeypatch.undo()
    assert wrote == (calls[0] < number)
    store.verify("old")
    names = {info.name for info in store.ls()}
    if "new" in names:
        store.verify("new")
    else:
        assert not wrote
        collect.collect(store, grace=0)
        left = [name for name in leftovers(tmp_path / "store") if not re.fullmatch("[0-9a-f]{16}", name)]
        assert len(left) == 2, "only the old checkpoint's files, and the intent if it could not be taken back"


def test_a_crash_leaves_nothing_that_is_not_collected(tmp_path: Path) -> None:
    """What a killed writer left is found once its intent is old, and not before."""
    device = sample_device()
    store = store_with(tmp_path, device)
    writer = store.writer("torn")
    for page in cut.pages(device, taken(device)):  # type: ignore[arg-type]
        writer.add_page(page)
    writer._submit()
    writer._threads.shutdown()
    writer._packs._end(writer._packs._idle.pop())  # one pack is whole …
    writer._packs._commits.shutdown()
    writer._packs._idle.append(writer._packs._begin())  # … and one is not
    assert [info.name for info in store.ls()] == ["i"]
    before = len(leftovers(tmp_path / "store"))
    collect.collect(store, grace=0)
    assert len(leftovers(tmp_path / "store")) == before, "a writer at work is left alone"
    intent = next((tmp_path / "store" / "intents").iterdir())
    os.utime(intent, (1, 1))
    store.rm("i")
    assert [name for name in leftovers(tmp_path / "store") if name != intent.name] == []
    with pytest.raises(Fenced):
        writer._announced.check()


def test_files_are_private(tmp_path: Path) -> None:
    small_store(tmp_path)
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*paths(tmp_path), tmp_path / "store"])


# -- cut and restore ---------------------------------------------------------------------------
def test_a_cut_needs_a_drained_healthy_device() -> None:
    device = sample_device()
    device.drains = False
    with pytest.raises(TimedOut):
        taken(device)
    device.drains, device.error = True, 700
    with pytest.raises(DeviceError) as caught:
        taken(device)
    assert caught.value.result == 700


def test_a_device_that_runs_during_the_cut_is_noticed() -> None:
    device = sample_device()
    state = taken(device)
    device.write(BASE + PAGE + 5, b"!")
    with pytest.raises(DeviceError, match="changed"):
        list(cut.pages(device, state))  # type: ignore[arg-type]


def test_states_travel() -> None:
    state = taken(sample_device())
    assert SessionState.decode(state.encode()) == state
    state.hash_key = b"short"
    with pytest.raises(Corrupt):
        SessionState.decode(state.encode())


def test_a_moved_global_is_named(tmp_path: Path) -> None:
    device = sample_device()
    state = taken(device)
    other = fresh(device)
    del other.memory[GLOBAL + 256]
    other.add(GLOBAL + 512, PAGE + 7, "global", 17, "table")
    with pytest.raises(RecoveryFailed, match="'table' of module 17") as caught:
        restore.rebuild(other, state, [], print)  # type: ignore[arg-type]
    assert caught.value.detail["variable"] == "table"


@pytest.mark.parametrize("change, what", [
    (lambda d: d.memory.pop(BASE), "mapped range .* is missing"),
    (lambda d: d.add(BASE + 64 * PAGE, PAGE), "mapped range .* was not there before"),
    (lambda d: d.memory.pop(GLOBAL), "'counter' of module 17 is missing"),
    (lambda d: d.add(GLOBAL + 8 * PAGE, 4, "global", 18, "more"), "'more' of module 18 was not there")])
def test_other_regions_are_named(change: object, what: str) -> None:
    device = sample_device()
    other = fresh(device)
    change(other)  # type: ignore[operator]
    with pytest.raises(RecoveryFailed, match=what):
        restore.rebuild(other, taken(device), [], print)  # type: ignore[arg-type]


def test_a_replay_that_fails_names_the_call() -> None:
    class Call:
        seq = 41

    def apply(record: object) -> None:
        raise DeviceError("no", 2)

    with pytest.raises(RecoveryFailed, match="call 41"):
        restore.rebuild(FakeDevice(), taken(sample_device()), [Call()], apply)  # type: ignore[arg-type]


def test_a_wrong_page_is_found_at_the_end() -> None:
    device = sample_device()
    state = taken(device)
    other = fresh(device)
    pages = [(p.region.address, p.index, p.data) for p in cut.pages(device, state)]  # type: ignore[arg-type]
    restore.write_pages(other, state, pages)  # type: ignore[arg-type]
    other.write(GLOBAL + 3, b"?")
    with pytest.raises(RecoveryFailed, match="'counter'"):
        restore.finish(other, state)  # type: ignore[arg-type]
    with pytest.raises(RgpuError):
        restore.write_pages(other, state, [(BASE + 1, 0, b"")])  # type: ignore[arg-type]
