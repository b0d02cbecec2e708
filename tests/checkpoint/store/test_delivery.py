"""Restores in runs: whatever is wrong with a checkpoint is an error of its own name, before the session runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.codec.encoders import Encoders
from rgpu.checkpoint.codec.frames import PITCH
from rgpu.checkpoint.device import Device
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, DirectoryStore
from rgpu.checkpoint.store.delivery import Delivery
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.session.errors import Corrupt, DeviceError, RecoveryFailed, StoreMissing
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.packs import pack_of
from tests.support.checkpoint.samples import fresh, same, sample_device
from tests.support.checkpoint.store_helpers import BASE, PAGE, FailingBlobs, checkpoint_of, many_pages, restores_as


@pytest.fixture(scope="module")
def helpers() -> Iterator[Encoders]:
    processes = Encoders(2)
    yield processes
    processes.close()


@pytest.fixture(params=["names", "hashes", "processes"], autouse=True)
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, helpers: Encoders) -> None:
    """The names of chunks compared by threads or by processes, and with nothing but the page hashes of the device."""
    def delivery(source: StoredCheckpoint, device: Device, names: bool = True,
                 processes: Encoders | None = None) -> Delivery:
        return Delivery(source, device, request.param != "hashes", helpers if request.param == "processes" else None)

    monkeypatch.setattr(restore, "Delivery", delivery)


def restored(found: StoredCheckpoint, device: FakeDevice, target: FakeDevice | None = None) -> FakeDevice:
    target = target or fresh(device)
    restore.restore(target, found.state, [], print, found)  # type: ignore[arg-type]
    return target


@pytest.mark.parametrize("pages", [1, 4, 5, 6, 300, 700])
def test_runs_of_any_length(tmp_path: Path, pages: int) -> None:
    """Frames of five rows; packs that end anywhere; zeros, equal and compressed pages between."""
    device, chance = many_pages(pages), random.Random(pages)
    for index in range(0, pages, 7):
        device.write(BASE + index * PAGE, (bytes(PAGE), b"abcd" * (PAGE // 4))[chance.randrange(2)])
    if pages > 10:
        device.write(BASE + 9 * PAGE, device.read(BASE + 2 * PAGE, PAGE))
    store = DirectoryStore(tmp_path)
    store.blobs.pack_limit = 13 * PAGE
    checkpoint_of(store, "i", device)
    assert restores_as(store.open("i"), device)


def test_a_checkpoint_of_several_generations(tmp_path: Path) -> None:
    """Pages of one region lie in packs of three checkpoints."""
    store, device = DirectoryStore(tmp_path), many_pages(64)
    checkpoint_of(store, "a", device)
    for number, name in enumerate("bc", 1):
        for index in range(number, 64, 5):
            device.write(BASE + index * PAGE + 100, name.encode() * 3)
        checkpoint_of(store, name, device, 7 + number, base=chr(ord(name) - 1))
    found = store.open("c")
    assert len(found.table.body.packs) == 3 and restores_as(found, device)


def test_a_store_that_cannot_read_into_memory(tmp_path: Path) -> None:
    plain, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(plain, "i", device)
    assert restores_as(CheckpointStore(FailingBlobs(plain.blobs, lambda operation, name: None)).open("i"), device)


@pytest.mark.parametrize("place, reason", [
    (lambda data: chunk.PACK_HEADER + 3 * PITCH + 64 + 5000, "checksum"),  # a page's bytes
    (lambda data: chunk.PACK_HEADER + 3 * PITCH + 20, "header checksum"),  # a name
    (lambda data: chunk.PACK_HEADER + 3 * PITCH + 2, "magic"),
    (lambda data: chunk.PACK_HEADER + 3 * PITCH + 6, "header checksum"),  # the codec
    (lambda data: 5, "pack header")])
def test_a_flipped_bit(tmp_path: Path, place: Callable[[bytes], int], reason: str) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    path = pack_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[place(data)] ^= 4
    path.write_bytes(data)
    with pytest.raises(Corrupt) as caught:
        restored(store.open("i"), device)
    assert reason in str(caught.value.detail["reason"]) and path.stem in str(caught.value.message)


def mixed_pages(count: int = 24) -> FakeDevice:
    """Two raw pages, then one that compresses, and so on."""
    device = many_pages(count)
    for index in range(2, count, 3):
        device.write(BASE + index * PAGE, bytes([index]) * PAGE)
    return device


@pytest.mark.parametrize("at, reason", [
    (2, "magic"), (6, "header checksum"), (12, "header checksum"), (20, "header checksum"), (64 + 7, "checksum")])
def test_a_flipped_bit_of_a_compressed_chunk(tmp_path: Path, at: int, reason: str) -> None:
    """Magic, codec, length, name, stored bytes."""
    store, device = DirectoryStore(tmp_path), mixed_pages()
    checkpoint_of(store, "i", device)
    found = store.open("i")
    number = int(found.table.pages[0][5])
    assert found.table.lengths[number] < PITCH
    data = bytearray(pack_of(tmp_path).read_bytes())
    data[int(found.table.offsets[number]) + at] ^= 4
    pack_of(tmp_path).write_bytes(data)
    with pytest.raises(Corrupt) as caught:
        restored(store.open("i"), device)
    assert reason in str(caught.value.detail["reason"])


def stretches(found: StoredCheckpoint, rows: int) -> int:
    """Of chunks that follow each other in the pack, frame by frame: threads wrote them, in whatever order."""
    count, pages = 0, found.table.pages[0]
    for at in range(0, len(pages), rows):
        some = pages[at:at + rows]
        begins, lengths = found.table.offsets[some].astype(int), found.table.lengths[some].astype(int)
        count += 1 + int(np.count_nonzero(begins[1:] != begins[:-1] + lengths[:-1]))
    return count


def test_compressed_chunks_are_unpacked_without_the_long_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             checked: None, request: pytest.FixtureRequest) -> None:
    """One by one, with every check, they take most of the time of a restore: its threads wait for each other."""
    store, device = DirectoryStore(tmp_path), mixed_pages()
    checkpoint_of(store, "i", device)
    found, long_way, reads = store.open("i"), [], []
    read_chunks, read_into = StoredCheckpoint.read_chunks, found.blobs.read_into
    monkeypatch.setattr(StoredCheckpoint, "read_chunks", lambda self, numbers: long_way.append(numbers) or read_chunks(
        self, numbers))
    monkeypatch.setattr(found.blobs, "read_into", lambda name, offset, buffers: reads.append(offset) or read_into(
        name, offset, buffers))
    assert same(restored(found, device), device)
    if "names" in request.node.name:
        assert not long_way
        assert len(reads) <= stretches(found, device.frames().rows), "one for each stretch, not for each change"


def test_chunks_that_changed_places(tmp_path: Path) -> None:
    """Each is whole, but not the one that the manifest names there."""
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    data = bytearray(pack_of(tmp_path).read_bytes())
    one, two = (slice(chunk.PACK_HEADER + n * PITCH, chunk.PACK_HEADER + (n + 1) * PITCH) for n in (3, 8))
    data[one], data[two] = data[two], data[one]
    pack_of(tmp_path).write_bytes(data)
    with pytest.raises(Corrupt, match="another chunk"):
        restored(store.open("i"), device)


def test_a_page_that_was_exchanged_with_its_checksums(tmp_path: Path) -> None:
    """Somebody without the key keeps name and CRCs right: the device's hash finds it, the name says what it is."""
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    data = bytearray(pack_of(tmp_path).read_bytes())
    at = chunk.PACK_HEADER + 4 * PITCH
    names = np.frombuffer(bytes(data[at + 16:at + 48]), np.uint8).reshape(1, 32)
    page = random.Random(1).randbytes(PAGE)
    import zlib
    data[at:at + 64] = chunk.raw_headers(names, np.array([zlib.crc32(page)], np.uint32)).tobytes()
    data[at + 64:at + PITCH] = page
    pack_of(tmp_path).write_bytes(data)
    with pytest.raises(Corrupt, match="does not have its name"):
        restored(store.open("i"), device)


