"""A session leaves for another process while its calls are applied: what replays come to, what samples say of it."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rgpu.link.data.frames import Handover
from rgpu.link.messages.data import TO_NODE
from rgpu.migrate.move.machine import Command, Event
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.transfer.peer_source import PeerSource
from rgpu.server.device.cpu import peer as cpu_peer
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.main import Worker
from rgpu.server.worker.move import departure as departures
from rgpu.server.worker.move.departure import Departure
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.errors import LinkError, MoveFailed, RecoveryFailed
from tests.support.eventually import eventually
from tests.support.worker.arriving import digest
from tests.support.worker.journal import Journal
from tests.support.worker.kernels import MIX, PTX, STAMP, TOUCH

DATA, WORD = DEVICE_BASE, DEVICE_BASE + GRANULE
COUNT = GRANULE // 4  #: words: 32 pages
PAGES = 32


class Leaving:
    """A session whose program calls on and on, and a process that it may go to. ``irreproducible``: no replay helps."""

    def __init__(self, irreproducible: bool, *options: str) -> None:
        """``options``: of the destination, see :mod:`tests.support.worker.arriving`."""
        self.device = CpuDevice(memory=128 << 20)
        self.worker = Worker("s", 1, self.device, "running")
        self.folder = Path(options[0]) if options else Path()
        self.irreproducible = irreproducible
        self.journal = Journal()
        near, far = socket.socketpair()
        keys = secrets.token_bytes(32), secrets.token_bytes(32)
        self.connection = Handover(keys[0], keys[1], TO_NODE, "s", 1, "pages").connection(near)
        self.arriving = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker.arriving", str(far.fileno()), keys[0].hex(), keys[1].hex(),
             *options],
            pass_fds=[far.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        far.close()
        self._over = threading.Event()
        self._begin()
        self._program = threading.Thread(target=self._run, daemon=True)
        self._program.start()

    def _begin(self) -> None:
        journal = self.journal
        self.worker.runtime.feed([
            journal("session_open", version=1, pid=1, environment=b""),
            journal("context_create", context=16, device=0, flags=0, primary=1),
            journal("memory_map", address=DATA, size=2 * GRANULE, device=0),
            journal("memory_allocate", address=DATA, size=GRANULE),
            journal("memory_allocate", address=WORD, size=4096),
            journal("module_load", PTX, module=17, context=16, library=0, options=b""),
            journal("memset", destination=DATA, pitch=0, width=COUNT, height=1, element=4, value=1, stream=0)])
        for _ in range(2):  # compiled before anything is measured
            self.worker.runtime.feed(self._step(7))
        assert self.device.drain(60) and not self.worker.runtime.executor.error, self.device.error_detail()

    def _launch(self, function: int, blocks: int, threads: int, *values: np.generic) -> Any:
        return self.journal("launch", module=17, function=function, grid_x=blocks, grid_y=1, grid_z=1, block_x=threads,
                            block_y=1, block_z=1, shared=0, flags=0, stream=0, attributes=b"",
                            parameters=b"".join(value.tobytes().ljust(8, b"\0") if value.itemsize < 8 and at < 2 else
                                                value.tobytes() for at, value in enumerate(values)))

    def _step(self, number: int) -> list[Any]:
        if self.irreproducible:
            return [self._launch(STAMP, 1, 1, np.uint64(WORD)),
                    self._launch(MIX, COUNT // 256, 256, np.uint64(DATA), np.uint32(COUNT), np.uint64(WORD))]
        return [self._launch(TOUCH, COUNT // 256, 256, np.uint64(DATA), np.uint32(COUNT), np.uint32(number))]

    def _run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self.worker.runtime.feed(self._step(number))
            except Exception:  # noqa: BLE001 - the session ended: so does its program
                return
            self.device.wait_complete(self.journal.seq, 10.0)  # as programs do that look at their results
            time.sleep(0.005)

    def leave(self, **options: Any) -> tuple[Departure, dict[str, Any]]:
        departure = Departure(self.worker, "m", self.connection, MoveOptions(**options))
        return departure, departure.run()

    def held(self) -> list[str]:
        """What the destination says that it has: digest and position."""
        self.connection.close()  # a source that has nothing to add does that
        assert self.arriving.stdout is not None
        for line in self.arriving.stdout:  # its log comes this way, too
            if line.startswith("held "):
                return line.split()[1:]
        return []

    def close(self) -> None:
        self._over.set()
        self.worker.runtime.stop()
        self._program.join(10)
        self.connection.close()
        self.arriving.kill()
        self.arriving.communicate()
        self.device.close()


@pytest.fixture
def leaving(request: pytest.FixtureRequest) -> Iterator[Leaving]:
    made = Leaving(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("leaving", [False], indirect=True, ids=["reproducible"])
def test_a_replay_that_is_right_is_sampled_and_repairs_nothing(leaving: Leaving) -> None:
    _, said = leaving.leave(mode="replay")
    assert said["mode"] == "replay" and said["mismatched_pages"] == said["repaired_bytes"] == 0, said
    assert said["sampled_pages"] >= PAGES and said["sampled_mismatches"] == 0, said
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


@pytest.mark.parametrize("leaving", [True], indirect=True, ids=["irreproducible"])
def test_what_a_replay_gets_wrong_is_sampled_counted_and_repaired(leaving: Leaving) -> None:
    _, said = leaving.leave(mode="replay")
    assert said["mode"] == "replay" and PAGES <= said["mismatched_pages"] <= PAGES + 1, said
    assert said["repaired_bytes"] == said["mismatched_pages"] << 16
    assert PAGES <= said["sampled_mismatches"] <= PAGES + 1, said
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


@pytest.mark.parametrize("leaving", [True], indirect=True, ids=["irreproducible"])
@pytest.mark.parametrize("mode", ["auto", "replay"])
def test_a_replay_that_would_repair_too_much_is_given_up_before_the_last_pause(
        leaving: Leaving, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a link of 1 MB/s: 2 MiB take longer than the stop may. The session was never stopped for it."""
    send_round = Departure.do_send_round

    def slow(departure: Departure, command: Command) -> Event:
        event = send_round(departure, command)
        return replace(event, found=replace(event.found, sent=2 << 20, seconds=2.0))

    monkeypatch.setattr(Departure, "do_send_round", slow)
    settled: list[int] = []
    monkeypatch.setattr(Departure, "do_compare", lambda *_: settled.append(1))
    with pytest.raises(MoveFailed, match="sampled pages differ.*longer than the 1.0 s") as failed:
        leaving.leave(mode=mode, max_downtime=1.0)
    assert failed.value.detail["replay"] and not settled
    assert failed.value.detail["mismatched"] > 0.4, "32 or 33 of 64 pages, so that the next move knows"
    before = leaving.worker.runtime.applied
    eventually(lambda: leaving.worker.runtime.applied > before, within=10)
    assert leaving.worker.runtime.applied > before and not leaving.worker.runtime.paused


