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
from rgpu.migrate.records.quotas import QuotaRecord, quota_key
from rgpu.migrate.records.schema import encode
from rgpu.migrate.registry.base import Entry
from rgpu.server.node.commands.checkpoints import CheckpointCommand
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.store.checkpoint_quota import CheckpointQuota
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.store.node_checkpoints import FULL_GRACE, NodeCheckpoints
from rgpu.session.errors import Corrupt, LimitReached, StoreFull
from tests.support.checkpoint.store_helpers import PAGE, checkpoint_of, many_pages

PAGES = 10
ROOM = 35 * PAGE  #: of the whole store: three checkpoints, and something


class Worker:
    """Writes a checkpoint of PAGES pages that no other has, if the disk has room for it."""

    device, quota, view = "cpu:0", 1, {}

    def __init__(self, root: Path, checkpoints: UserCheckpoints) -> None:
        self.root, self.checkpoints = root, checkpoints
        self.asked, self.closed, self.earlier = 0, asyncio.Event(), False

    async def request(self, do: str, *, image: str, **values: Any) -> dict[str, Any]:
        assert do == "checkpoint"
        if self.earlier and "most" in values["store"]:
            raise Corrupt("no grant of a store: Object contains unknown field `most`", reason="grant")
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

    def checkpoint(self, name: str, limited: bool = False) -> None:
        asyncio.run(self.command.checkpoint(session="s", image=name, limited=limited))

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


def test_a_worker_of_the_previous_version_is_bounded_after_the_fact(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no bound in what it is granted, and refuses it: the checkpoint is written, counted, and goes again."""
    here = Here(tmp_path, monkeypatch)
    held, key = SimpleNamespace(record=here.record), SimpleNamespace(holder="alice", public="agent")
    quota = QuotaRecord(user="alice", limits={"checkpoints": 15 * PAGE})

    async def session(name: str) -> Any:
        return held

    async def sessions() -> list[Any]:
        return [here.record]

    async def listed(prefix: str) -> Any:
        return SimpleNamespace(entries=[Entry(quota_key("alice"), encode(quota), 1, 1)])

    records: Any = SimpleNamespace(session=session, sessions=sessions, registry=SimpleNamespace(list=listed))
    keys: Any = SimpleNamespace(everybody=lambda: [key])
    here.command._quota = CheckpointQuota(here.node_checkpoints, records, keys, lambda record: "alice")
    here.worker.earlier = True
    here.checkpoint("a", limited=True)
    with pytest.raises(LimitReached, match="alice may have 960 KiB of checkpoints at a time and has 6.* KiB"):
        here.checkpoint("b", limited=True)
    assert here.names() == ["a"] and here.held.bases["s"] == "a"
    here.checkpoint("parked")
    assert here.names() == ["a", "parked"], "what the pool needs is not asked"
    with pytest.raises(LimitReached, match="has 1.3 MiB of checkpoints: remove some"):
        here.checkpoint("c", limited=True)


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
