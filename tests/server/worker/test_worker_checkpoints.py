"""A worker writes a checkpoint while its session runs: what it holds, and to whom it gives way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.pages.frozen import RESERVE
from rgpu.checkpoint.store.checkpoint_store import DirectoryBlobs
from rgpu.checkpoint.store.grants import UserCheckpoints
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker import tasks as worker_tasks
from rgpu.server.worker.main import Worker
from rgpu.session.addresses import DEVICE_BASE, GRANULE, PAGE
from rgpu.session.errors import DeviceError, Fenced, MoveFailed, Refused, RgpuError
from tests.support.eventually import eventually
from tests.support.worker.journal import Answers, Journal

TAG, KEY = "0" * 16, bytes(32)
QUOTA = 64 << 20


class Running:
    """A worker with a session, in this process; its checkpoint can be held up at a step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.device = CpuDevice(memory=QUOTA)
        monkeypatch.setattr(self.device, "free_memory", lambda: RESERVE + (1 << 30) - self.staged())
        self.worker = Worker("s", 1, self.device, "running", "cpu:0", QUOTA)
        monkeypatch.setattr(self.worker, "_end", lambda: None)
        self.journal, self.answers = Journal(), Answers()
        self.worker.runtime.attach(self.answers, 0)
        self.held_at, self.reached, self.go = "", threading.Event(), threading.Event()
        monkeypatch.setattr(worker_tasks, "fault", self.point)
        self.feed("session_open", version=1, pid=1, environment=b"")
        self.feed("context_create", context=16, device=0, flags=0, primary=1)
        self.feed("memory_map", address=DEVICE_BASE, size=GRANULE, device=0)
        self.feed("memory_allocate", address=DEVICE_BASE, size=GRANULE)

    def point(self, name: str) -> str:
        if name == self.held_at:
            self.reached.set()
            assert self.go.wait(20)
        return ""

    def staged(self) -> int:
        return sum(block.nbytes for block in self.device._staged._blocks.values())

    def feed(self, name: str, payload: bytes = b"", **args: Any) -> None:
        self.worker.runtime.feed([self.journal(name, payload, **args)])

    def fill(self, value: int) -> None:
        self.feed("memset", destination=DEVICE_BASE, pitch=GRANULE, width=GRANULE, height=1, element=1, value=value,
                  stream=0)

    def checkpoint(self, image: str, **more: Any) -> dict[str, Any]:
        return self.worker.tasks.do_checkpoint([], image, {"tag": TAG, "key": KEY, "root": str(self.folder)}, **more)

    def begin(self, image: str, at: str, **more: Any) -> Begun:
        """A checkpoint that stops at a step until it is let go."""
        self.held_at = at
        begun = Begun(lambda: self.checkpoint(image, **more))
        assert self.reached.wait(20), begun.failed
        return begun

    def pages(self, checkpoint: str) -> set[bytes]:
        checkpoints = UserCheckpoints(DirectoryBlobs(self.folder), TAG, KEY)
        with checkpoints.open(checkpoint) as opened:
            return {bytes(data or bytes(PAGE)) for _, _, data in opened.pages()}


