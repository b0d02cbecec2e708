"""A checkpoint of a session that runs on is of the moment of its pause, and gives way to whoever needs the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rgpu.checkpoint.codec.frames import FRAME_BYTES
from rgpu.checkpoint.pages import copy_memory as room_module
from rgpu.checkpoint.session import checkpointing as checkpointing_module
from rgpu.checkpoint.session.checkpointing import Checkpointing
from rgpu.checkpoint.store import writer as writer_module
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, DirectoryStore
from rgpu.checkpoint.store.pace import Pace
from rgpu.session.errors import Refused, StoreFull, StoreUnreachable, TimedOut
from tests.support.checkpoint.samples import KEY
from tests.support.checkpoint.sessions import Session
from tests.support.checkpoint.store_helpers import BASE, PAGE, FailingBlobs, copy_of, restores_as
from tests.support.eventually import eventually


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "BLOCK", 7)


@pytest.mark.parametrize("room", [0, 1, 20, 1000])
def test_the_checkpoint_is_of_the_pause(tmp_path: Path, room: int) -> None:
    """With room for none, some and all pages on the device; everything is overwritten as soon as the pause ends."""
    session, store = Session(room), DirectoryStore(tmp_path)
    checkpointing, counts = session.checkpoint(store, "first")
    assert checkpointing.taken.cut_bytes == min(room, 42) * PAGE
    plain = 42 * PAGE + 100 + 70_000 + PAGE  # what is no zeros: the short page, the global and the mirror never fit
    assert checkpointing.taken.paused_bytes == plain - checkpointing.taken.cut_bytes
    assert counts["pages"] == 51 and counts["zero_pages"] == 3 + 2
    assert counts["cut_bytes"] == checkpointing.taken.cut_bytes and counts["pause_ms"] > 0
    assert restores_as(store.open("first"), session.moment)  # type: ignore[arg-type]
    assert not session.device.blocks, "all memory is given back"

    second, counts = session.checkpoint(store, "second", "first")
    assert restores_as(store.open("second"), session.moment)  # type: ignore[arg-type]
    session.device.write(BASE + 3 * PAGE, b"one")
    held = copy_of(session.device)
    session.churn = lambda: None  # type: ignore[method-assign]
    _, counts = session.checkpoint(store, "third", "second")
    assert restores_as(store.open("third"), held)
    assert not session.device.blocks


@pytest.mark.parametrize("room", [0, 20])
def test_nothing_is_stored_in_the_pause(tmp_path: Path, room: int) -> None:
    """With host memory for what finds no room on the device: it is taken before, and the store waits for the end."""
    session, inner = Session(room), DirectoryStore(tmp_path)
    still: list[bool] = []
    running, made = threading.Event(), session.device.frames()
    running.set()
    real = session.stand_still

    @contextmanager
    def stand_still() -> Iterator[None]:
        before = made._made
        running.clear()
        with real():
            yield
        assert made._made == before, "no frame was made in the pause"
        running.set()

    session.stand_still = stand_still  # type: ignore[method-assign]
    store = CheckpointStore(FailingBlobs(inner.blobs, lambda operation, name: still.append(not running.is_set())))
    checkpointing, counts = session.checkpoint(store, "first", staging=100 * FRAME_BYTES)
    assert not any(still) and len(still) > 3
    assert checkpointing.taken.paused_bytes > 0 and checkpointing.taken.cut_bytes == room * PAGE
    parts = [getattr(checkpointing.taken, f"{part}_ms") for part in ("hash", "state", "room", "copy", "read")]
    assert all(part > 0 for part in parts) and sum(parts) <= checkpointing.taken.pause_ms <= sum(parts) + 2000
    assert counts["read_ms"] > 0 and counts["prepare_ms"] > 0
    assert restores_as(inner.open("first"), session.moment)  # type: ignore[arg-type]
    eventually(lambda: made._made <= 2, within=30)
    assert made._made == 2, "what is more than a few frames is given back"


def test_room_is_taken_before_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was estimated costs the pause nothing; what changed beyond it finds room in the pause."""
    monkeypatch.setattr(checkpointing_module, "MORE_PAGES", 2)
    session, store, taken = Session(1000), DirectoryStore(tmp_path), []
    real_stage, standing = session.device.stage, [False]
    real_still = session.stand_still

    def stage(size: int) -> int:
        taken.append((standing[0], size // PAGE))
        return real_stage(size)

    @contextmanager
    def stand_still() -> Iterator[None]:
        standing[0] = True
        if session.position:
            session.churn()  # all of it, between the estimate and the pause
        with real_still():
            yield
        standing[0] = False

    session.device.stage = stage  # type: ignore[method-assign]
    session.stand_still = stand_still  # type: ignore[method-assign]
    session.churn = lambda: None  # type: ignore[method-assign]
    session.checkpoint(store, "first")
    assert sum(pages for _, pages in taken) == 45 and not any(still for still, _ in taken)
    taken.clear()
    del session.churn
    session.checkpoint(store, "second", "first")
    assert sum(pages for still, pages in taken if not still) == 2
    assert sum(pages for still, pages in taken if still) >= 40
    assert restores_as(store.open("second"), session.moment)  # type: ignore[arg-type]
    assert not session.device.blocks


def test_only_what_changed_is_set_aside(tmp_path: Path) -> None:
    session, store = Session(1000), DirectoryStore(tmp_path)
    session.churn = lambda: None  # type: ignore[method-assign]
    session.checkpoint(store, "first")
    session.device.write(BASE + 3 * PAGE, b"one")
    session.device.write(BASE + 9 * PAGE, b"two")
    checkpointing, counts = session.checkpoint(store, "second", "first")
    assert checkpointing.taken.cut_bytes == 2 * PAGE and checkpointing.taken.paused_bytes == 0
    assert counts["unchanged_pages"] == counts["pages"] - 2 and counts["new_chunks"] == 2
    assert restores_as(store.open("second"), session.device)


def test_memory_goes_back_as_it_is_read(tmp_path: Path) -> None:
    """While later pages are read, the blocks before them are free already."""
    session, seen = Session(1000), []
    real = session.device.copy_and_hash

    def copy_and_hash(pages: Any, staging: int, key: bytes) -> Any:
        seen.append(len(session.device.blocks))
        return real(pages, staging, key)

    session.device.copy_and_hash = copy_and_hash  # type: ignore[method-assign]
    session.checkpoint(DirectoryStore(tmp_path), "first")
    reads = seen[seen.index(max(seen)):]
    assert max(seen) == 7 and reads[-1] == 1 and sorted(reads, reverse=True) == reads


@pytest.mark.parametrize("point", ["image.paused", "cut", "reading", "image"])
def test_giving_way(tmp_path: Path, point: str) -> None:
    """At each step: the checkpoint is not there, nothing of it stays, all memory is free, and the reason is said."""
    session, store = Session(1000), DirectoryStore(tmp_path)
    wanted: dict[str, Any] = {}
    made: list[Checkpointing] = []
    freed: list[int] = []
    threads: list[threading.Thread] = []

    def give_way(name: str) -> None:
        if name == point:
            freed.append(made[0].give_way("a move begins"))

    if point == "reading":
        real, calls = session.device.copy_and_hash, []

        def copy_and_hash(pages: Any, staging: int, key: bytes) -> Any:
            calls.append(1)
            if len(calls) == 9:  # six blocks were staged
                threads.append(threading.Thread(target=give_way, args=("reading",)))
                threads[0].start()
                eventually(lambda: made[0]._reason, within=20)  # told; the memory goes after this read
            return real(pages, staging, key)

        session.device.copy_and_hash = copy_and_hash  # type: ignore[method-assign]
    checkpointing = Checkpointing(session.device, KEY, reserve=0, point=give_way, **wanted)  # type: ignore[arg-type]
    made.append(checkpointing)
    with pytest.raises(Refused, match="gave way: a move begins"), store.writer("first") as writer:
        checkpointing.run(writer, session.stand_still, session.take)
    for thread in threads:
        thread.join(20)
    assert checkpointing.wait_read(0) and not session.device.blocks
    frames = session.device.frames()
    assert frames._made == len(frames._free), "every frame came back"
    assert freed[0] == (42 * PAGE if point in ("image.paused", "cut") else 0 if point == "image" else freed[0])
    assert store.names() == {} and not list(tmp_path.rglob("*.pack")) and not list(tmp_path.rglob("*.tmp"))
    session.checkpoint(store, "second")
    assert restores_as(store.open("second"), session.moment)  # type: ignore[arg-type]


def test_giving_way_lets_a_slow_writer_go(tmp_path: Path) -> None:
    """A writer that waits for its share of the bandwidth does not keep a move waiting."""
    session, store, pace = Session(1000), DirectoryStore(tmp_path), Pace(1000.0)
    checkpointing = Checkpointing(session.device, KEY, reserve=0)  # type: ignore[arg-type]
    failed: list[Exception] = []

    def run() -> None:
        try:
            with store.writer("slow", staging=1 << 20, pace=pace) as writer:
                checkpointing.run(writer, session.stand_still, session.take)
        except Refused as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = threading.Event()
    for _ in range(3000):
        if session.moment is not None and checkpointing.taken.pause_ms:
            break
        deadline.wait(0.01)
    assert checkpointing.taken.pause_ms, "the pause is not slowed by the bandwidth"
    checkpointing.give_way("a move begins")
    assert checkpointing.wait_read(30)
    thread.join(30)
    assert failed and not thread.is_alive() and not session.device.blocks


def test_a_store_that_fails_behind_the_pause(tmp_path: Path) -> None:
    session, inner = Session(1000), DirectoryStore(tmp_path)

    def full(operation: str, name: str) -> None:
        if operation == "commit":
            raise StoreFull("no room")

    failing = CheckpointStore(FailingBlobs(inner.blobs, full))
    with pytest.raises(StoreFull):
        session.checkpoint(failing, "first")
    assert not session.device.blocks and inner.names() == {}
    frames = session.device.frames()
    assert frames._made == len(frames._free), "every frame came back"
    session.checkpoint(inner, "second")
    assert restores_as(inner.open("second"), session.moment)  # type: ignore[arg-type]


def test_a_store_that_takes_nothing_does_not_hold_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room on the device, little in the host, and a store that hangs: the session runs on, the checkpoint fails."""
    monkeypatch.setattr(writer_module, "STILL_PATIENCE", 0.3)
    session, inner, go = Session(0), DirectoryStore(tmp_path), threading.Event()
    running_again: list[bool] = []

    def hangs(operation: str, name: str) -> None:
        if operation == "write":
            running_again.append(go.wait(20))

    real = session.stand_still

    @contextmanager
    def stand_still() -> Iterator[None]:
        try:
            with real():
                yield
        finally:
            go.set()  # the session runs; only now the store comes back

    session.stand_still = stand_still  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachable, match="was paused"):
        session.checkpoint(CheckpointStore(FailingBlobs(inner.blobs, hangs)), "first", staging=1 << 20)
    assert running_again and all(running_again) and inner.names() == {}


def test_a_session_that_does_not_stand_still(tmp_path: Path) -> None:
    session, store = Session(1000), DirectoryStore(tmp_path)

    @contextmanager
    def never() -> Iterator[None]:
        raise TimedOut("it does not drain")
        yield

    session.stand_still = never  # type: ignore[method-assign, assignment]
    with pytest.raises(TimedOut):
        session.checkpoint(store, "first")
    assert not session.device.blocks and store.names() == {}


def test_a_limit_to_the_cut(tmp_path: Path) -> None:
    """No more than the node allows is set aside, however much is free; the rest is read in the pause."""
    session = Session(1000)
    checkpointing, _ = session.checkpoint(DirectoryStore(tmp_path), "first", room=10 * PAGE)
    assert checkpointing.taken.cut_bytes == 10 * PAGE and checkpointing.taken.paused_bytes > 30 * PAGE
