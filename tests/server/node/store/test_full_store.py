"""A checkpoint into a store that is full: what no image needs any more goes first, and then it is tried again."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.checkpoint.store import collect, retention
from rgpu.checkpoint.store.grants import Images
from rgpu.checkpoint.store.images import DirectoryBlobs
from rgpu.server.node.commands.checkpoints import CheckpointCommand
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.store.checkpoints import Checkpoints
from rgpu.server.node.store.images import FULL_GRACE, NodeImages
from rgpu.session.errors import StoreFull
from tests.support.checkpoint.store_helpers import PAGE, image_of, many_pages

PAGES = 10
ROOM = 35 * PAGE  #: of the whole store: three images, and something


class Worker:
    """Writes an image of PAGES pages that no other has, if the disk has room for it."""

    device, quota, view = "cpu:0", 1, {}

    def __init__(self, root: Path, images: Images) -> None:
        self.root, self.images = root, images
        self.asked, self.closed = 0, asyncio.Event()

    async def request(self, do: str, *, image: str, **values: Any) -> dict[str, Any]:
        assert do == "checkpoint"
        self.asked += 1
        used = sum(path.stat().st_size for path in self.root.rglob("*.pack"))
        if used + PAGES * PAGE > ROOM:
            raise StoreFull("the disk is full")
        return image_of(self.images.own, image, many_pages(PAGES, self.asked))


class Here:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.record = tmp_path / "store", SimpleNamespace(agent="agent", state="running", image=None,
                                                                     usable_images=[])

        async def record(name: str) -> Any:
            return self.record

        async def records() -> list[Any]:
            return [self.record]

        async def bases(session: str, known: str | None) -> tuple[str, list[str], dict[str, Any]]:
            return "", [], {}

        node_images = NodeImages(DirectoryBlobs(self.root), bytes(32), record, records, retention.Policy(2))
        monkeypatch.setattr(node_images, "bases", bases)
        monkeypatch.setattr(node_images, "written", lambda session, image: None)
        self.images = node_images.of_user("agent")
        self.node_images, self.held = node_images, HeldSessions("a")
        self.command = CheckpointCommand(self.held, node_images, Checkpoints(0, lambda spec: 99), Deadline("a"))
        self.worker: Any = Worker(self.root, self.images)
        self.held.running["s"] = self.worker

    def checkpoint(self, name: str) -> None:
        asyncio.run(self.command.checkpoint(session="s", image=name))

    def forget(self, *names: str, seconds_ago: float) -> None:
        """Removed, and condemned by a collection so long ago."""
        for name in names:
            self.images.own.forget(name)
        collect.collect(self.images.own)
        then = time.time() - seconds_ago
        for mark in self.root.rglob("condemned/*"):
            os.utime(mark, (then, then))

    def names(self) -> list[str]:
        return sorted(info.name for info in self.images.own.ls())


def test_what_no_image_needs_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(tmp_path, monkeypatch)
    for name in "abc":
        here.checkpoint(name)
    here.forget("a", seconds_ago=FULL_GRACE + 5)
    here.checkpoint("d")
    assert here.worker.asked == 5 and here.names() == ["b", "c", "d"]
    for name in here.names():
        here.images.own.verify(name)


def test_a_full_store_of_images_that_count_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a session could be made from goes, nor what somebody may just be reading."""
    here = Here(tmp_path, monkeypatch)
    for name in "abc":
        here.checkpoint(name)
    with pytest.raises(StoreFull):
        here.checkpoint("d")
    here.forget("a", seconds_ago=FULL_GRACE / 2)
    with pytest.raises(StoreFull):
        here.checkpoint("d")
    assert here.worker.asked == 5, "it is not tried again for nothing"
    assert here.names() == ["b", "c"] and len(list(here.root.rglob("*.pack"))) == 3
    assert here.held.bases["s"] == "c"


def test_other_users_make_room_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(tmp_path, monkeypatch)
    other = here.node_images.of_user("another agent")
    image_of(other.own, "theirs", many_pages(PAGES, 99))
    image_of(other.own, "old", many_pages(PAGES, 98))
    here.checkpoint("a")
    other.own.forget("old")
    collect.collect(other.own)
    for mark in here.root.rglob("condemned/*"):
        os.utime(mark, (time.time() - 100, time.time() - 100))
    here.checkpoint("b")
    assert here.names() == ["a", "b"] and [info.name for info in other.own.ls()] == ["theirs"]