@pytest.mark.parametrize("length", [0, 31, 32, 5 * PITCH, -64, -1])
def test_a_cut_pack(tmp_path: Path, length: int) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    path = pack_of(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Corrupt, match="bytes"):
        restored(store.open("i"), device)


def test_a_pack_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """Its length was right a moment ago. Which of the chunks that are gone is named first, is up to the processes."""
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    found, path = store.open("i"), pack_of(tmp_path)
    found.pack(0)
    path.write_bytes(path.read_bytes()[:5 * PITCH])
    with pytest.raises(Corrupt, match=r"ends after|chunk at offset (262432: 65568 bytes|\d+: cut short)"):
        restored(found, device)


def test_a_missing_pack(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    pack_of(tmp_path).unlink()
    with pytest.raises(StoreMissing):
        restored(store.open("i"), device)


def test_a_device_that_keeps_something_else(tmp_path: Path) -> None:
    """The store is whole: then it is the device's fault, and is said so."""
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    target = fresh(device)
    real = target.write_pages
    target.write_pages = lambda runs: (real(runs), target.write(BASE + 6 * PAGE, b"?"))[0]  # type: ignore
    with pytest.raises(RecoveryFailed, match="the first is page 6"):
        restored(store.open("i"), device, target)


def test_zeros_that_are_none(tmp_path: Path) -> None:
    """Pages of zeros are not written: memory that is not fresh is found out."""
    store, device = DirectoryStore(tmp_path), many_pages(20)
    device.write(BASE + 5 * PAGE, bytes(PAGE))
    checkpoint_of(store, "i", device)
    target = fresh(device)
    target.write(BASE + 5 * PAGE, b"old")
    with pytest.raises(RecoveryFailed, match="the first is page 5"):
        restored(store.open("i"), device, target)


def test_a_device_that_fails(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(400)
    checkpoint_of(store, "i", device)
    target = fresh(device)

    def fails(runs: object) -> None:
        raise DeviceError("gone", 700)

    target.write_pages = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(DeviceError, match="gone"):
        restored(store.open("i"), device, target)
    assert target.frames().take(0) is not None, "its frames came back"


def test_variables_and_mirrors_are_checked_as_they_are_read(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path), sample_device(pages=40)
    checkpoint_of(store, "i", device)
    found = store.open("i")
    assert same(restored(found, device), device)
    delivery = Delivery(found, fresh(device))  # type: ignore[arg-type]
    assert delivery.run() == 40 - 10 + 1 + 3 and delivery.times["read"] > 0