class Begun:
    def __init__(self, work: Any) -> None:
        self.result: dict[str, Any] = {}
        self.failed: list[RgpuError] = []
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except RgpuError as error:
            self.failed.append(error)

    def end(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    made = Running(tmp_path, monkeypatch)
    yield made
    made.go.set()
    made.device.close()


def test_the_session_runs_on_and_the_checkpoint_is_of_the_pause(running: Running) -> None:
    running.fill(1)
    begun = running.begin("i", "cut")
    assert running.staged() == GRANULE and running.worker.tasks._checkpointing is not None
    for value in range(2, 6):
        running.fill(value)
    assert running.device.drain(5) and running.worker.runtime.applied == 9
    running.go.set()
    begun.end()
    assert begun.result["position"] == 5 and begun.result["cut_bytes"] == GRANULE, begun.failed
    assert begun.result["paused_bytes"] == 0 and 0 < begun.result["pause_ms"] < begun.result["total_ms"]
    assert running.pages("i") == {b"\1" * PAGE} and running.staged() == 0
    assert running.device.read(DEVICE_BASE, 8) == b"\5" * 8
    running.held_at = ""
    second = running.checkpoint("j", base="i")
    assert second["bytes"] > 0 and running.pages("j") == {b"\5" * PAGE}
    assert running.checkpoint("k", base="j")["cut_bytes"] == 0, "nothing changed"


@pytest.mark.parametrize(("room", "aside"), [(0, QUOTA - GRANULE), (10 << 20, QUOTA - GRANULE + (10 << 20))])
def test_what_may_be_set_aside(running: Running, room: int, aside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody was promised, and what is left of the session's own quota."""
    seen = []
    monkeypatch.setattr(worker_tasks, "Checkpointing", lambda device, key, room, **more: seen.append(room) or made(
        device, key, room, **more))
    from rgpu.checkpoint.session.checkpointing import Checkpointing as made

    running.checkpoint("i", room=room)
    running.checkpoint("j")
    assert seen == [aside, None]


def test_a_second_one_is_refused(running: Running) -> None:
    running.fill(1)
    begun = running.begin("i", "cut")
    with pytest.raises(Refused, match="being written already"):
        running.checkpoint("j")
    running.go.set()
    begun.end()
    assert begun.result and running.checkpoint("j", base="i")


def test_the_session_s_own_allocation_wins(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has no memory left gives it to the session, at once; the checkpoint says why it failed."""
    running.fill(1)
    real = running.device.map
    begun = running.begin("i", "cut")

    def full(address: int, size: int) -> None:
        if running.staged():
            raise DeviceError("no memory left", 2)
        real(address, size)

    monkeypatch.setattr(running.device, "map", full)
    running.feed("memory_map", address=DEVICE_BASE + GRANULE, size=GRANULE, device=0)
    assert running.worker.runtime.executor.error == 0 and running.worker.runtime.memory_bytes() == 2 * GRANULE
    running.go.set()
    begun.end()
    assert "the session needs the device's memory" in begun.failed[0].message and begun.failed[0].code == "refused"
    running.held_at = ""
    assert running.checkpoint("j")["pages"] == 2 * GRANULE // PAGE
    monkeypatch.setattr(running, "staged", lambda: 1)
    running.feed("memory_map", address=DEVICE_BASE + 2 * GRANULE, size=GRANULE, device=0)
    assert running.worker.runtime.executor.error == 2, "without a checkpoint there is nothing to give"


class Departs:
    """A move that sends nothing: what it found when it began."""

    staged = -1

    def __init__(self, worker: Worker, *_: Any) -> None:
        self.worker = worker

    def run(self) -> dict[str, Any]:
        Departs.staged = len(self.worker.runtime.device._staged._blocks)  # type: ignore[attr-defined]
        if self.worker.tasks._checkpointing is not None:
            assert self.worker.tasks._checkpointing.wait_read(0), "the ring is the move's"
        with pytest.raises(Refused, match="being moved"):
            self.worker.tasks._begin_checkpoint(None)
        raise MoveFailed("on purpose")


class Connection:
    def close(self) -> None: ...


def send(running: Running) -> None:
    running.worker.tasks.do_send([], "m", ["127.0.0.1", 1], b"t", b"s")


@pytest.fixture
def no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tasks, "connect", lambda address: None)
    monkeypatch.setattr(worker_tasks, "client_preamble", lambda *_: Connection())
    monkeypatch.setattr(worker_tasks, "Departure", Departs)


def test_a_move_goes_first(running: Running, no_link: None) -> None:
    running.fill(1)
    begun = running.begin("i", "cut")
    threading.Timer(0.2, running.go.set).start()
    with pytest.raises(MoveFailed):
        send(running)
    assert Departs.staged == 0
    begun.end()
    assert "gave way: a move of the session begins" in begun.failed[0].message
    assert not list(running.folder.rglob("*.image")) and not list(running.folder.rglob("*.pack"))
    assert running.checkpoint("j")["pages"], "after the move that failed"


def test_a_move_does_not_wait_for_ever(running: Running, no_link: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tasks, "GIVE_WAY_SECONDS", 0.1)
    begun = running.begin("i", "image.paused")
    with pytest.raises(Refused, match="does not end"):
        send(running)
    running.go.set()
    begun.end()


def test_a_worker_that_is_told_to_forget(running: Running) -> None:
    running.fill(1)
    begun = running.begin("i", "cut")
    assert running.staged() == GRANULE
    running.worker.do_forget("ended")
    assert running.staged() == 0, "at once"
    threading.Timer(0.1, running.go.set).start()
    running.worker.tasks.wait_checkpoint(time.monotonic() + 10)
    begun.end()
    assert "not this worker's any more" in begun.failed[0].message
    with pytest.raises(Fenced):
        running.checkpoint("j")


def test_the_daemon_s_word(running: Running) -> None:
    """It may call memory back, and say how fast to write."""
    assert running.worker.tasks.do_give_way("nothing is there") == {"freed": 0}
    assert running.worker.tasks.do_pace(5.0) == {}
    running.feed("memcpy_h2d", np.random.default_rng(1).bytes(GRANULE), destination=DEVICE_BASE, stream=0)
    begun = running.begin("i", "cut", rate=1000.0)
    running.go.set()
    told = eventually(lambda: told if (told := running.worker.tasks.do_pace(1000.0)).get("waited") else {},
                      "at 1000 bytes/s it must wait", 20)
    assert told["used"] > 0
    running.worker.tasks.do_pace(0.0)
    begun.end()
    assert begun.result["bytes"] > GRANULE, begun.failed
    running.reached.clear()
    running.go.clear()
    begun = running.begin("j", "image.paused")
    assert running.worker.tasks.do_give_way("another session begins")["freed"] == GRANULE
    running.go.set()
    begun.end()
    assert "another session begins" in begun.failed[0].message


@pytest.mark.parametrize("before", [0, 1], ids=["when it is asked for", "only in the pause"])
def test_nothing_is_made_of_a_session_that_cannot_be_read_whole(running: Running, before: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """What pins it may come with a call that is applied after it was asked for; the session runs on."""
    looks = iter([[]] * before)
    monkeypatch.setattr(running.device, "pins", lambda: next(looks, ["a kernel used malloc"]))
    running.fill(1)
    with pytest.raises(Refused, match="would not hold all of the session: a kernel used malloc"):
        running.checkpoint("i")
    running.fill(2)
    assert running.device.drain(10) and running.worker.tasks._checkpointing is None
    assert not list(running.folder.rglob("*manifest*")) and running.worker.state == "running"
    monkeypatch.undo()
    assert running.checkpoint("j")["position"] == running.worker.runtime.applied