@pytest.mark.parametrize("leaving", [False], indirect=True, ids=["reproducible"])
def test_a_copy_is_governed_and_arrives(leaving: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    class Watched(departures.CopyThrottle):
        def rest(self, now: float, position: int, busy: float) -> float:
            rests.append(super().rest(now, position, busy))
            return rests[-1]

    monkeypatch.setattr(departures, "CopyThrottle", Watched)
    _, said = leaving.leave(mode="copy")
    assert said["mode"] == "copy" and said["sampled_pages"] == 0 and said["mismatched_pages"] == 0
    assert len(rests) >= PAGES // 32, "every frame is told to the throttle"
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


# -- pages pulled out of the source's memory ---------------------------------------------------


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Callable[..., Leaving]]:
    """A session that may go to a process of the same host: both know a folder."""
    made: list[Leaving] = []

    def make(irreproducible: bool = False, *options: str) -> Leaving:
        made.append(Leaving(irreproducible, str(tmp_path), *options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not list(tmp_path.iterdir()), "a socket was left behind"


def test_a_session_goes_from_memory_to_memory(beside: Callable[..., Leaving]) -> None:
    """Every step dirties all its pages, so the last pause pulls them all; the program runs until then."""
    leaving = beside()
    _, said = leaving.leave(mode="copy")
    assert (said["mode"], said["pages_by"], said["pages_why"]) == ("copy", "peer", ""), said
    assert said["bytes_pulled"] >= 2 * PAGES << 16 and said["bytes_sent"] - said["bytes_pulled"] < 1 << 20
    assert {"begin", "first_round", "pause.hash", "pause.pages", "pause.verify", "destination.compare"} <= set(
        said["phases_ms"])
    assert said["page_rounds"][0]["bytes"] == 2 * GRANULE and said["page_rounds"][-1]["bytes"] >= GRANULE
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


def test_stream_is_taken_when_asked_for(beside: Callable[..., Leaving]) -> None:
    leaving = beside()
    _, said = leaving.leave(mode="copy", pages="stream")
    assert (said["pages_by"], said["pages_why"], said["bytes_pulled"]) == ("stream", "stream was asked for", 0)
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


@pytest.mark.parametrize("irreproducible", [False, True])
def test_a_replay_beside_pulls_what_it_got_wrong(irreproducible: bool, beside: Callable[..., Leaving]) -> None:
    """The cut's copies go over the connection; before and behind it pages are pulled."""
    leaving = beside(irreproducible)
    _, said = leaving.leave(mode="replay")
    assert said["mode"] == "replay" and said["pages_by"] == "peer", said
    assert (said["mismatched_pages"] >= PAGES) == irreproducible
    if irreproducible:
        assert said["page_rounds"][-1]["bytes"] >= said["repaired_bytes"] - (1 << 16)
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


def test_a_pull_that_goes_wrong_is_mended_before_anything_is_promised(beside: Callable[..., Leaving]) -> None:
    leaving = beside(False, "2")
    _, said = leaving.leave(mode="copy")
    assert said["pages_by"] == "peer" and said["verified"]
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]


def test_memory_that_stays_wrong_ends_the_move_and_not_the_session(beside: Callable[..., Leaving]) -> None:
    leaving = beside(False, "99")
    with pytest.raises(RecoveryFailed, match="differ"):
        leaving.leave(mode="copy")
    before = leaving.worker.runtime.applied
    eventually(lambda: leaving.worker.runtime.applied > before, within=10)
    assert leaving.worker.runtime.applied > before and not leaving.worker.runtime.paused


@pytest.mark.parametrize("when", ["first_round", "last"])
def test_a_destination_killed_while_it_pulls_leaves_the_session_running(when: str, beside: Callable[..., Leaving],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = beside()
    honest = PeerSource._pull

    def kill(source: PeerSource, runs: Any, table: Any, phases: Any, *, tell: bool) -> None:
        if tell == (when == "first_round"):
            leaving.arriving.kill()
        honest(source, runs, table, phases, tell=tell)

    monkeypatch.setattr(PeerSource, "_pull", kill)
    with pytest.raises(LinkError):
        leaving.leave(mode="copy")
    before = leaving.worker.runtime.applied
    eventually(lambda: leaving.worker.runtime.applied > before, within=10)
    assert leaving.worker.runtime.applied > before and not leaving.worker.runtime.paused
    for socket_path in leaving.folder.iterdir():  # of a process that had no time to remove it
        socket_path.unlink()


def test_a_device_that_cannot_export_uses_the_connection(beside: Callable[..., Leaving],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_peer, "MEMORY", "/nonexistent/mem")
    leaving = beside()
    _, said = leaving.leave(mode="copy")
    assert said["pages_by"] == "stream" and "cannot be exported" in said["pages_why"] and said["verified"]
    assert leaving.held() == [digest(leaving.device), str(leaving.worker.runtime.applied)]
