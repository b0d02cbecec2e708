"""Processes that fill a restore's frames: what they leave undone is done, and nobody writes where he should not."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.checkpoint.codec import encoder, encoders, prefetch_pool
from rgpu.checkpoint.codec.encoders import Encoders, Process
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore
from rgpu.checkpoint.store.delivery import Delivery
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.session.errors import DeviceError, StoreMissing
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.packs import pack_of
from tests.support.checkpoint.samples import fresh, same
from tests.support.checkpoint.store_helpers import PAGE, checkpoint_of, many_pages


@pytest.fixture(scope="module")
def helpers() -> Iterator[Encoders]:
    processes = Encoders(2)
    yield processes
    processes.close()


def filled_by(processes: Encoders, found: StoredCheckpoint, device: FakeDevice,
              target: FakeDevice | None = None) -> FakeDevice:
    target = target or fresh(device)
    delivery = Delivery(found, target, True, processes)  # type: ignore[arg-type]
    restore.restore(target, found.state, [], print, lambda write: delivery.run())  # type: ignore[arg-type]
    return target


def frames_are_back(target: FakeDevice) -> bool:
    pool = target.frames()
    return pool._made == len(pool._free)


def test_more_packs_than_a_process_holds_open(tmp_path: Path, helpers: Encoders, monkeypatch: pytest.MonkeyPatch,
                                              ) -> None:
    monkeypatch.setattr("rgpu.checkpoint.codec.encoders.SLOTS", 5)  # as many as the pages of one frame
    store, device = DirectoryStore(tmp_path), many_pages(60)
    store.blobs.pack_limit = PAGE
    checkpoint_of(store, "i", device)
    with store.open("i") as found:
        assert len(found.table.body.packs) == 60
        assert same(filled_by(helpers, found, device), device)
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device), device), "slots are given again"


@pytest.mark.parametrize("way", ["killed", "answers nonsense", "cannot", "stopped"])
def test_what_processes_leave_is_done_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helpers: Encoders,
                                                 way: str) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(200)
    checkpoint_of(store, "i", device)
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device), device), "they are there, and have compiled"
    asked, real = [0], Process.ask
    monkeypatch.setattr(prefetch_pool, "PATIENCE", 4.0 if way == "stopped" else 60)

    def ask(self: Process, *given: Any) -> None:
        asked[0] += 1
        group = helpers._started.pid  # type: ignore[union-attr]
        if asked[0] == 5 and way == "killed":
            os.killpg(group, signal.SIGKILL)
        if asked[0] == 5 and way == "stopped":
            os.killpg(group, signal.SIGSTOP)
        real(self, *given)

    def answer(self: Process) -> Any:
        found = right(self)
        if asked[0] >= 5 and way == "cannot":
            raise encoders.StoreError("pages cannot be read: it says so")
        if asked[0] >= 5 and way == "answers nonsense":
            raise encoder.Ended
        return found

    right = Process.answer
    monkeypatch.setattr(Process, "ask", ask)
    monkeypatch.setattr(Process, "answer", answer)
    target = fresh(device)
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device, target), device)
    assert 5 <= asked[0] <= 8 and frames_are_back(target)
    monkeypatch.undo()
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device), device), "others are started"


def test_a_pack_that_is_gone_is_an_error_and_costs_no_process(tmp_path: Path, helpers: Encoders) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(20)
    checkpoint_of(store, "i", device)
    pack_of(tmp_path).rename(tmp_path / "away")
    target = fresh(device)
    with store.open("i") as found, pytest.raises(StoreMissing):
        filled_by(helpers, found, device, target)
    assert frames_are_back(target)
    (tmp_path / "away").rename(tmp_path / "packs" / f"{found.table.body.packs[0].name}.pack")
    group = helpers._started.pid  # type: ignore[union-attr]
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device), device)
    assert helpers._started.pid == group and helpers._all == 2  # type: ignore[union-attr]


def test_a_device_that_fails_ends_the_restore_with_every_frame_back(tmp_path: Path, helpers: Encoders) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(100)
    checkpoint_of(store, "i", device)
    target, real, runs = fresh(device), FakeDevice.write_pages, []

    def fails(given: Any) -> Any:
        runs.append(given)
        if len(runs) > 4:
            raise DeviceError("gone", 700)
        return real(target, given)

    target.write_pages = fails  # type: ignore[method-assign]
    with store.open("i") as found, pytest.raises(DeviceError, match="gone"):
        filled_by(helpers, found, device, target)
    assert frames_are_back(target) and len(helpers._idle) == 2, "and no process lost"
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device), device)


def test_without_memory_for_frames_there_are_fewer_hands(tmp_path: Path, helpers: Encoders,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(60)
    checkpoint_of(store, "i", device)
    target = fresh(device)
    pool = target.frames()
    make, asked = pool._make, itertools.count()

    def one() -> Any:  # several threads make frames
        if next(asked):
            raise DeviceError("no memory", 2)
        return make()

    monkeypatch.setattr(pool, "_make", one)
    with store.open("i") as found:
        assert same(filled_by(helpers, found, device, target), device)
    assert pool._made == 1 and frames_are_back(target) and len(helpers._idle) == 2


def test_a_large_restore_starts_processes_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RGPU_RESTORE_PROCESSES", "2")
    with encoders.for_restore(encoders.WORTH - 1) as none:
        assert none is None
    with encoders.for_restore(encoders.WORTH) as some:
        assert some is not None and some.count == 2
        started = some._started
    assert started is not None and started.wait(60) == 0
    encoders.get_ready()  # as a warm worker does
    with encoders.for_restore(1) as some:
        assert some is not None
        started = some._started
    assert started is not None and started.wait(60) == 0 and not encoders._ready
    monkeypatch.setenv("RGPU_RESTORE_PROCESSES", "0")
    with encoders.for_restore(encoders.WORTH) as none:
        assert none is None
