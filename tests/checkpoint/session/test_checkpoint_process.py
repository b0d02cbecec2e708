"""Checkpoints written by a process of their own are those that the worker's threads write; whatever ends it ends
safely.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.codec.frames import FRAME_BYTES
from rgpu.checkpoint.manifest.reuse import Wanted
from rgpu.checkpoint.pages import copy_memory as room_module
from rgpu.checkpoint.session import checkpoint_link
from rgpu.checkpoint.session.checkpoint_link import CheckpointProcess, RemoteWriter
from rgpu.checkpoint.session.checkpoint_process import LARGE, bulk, pack_wanted, unbulk, unpack_wanted
from rgpu.checkpoint.session.checkpointing import Checkpointing
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, user_tag
from rgpu.checkpoint.store.grants import Grant, UserCheckpoints
from rgpu.session.errors import AlreadyExists, Refused, StoreError, StoreUnreachable, UsageError
from tests.support.checkpoint.samples import KEY
from tests.support.checkpoint.sessions import Session
from tests.support.checkpoint.store_helpers import restores_as

STORE_KEY, TAG = bytes(range(32)), user_tag("somebody")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "BLOCK", 7)


class Place:
    """A store, the process that writes to it, and the session whose checkpoints these are."""

    def __init__(self, folder: Path, room: int = 20) -> None:
        self.blobs = DirectoryStore(folder).blobs
        self.checkpoints, self.process, self.session = UserCheckpoints(self.blobs, TAG,
                                                                       STORE_KEY), CheckpointProcess(), Session(room)

    def writer(self, name: str, **wanted: Any) -> RemoteWriter:
        with Grant(self.blobs, TAG, STORE_KEY) as grant:
            return RemoteWriter(self.process, name, grant.values, [os.dup(fd) for fd in grant.descriptors],
                                staging=wanted.pop("staging", 100 * FRAME_BYTES), **wanted)

    def write(self, name: str, **wanted: Any) -> tuple[Checkpointing, dict[str, Any]]:
        checkpointing = Checkpointing(self.session.device, KEY, reserve=0)  # type: ignore[arg-type]
        with self.writer(name, **wanted) as writer:
            _, counts = checkpointing.run(writer, self.session.stand_still, self.session.take)
        return checkpointing, counts

    def is_of_the_pause(self, name: str) -> bool:
        return restores_as(self.checkpoints.open(name), self.session.moment)  # type: ignore[arg-type]

    def no_frame_is_missing(self) -> bool:
        pool = self.session.device.frames()
        return len(pool._free) == pool._made

    def nothing_is_left_of(self, *names: str) -> bool:
        found = {blob.name for blob in self.blobs.ls("")}
        return not any("packs/" in blob for blob in found) if not names else \
            {name for name in found if ".image" in name} == {self.checkpoints.own.manifest(name) for name in names}


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("RGPU_IMAGE_PROCESSES", "1")
    made = Place(tmp_path, getattr(request, "param", 20))
    yield made
    if made.process._link is not None:
        made.process._link.end()


@pytest.mark.parametrize("place", [0, 1, 20, 1000], indirect=True)
def test_the_checkpoint_is_of_the_pause(place: Place) -> None:
    """As test_checkpointing has it for the writer in this process; then two more that build on it, one of them
    smaller.
    """
    checkpointing, counts = place.write("first")
    assert counts["pages"] == 51 and counts["zero_pages"] == 5 and counts["pause_ms"] > 0
    assert place.is_of_the_pause("first") and not place.session.device.blocks and place.no_frame_is_missing()
    place.write("second", base="first")
    assert place.is_of_the_pause("second")
    place.session.churn = lambda: None  # type: ignore[method-assign]
    place.write("third", base="second")
    _, counts = place.write("fourth", base="third")
    assert counts["unchanged_pages"] == 51 and counts["new_chunks"] == 0
    assert place.is_of_the_pause("fourth") and place.no_frame_is_missing()
    assert place.process._link is not None
    with pytest.raises(AlreadyExists):
        place.writer("fourth")
    place.write("fifth", base="fourth")
    assert place.is_of_the_pause("fifth"), "a refusal does not end the process"


@pytest.mark.parametrize("moment", ["cut", "image.paused", "image"])
def test_a_process_that_is_killed_takes_the_checkpoint_with_it_and_nothing_else(place: Place, moment: str) -> None:
    """Frames come back only when nothing writes to them any more; the next checkpoint starts another process."""
    place.write("first")
    link = place.process.link()

    def point(name: str) -> None:
        if name == moment:
            os.kill(link.pid, signal.SIGKILL)

    checkpointing = Checkpointing(place.session.device, KEY, reserve=0, point=point)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="ended: take the checkpoint again"), place.writer("second") as writer:
        checkpointing.run(writer, place.session.stand_still, place.session.take)
    assert place.no_frame_is_missing() and not place.session.device.blocks
    assert link._life == -1, "all that it had started is gone"
    place.write("third", base="first")
    assert place.is_of_the_pause("third") and place.nothing_is_left_of("first", "third")


def test_one_that_does_not_answer_holds_a_pause_no_longer_than_a_store_may(
        place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_link, "STILL_PATIENCE", 0.5)
    link, still = place.process.link(), place.session.stand_still

    @contextmanager
    def stand_still() -> Iterator[None]:
        with still():
            os.kill(link.pid, signal.SIGSTOP)
            yield

    checkpointing, writer = Checkpointing(place.session.device, KEY,
                                          reserve=0), place.writer("first")  # type: ignore[arg-type]
    monkeypatch.setattr(checkpoint_link, "PATIENCE", 2.0)
    with pytest.raises(StoreUnreachable, match="does not answer"), writer:
        checkpointing.run(writer, stand_still, place.session.take)
    assert place.no_frame_is_missing()
    monkeypatch.setattr(checkpoint_link, "PATIENCE", 60.0)
    place.write("second")
    assert place.is_of_the_pause("second")


def test_one_that_takes_nothing_holds_nobody_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_link, "STILL_PATIENCE", 1.0)
    with pytest.raises(StoreUnreachable, match="takes nothing"), place.writer("first") as writer:
        monkeypatch.setattr(checkpoint_link, "PATIENCE", 1.0)
        os.kill(place.process.link().pid, signal.SIGSTOP)
        while True:
            writer._link.tell("hurry", on=False, padding=bytes(60_000))
    monkeypatch.setattr(checkpoint_link, "PATIENCE", 60.0)
    place.write("second")
    assert place.is_of_the_pause("second")


def test_it_gives_way(place: Place) -> None:
    """While pages are stored: the reason is what whoever asked is told, and nothing of the checkpoint is left."""
    checkpointing = Checkpointing(place.session.device, KEY, reserve=0,  # type: ignore[arg-type]
                      point=lambda name: name == "cut" and checkpointing.give_way("a move begins") and None)
    with pytest.raises(Refused, match="a move begins"), place.writer("first") as writer:
        checkpointing.run(writer, place.session.stand_still, place.session.take)
    assert place.no_frame_is_missing() and place.nothing_is_left_of()
    place.write("second")
    assert place.is_of_the_pause("second")


def test_its_pace(place: Place) -> None:
    """A rate from the start, and another one while it writes: what it used is told."""
    told: list[tuple[float, bool]] = []

    def ask(writer: RemoteWriter) -> None:
        time.sleep(0.3)
        told.append(writer.pace.renew(0.0))

    place.session.device.room = 0
    checkpointing = Checkpointing(place.session.device, KEY, reserve=0)  # type: ignore[arg-type]
    with place.writer("first", rate=200_000.0) as writer:
        thread = threading.Thread(target=ask, args=(writer,))
        thread.start()
        checkpointing.run(writer, place.session.stand_still, place.session.take)
        thread.join()
    assert place.is_of_the_pause("first") and told and told[0][0] >= 0


def test_what_it_has_to_say_stands_in_the_log_of_the_worker(place: Place, tmp_path: Path,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    """Not on stdout: a worker gives its own to the device, for what kernels print."""
    place.write("first")
    for pack in tmp_path.rglob("*.pack"):
        os.truncate(pack, 100)
    place.write("second", base="first")
    assert place.is_of_the_pause("second"), "an older checkpoint that is damaged is no base, and no reason to fail"
    said = capfd.readouterr()
    assert not said.out and '"an older checkpoint is damaged' in said.err and '"image": "first"' in said.err


def test_what_it_raises_is_raised_here(place: Place) -> None:
    with pytest.raises(UsageError, match="is no name for a checkpoint"), place.writer("x" * 300):
        pass
    place.write("first")
    assert place.is_of_the_pause("first")


def test_what_messages_carry() -> None:
    pieces = [b"a" * 3, np.arange(4, dtype="<u4"), b"", bytes(LARGE), b"b", b"c" * (LARGE + 1), memoryview(b"d")]
    assert bytes(unbulk([bulk(pieces)])) == b"".join(bytes(piece) for piece in pieces) and unbulk([bulk([])]) == b""
    for counts in ([], [0], [3, 0, 2]):
        wanted = Wanted.everything(counts)
        fd = bulk(pack_wanted(wanted))
        again = unpack_wanted(unbulk([fd]))
        assert again.indices.tolist() == wanted.indices.tolist() and again.counts.tolist() == counts
        assert wanted.indices.tolist() == [index for count in counts for index in range(count)]
    assert Wanted.of([np.array([1, 5]), np.zeros(0, int), np.array([2])]).indices.tolist() == [1, 5, 2]
