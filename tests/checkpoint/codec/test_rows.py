"""Pages of frames become chunks where they lie: what is written, where, and what happens when something is wrong."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.codec.encoders import Encoders
from rgpu.checkpoint.codec.encoding import compressible
from rgpu.checkpoint.codec.frames import PITCH, Shared
from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.manifest import packs
from rgpu.checkpoint.manifest.chunk_table import ChunkTable
from rgpu.checkpoint.manifest.packs import Packs
from rgpu.checkpoint.manifest.reuse import Base
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import PageList
from rgpu.checkpoint.store import writer as writer_module
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, DirectoryStore
from rgpu.session.errors import DeviceError, StoreError, StoreFull
from tests.support.checkpoint.samples import KEY
from tests.support.checkpoint.store_helpers import BASE, FailingBlobs, checkpoint_of, many_pages, restores_as
from tests.support.eventually import eventually

START = PITCH - PAGE


def framed(pages: list[bytes]) -> np.ndarray:
    rows = np.full((len(pages), PITCH), 0xEE, np.uint8)
    for row, page in zip(rows, pages, strict=True):
        row[START:] = np.frombuffer(page, np.uint8)
    return rows


def listed(pages: list[bytes], regions: list[Region] | None = None) -> PageList:
    """The pages as those of one region, or of several of equal sizes."""
    regions = regions or [Region(BASE, len(pages) * PAGE, "mapped")]
    hashes = np.concatenate([pagehash.hash_pages(page, KEY) for page in pages])
    each = len(pages) // len(regions)
    return PageList.of(regions, [(number, np.arange(each), hashes[number * each:(number + 1) * each])
                                 for number in range(len(regions))])


def state_of(pages: list[bytes], regions: list[Region] | None = None) -> SessionState:
    regions = regions or [Region(BASE, len(pages) * PAGE, "mapped")]
    each = len(pages) // len(regions)
    return SessionState(session="demo/1", epoch=1, position=1, hash_key=KEY, regions=[
        RegionState(region.address, region.size, region.kind, hashes=pagehash.pack(pagehash.hash_pages(
            b"".join(pages[number * each:(number + 1) * each]), KEY))) for number, region in enumerate(regions)])


def kinds(count: int, seed: int = 1) -> list[bytes]:
    """Random ones, ones that compress, equal ones."""
    chance = random.Random(seed)
    same = chance.randbytes(PAGE)
    return [(chance.randbytes(PAGE), bytes([index % 251]) * PAGE, same)[index % 3] for index in range(count)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Encoders]:
    encoders = Encoders(2)
    yield encoders
    encoders.close()
    assert encoders._started is None or encoders._started.wait(60) == 0


def in_shared_memory(rows: np.ndarray) -> tuple[np.ndarray, Shared]:
    """A copy in memory that other processes can map."""
    memory = Shared.make(rows.nbytes)
    copy = np.frombuffer(mmap.mmap(memory.fd, memory.size), np.uint8).reshape(rows.shape)
    copy[:] = rows
    return copy, memory


@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("each", ["random", "mixed"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_rows_become_a_checkpoint(tmp_path: Path, count: int, each: str, where: str, processes: Encoders) -> None:
    """The same packs, byte for byte, wherever it is done."""
    pages = kinds(count) if each == "mixed" else [os.urandom(PAGE) for _ in range(count)]
    store, done = DirectoryStore(tmp_path), []
    store.blobs.pack_limit = 50 * PAGE
    rows, memory = in_shared_memory(framed(pages)) if where == "elsewhere" else (framed(pages), None)
    with store.writer("i", encoders=processes if memory else None) as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: done.append(1), memory)
        counts = writer.finish(state_of(pages))
    assert done == [1] and counts["pages"] == count and counts["new_chunks"] == len(set(pages))
    assert counts["raw_bytes"] == len(set(pages)) * PAGE
    with store.open("i") as found:
        found.verify()
        assert [data for _, _, data in found.pages()] == pages
        assert each == "random" or count < 3 or counts["stored_bytes"] < counts["raw_bytes"] * 0.7
        assert each == "mixed" or len(found.table.body.packs) == -(-count // 50)


def test_rows_of_several_regions(tmp_path: Path) -> None:
    pages = kinds(90)
    regions = [Region(BASE + number * 64 * PAGE, 30 * PAGE, "mapped") for number in range(3)]
    store = DirectoryStore(tmp_path)
    with store.writer("i") as writer:
        writer.add_rows(framed(pages), listed(pages, regions), KEY, lambda: None)
        writer.finish(state_of(pages, regions))
    with store.open("i") as found:
        assert [data for _, _, data in found.pages()] == pages
        found.verify()


def test_what_a_base_has_is_not_stored_again(tmp_path: Path) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(100)
    checkpoint_of(store, "a", device)
    pages = [device.read(BASE + index * PAGE, PAGE) for index in range(100)]
    for index in (5, 50, 99):
        pages[index] = os.urandom(PAGE)
        device.write(BASE + index * PAGE, pages[index])
    with store.writer("b", others=["a"]) as writer:
        writer.add_rows(framed(pages), listed(pages), KEY, lambda: None)
        counts = writer.finish(state_of(pages))
    assert (counts["new_chunks"], counts["reused_chunks"]) == (3, 97)
    with store.open("b") as found:
        found.verify()
        assert [data for _, _, data in found.pages()] == pages


def test_a_page_that_changed_after_it_was_hashed(tmp_path: Path) -> None:
    pages, done = kinds(100), []
    store, rows = DirectoryStore(tmp_path), framed(pages)
    rows[70, 1000] ^= 1
    with pytest.raises(DeviceError, match="page 70 of 0x200000000000 changed"), store.writer("i") as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: done.append(1))
        writer.finish(state_of(pages))
    assert done == [1] and store.names() == {} and not list(tmp_path.rglob("*.pack"))


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_changed_page_is_named_and_the_next_checkpoint_is_written(tmp_path: Path, where: str,
                                                                    processes: Encoders) -> None:
    pages, store = kinds(100), DirectoryStore(tmp_path)
    rows, memory = in_shared_memory(framed(pages))
    rows[70, 1000] ^= 1
    encoders = processes if where == "elsewhere" else None
    with pytest.raises(DeviceError, match="page 70 of 0x200000000000 changed"), \
            store.writer("i", encoders=encoders) as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: None, memory)
        writer.finish(state_of(pages))
    rows[70, 1000] ^= 1
    if where == "here":  # some of its parts are chunks by now
        rows[:] = framed(pages)
    with store.writer("j", encoders=encoders) as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: None, memory)
        writer.finish(state_of(pages))
    store.verify("j")


def test_a_process_that_dies_takes_the_checkpoint_with_it_and_the_next_starts_others(tmp_path: Path) -> None:
    pages, store, encoders, done = kinds(64), DirectoryStore(tmp_path), Encoders(2), []
    rows, memory = in_shared_memory(framed(pages))
    with store.writer("a", encoders=encoders) as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: None, memory)
        writer.finish(state_of(pages))
    group = encoders._started.pid
    os.killpg(group, signal.SIGKILL)
    rows[:] = framed(pages)
    for name in ("b", "c"):  # each finds one of the two dead
        with pytest.raises(StoreError, match="take the checkpoint again"), \
                store.writer(name, encoders=encoders) as writer:
            writer.add_rows(rows, listed(pages), KEY, lambda: done.append(1), memory)
            writer.finish(state_of(pages))
    with store.writer("d", encoders=encoders) as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: done.append(1), memory)
        writer.finish(state_of(pages))
    assert encoders._started.pid != group and done == [1, 1, 1] and sorted(store.names()) == ["a", "d"]
    store.verify("d")
    encoders.close()


def test_processes_let_go_of_frames_and_end_with_whoever_began_them(tmp_path: Path) -> None:
    pages, store, encoders = kinds(10), DirectoryStore(tmp_path), Encoders(1)
    rows, memory = in_shared_memory(framed(pages))
    with store.writer("a", encoders=encoders) as writer:
        writer.add_rows(rows, listed(pages), KEY, lambda: None, memory)
        writer.finish(state_of(pages))
    maps = Path(f"/proc/{encoders._started.pid}/maps")
    eventually(lambda: "rgpu-frame" not in maps.read_text(), "the frame is mapped still", 20)
    encoders.close()
    assert encoders._started.wait(60) == 0


def test_a_store_that_is_full(tmp_path: Path) -> None:
    """The frames come back, nothing stays, and who adds more hears of it."""
    pages, done, inner = [os.urandom(PAGE) for _ in range(128)], [], DirectoryStore(tmp_path)

    def full(operation: str, name: str) -> None:
        if operation == "write" and name.endswith(".pack"):
            raise StoreFull("no room")

    with pytest.raises(StoreFull), CheckpointStore(FailingBlobs(inner.blobs, full)).writer("i") as writer:
        for _ in range(100):
            writer.add_rows(framed(pages), listed(pages), KEY, lambda: done.append(1))
            threading.Event().wait(0.02)
    assert done and not list(tmp_path.rglob("*.pack")) and not list(tmp_path.rglob("*.tmp"))


def test_a_sample_decides_whether_compressing_is_tried() -> None:
    random_pages = [os.urandom(PAGE) for _ in range(64)]
    assert compressible(framed(random_pages)) == []
    zeros_behind = random_pages[:8] + [bytes(PAGE)] * 56
    assert compressible(framed(zeros_behind)) == list(range(8, 64))
    in_turn = [bytes([index]) * PAGE if index % 2 else random_pages[index] for index in range(64)]
    assert compressible(framed(in_turn)) == list(range(1, 64, 2)), "what comes in turn is not missed"
    assert compressible(framed(zeros_behind[:7])) == []
    assert compressible(framed(zeros_behind[7:10])) == [1, 2], "few are all looked at"


def test_headers_of_many_are_those_of_one() -> None:
    pages = [os.urandom(PAGE) for _ in range(5)]
    names = np.frombuffer(b"".join(blake3(page, key=KEY).digest() for page in pages), np.uint8).reshape(5, 32)
    import zlib
    headers = chunk.raw_headers(names, np.array([zlib.crc32(page) for page in pages], np.uint32))
    for page, name, header in zip(pages, names, headers, strict=True):
        assert chunk.encode(page, name.tobytes()) == header.tobytes() + page


# -- tables --------------------------------------------------------------------------------------
def test_many_names_are_numbered_like_one(tmp_path: Path) -> None:
    """Against the same table asked name by name, with bases, repeated names, and names that begin alike."""
    store, device = DirectoryStore(tmp_path), many_pages(60)
    checkpoint_of(store, "a", device)
    for index in range(30):
        device.write(BASE + index * PAGE, os.urandom(100))
    checkpoint_of(store, "b", device, 8)
    chance = random.Random(2)
    bases = [[Base(store._load(name)) for name in "ab"] for _ in range(2)]
    known = [row.tobytes() for base in bases[0] for row in base.names]
    known += [name[:8] + os.urandom(24) for name in known[:20]] + [os.urandom(32) for _ in range(50)]
    one, many = ChunkTable(bases[0]), ChunkTable(bases[1])
    for _ in range(20):
        names = chance.choices(known, k=chance.randrange(1, 40))
        numbers, fresh = many.number_many(np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32))
        assert [name for name, new in zip(names, fresh, strict=True) if new] == \
            [name for name in names if one.number(name)[1]]
        place = {name: int(number) for name, number in zip(names, numbers, strict=True)}
        assert all(place[name] == number for name, number in zip(names, numbers.tolist(), strict=True))
    assert one.adopted == many.adopted and one.count == many.count
    everything = np.frombuffer(b"".join(known), np.uint8).reshape(-1, 32)
    for base in bases[0]:
        there = {row.tobytes(): number for number, row in enumerate(base.names)}
        wanted = [there.get(name, -1) for name in known]
        assert base.find_many(everything).tolist() == wanted
        base.avoided[:] = True
        assert (base.find_many(everything) == -1).all()


# -- packs side by side ----------------------------------------------------------------------------
def test_threads_fill_packs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow write of one pack holds nobody up once there is enough to write; a small checkpoint stays one pack."""
    monkeypatch.setattr(packs, "SPREAD", 10 * PAGE)
    inner, slow, going = DirectoryStore(tmp_path), threading.Event(), threading.Event()

    def when(operation: str, name: str) -> None:
        if operation == "write" and threading.current_thread().name == "slow" and not going.is_set():
            going.set()
            assert slow.wait(20)

    written = Packs(FailingBlobs(inner.blobs, when), "", "ab" * 8, bytes(32), beside=3)
    for _ in range(9):
        list(written.append(os.urandom(PAGE)))
    assert len(written._written) == 1
    for _ in range(3):
        list(written.append(os.urandom(PAGE)))
    other = threading.Thread(target=lambda: list(written.append(os.urandom(PAGE))), name="slow")
    other.start()
    assert going.wait(20)
    places = [place for _ in range(5) for place in written.append(os.urandom(3 * PAGE), [PAGE] * 3)]
    assert {pack for pack, _, _ in places} == {1} and all(count == 3 for _, _, count in places)
    slow.set()
    other.join()
    found = written.finish()
    assert len(found) == 2 and all(pack.size and pack.hash for pack in found)


def test_a_run_is_cut_where_a_pack_is_full(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.blobs.pack_limit = 10 * PAGE
    written = Packs(store.blobs, "", "cd" * 8, bytes(32))
    places = list(written.append(os.urandom(25 * PAGE), [PAGE] * 25))
    assert [(pack, count) for pack, _, count in places] == [(0, 10), (1, 10), (2, 5)]
    assert [pack.size for pack in written.finish()] == [32 + count * PAGE + 64 for count in (10, 10, 5)]


def test_a_checkpoint_of_rows_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small tasks over several open packs."""
    monkeypatch.setattr(packs, "SPREAD", 20 * PAGE)
    monkeypatch.setattr(writer_module, "ROWS", 5)
    device, store = many_pages(400), DirectoryStore(tmp_path)
    pages = [device.read(BASE + index * PAGE, PAGE) for index in range(400)]
    from tests.support.checkpoint.samples import taken
    state = taken(device)
    with store.writer("i") as writer:
        for at in range(0, 400, 100):
            writer.add_rows(framed(pages[at:at + 100]), listed(pages).part(at, at + 100), KEY, lambda: None)
        writer.finish(state)
    store.verify("i")
    assert restores_as(store.open("i"), device)
