"""A checkpoint into a store that is full: what no checkpoint needs any more goes first, and then it is tried again."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.checkpoint.store import collect, retention
from rgpu.checkpoint.store.checkpoint_store import DirectoryBlobs
from rgpu.checkpoint.store.grants import UserCheckpoints
from rgpu.server.node.commands.checkpoints import CheckpointCommand
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.store.node_checkpoints import FULL_GRACE, NodeCheckpoints
from rgpu.session.errors import StoreFull
from tests.support.checkpoint.store_helpers import PAGE, checkpoint_of, many_pages

PAGES = 10
ROOM = 35 * PAGE  #: of the whole store: three checkpoints, and something


class Worker:
    """Writes a checkpoint of PAGES pages that no other has, if the disk has room for it."""

    device, quota, view = "cpu:0", 1, {}

    def __init__(self, root: Path, checkpoints: UserCheckpoints) -> None:
        self.root, self.checkpoints = root, checkpoints
        self.asked, self.closed = 0, asyncio.Event()

    async def request(self, do: str, *, image: str, **values: Any) -> dict[str, Any]:
        assert do == "checkpoint"
        self.asked += 1
        used = sum(path.stat().st_size for path in self.root.rglob("*.pack"))
        if used + PAGES * PAGE > ROOM:
            raise StoreFull("the disk is full")
        return checkpoint_of(self.checkpoints.own, image, many_pages(PAGES, self.asked))


class Here:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.record = tmp_path / "store", SimpleNamespace(agent="agent", state="running", checkpoint=None,
                                                                     usable_checkpoints=[])

        async def record(name: str) -> Any:
            return self.record

        async def records() -> list[Any]:
            return [self.record]

        async def bases(session: str, known: str | None) -> tuple[str, list[str], dict[str, Any]]:
            return "", [], {}

        node_checkpoints = NodeCheckpoints(DirectoryBlobs(self.root), bytes(32), record, records, retention.Policy(2))
        monkeypatch.setattr(node_checkpoints, "bases", bases)
        monkeypatch.setattr(node_checkpoints, "written", lambda session, checkpoint: None)
        self.checkpoints = node_checkpoints.of_tag(node_checkpoints.tag("agent"))
        self.node_checkpoints, self.held = node_checkpoints, HeldSessions("a")
        self.command = CheckpointCommand(self.held, node_checkpoints, CheckpointShares(0, lambda spec: 99),
                                         Deadline("a"))
        self.worker: Any = Worker(self.root, self.checkpoints)
        self.held.running["s"] = self.worker

    def checkpoint(self, name: str) -> None:
        asyncio.run(self.command.checkpoint(session="s", image=name))

    def forget(self, *names: str, seconds_ago: float) -> None:
        """Removed, and condemned by a collection so long ago."""
        for name in names:
            self.checkpoints.own.forget(name)
        collect.collect(self.checkpoints.own)
        then = time.time() - seconds_ago
        for mark in self.root.rglob("condemned/*"):
            os.utime(mark, (then, then))

    def names(self) -> list[str]:
        return sorted(info.name for info in self.checkpoints.own.ls())


def test_what_no_checkpoint_needs_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(tmp_path, monkeypatch)
    for name in "abc":
        here.checkpoint(name)
    here.forget("a", seconds_ago=FULL_GRACE + 5)
    here.checkpoint("d")
    assert here.worker.asked == 5 and here.names() == ["b", "c", "d"]
    for name in here.names():
        here.checkpoints.own.verify(name)


def test_a_full_store_of_checkpoints_that_count_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    other = here.node_checkpoints.of_tag(here.node_checkpoints.tag("another agent"))
    checkpoint_of(other.own, "theirs", many_pages(PAGES, 99))
    checkpoint_of(other.own, "old", many_pages(PAGES, 98))
    here.checkpoint("a")
    other.own.forget("old")
    collect.collect(other.own)
    for mark in here.root.rglob("condemned/*"):
        os.utime(mark, (time.time() - 100, time.time() - 100))
    here.checkpoint("b")
    assert here.names() == ["a", "b"] and [info.name for info in other.own.ls()] == ["theirs"]
