"""Two leaders command one session's start: the one that woke up late must leave no second worker (OWNERSHIP 6)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.node.commands.moves import MoveCommands
from rgpu.server.node.commands.starts import SessionStarts
from rgpu.server.node.commands.workers import WorkerCommands
from rgpu.server.node.devices.slots import DeviceSlot, DeviceSlots
from rgpu.server.node.sessions import worker_exits
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.device_room import DeviceRoom
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.transitions import Transitions
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.workers import handles as workers
from rgpu.server.node.workers.starter import WorkerStarter
from rgpu.session.errors import Fenced, LinkError, Refused, RgpuError


class Handle:
    """A worker that is ended by ``forget`` and whose steps wait for their gates."""

    def __init__(self, epoch: int, gates: dict[str, asyncio.Event]) -> None:
        self.pid, self.epoch, self.gates = 1000 + epoch, epoch, gates
        self.device, self.quota, self.view, self.warm, self.session = "cpu:0", 1, {}, False, "s"
        self.lingers = False  #: its process has not gone when it has said that it will
        self.closed = asyncio.Event()
        self.asked: list[str] = []

    async def give_deadline(self, fd: int) -> None:
        await self.request("deadline")

    async def request(self, do: str, **values: Any) -> dict[str, Any]:
        self.asked.append(do)
        if do == "forget":
            if not self.lingers:
                self.closed.set()
        elif (gate := self.gates.get(f"{do} {self.epoch}")) is not None:
            await gate.wait()
        if self.closed.is_set() and do != "forget":
            raise LinkError("the worker has ended")
        return {}

    async def refresh(self) -> dict[str, Any]:
        return self.view

    def kill(self) -> None:
        self.closed.set()


class Here:
    """A node whose workers are handles; ``gates`` hold up "start E", "deadline E" and "activate E"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.made: list[Handle] = []

        async def start(directory: Path, session: str, *, epoch: int, **options: Any) -> Handle:
            handle = Handle(epoch, self.gates)
            self.made.append(handle)
            if (gate := self.gates.get(f"start {epoch}")) is not None:
                await gate.wait()
            return handle

        monkeypatch.setattr(workers, "start", start)

        async def event(*values: Any) -> None: ...

        checkpoints: Any = SimpleNamespace()
        facts: Any = SimpleNamespace()
        self.held = HeldSessions("a")
        self.devices = DeviceSlots("a", {"cpu:0": DeviceSlot("cpu:0", facts, 100)}, self.held.handles)
        room = DeviceRoom(self.devices, self.held.leaving, CheckpointShares(0, self.devices.free))
        starter, deadline = WorkerStarter(tmp_path, event), Deadline("a")
        self.starts = SessionStarts(self.held, room, starter, checkpoints, deadline, lambda session, move: None)
        self.moves = MoveCommands(self.held, room, starter, deadline, lambda session, move: None,
                                  lambda session, move: {})
        self.workers = WorkerCommands(self.held, lambda session: None)
        self.transitions = Transitions(self.held)

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def alive(self) -> list[int]:
        return [handle.epoch for handle in self.made if not handle.closed.is_set()]

    def begin(self, epoch: int) -> asyncio.Task[dict[str, Any]]:
        return asyncio.ensure_future(self.starts.start(session="s", epoch=epoch, quota=1))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("at", ["start 2", "deadline 2", "activate 2"])
@pytest.mark.parametrize("newer_first", [True, False])
def test_the_newer_start_wins_wherever_the_older_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str,
                                                    newer_first: bool) -> None:
    async def test() -> None:
        here = Here(monkeypatch, tmp_path)
        here.gate(at)
        newer_gate = here.gate("start 3")
        older = here.begin(2)
        await settled()
        newer = here.begin(3)
        await settled()
        for name in ["start 3", at] if newer_first else [at, "start 3"]:
            here.gate(name).set()
            await settled()
        assert newer_gate.is_set() and (await newer)["worker_pid"] == 1003
        with pytest.raises(RgpuError):
            await older
        assert here.alive() == [3] and here.held.running["s"].pid == 1003 and here.held.epochs["s"] == 3
        assert here.held.claims == {}

    asyncio.run(test())


def test_an_older_start_is_refused_while_a_newer_one_is_at_it_and_so_is_the_same_again(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test() -> None:
        here = Here(monkeypatch, tmp_path)
        gate = here.gate("start 3")
        newer = here.begin(3)
        await settled()
        for epoch in (2, 3):
            with pytest.raises(Fenced, match="at epoch 3"):
                await here.begin(epoch)
        assert (await here.workers.forget(session="s", epoch=2)) == {"ended": False}
        gate.set()
        await newer
        assert here.alive() == [3]

    asyncio.run(test())


@pytest.mark.parametrize("verb", ["forget", "end"])
def test_a_session_that_ends_while_its_worker_starts_leaves_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                 verb: str) -> None:
    async def test() -> None:
        here = Here(monkeypatch, tmp_path)
        gate = here.gate("start 2")
        started = here.begin(2)
        await settled()
        await (here.workers.forget(session="s", epoch=2) if verb == "forget"
               else here.workers.drop(session="s"))
        gate.set()
        with pytest.raises(Fenced):
            await started
        assert here.alive() == [] and here.held.running == {}

    asyncio.run(test())


def test_of_two_moves_that_arrive_the_newer_is_received(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test() -> None:
        here = Here(monkeypatch, tmp_path)
        gate = here.gate("start 2")
        first = asyncio.ensure_future(here.moves.receive(session="s", move="m1", epoch=2, quota=1))
        await settled()
        second = asyncio.ensure_future(here.moves.receive(session="s", move="m2", epoch=2, quota=1))
        await settled()
        gate.set()
        with pytest.raises(Fenced):
            await first
        await second
        assert here.held.incoming["s"].move == "m2" and len(here.alive()) == 1

    asyncio.run(test())


def test_a_move_is_over_before_its_sources_process_has_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The end of a context on a GPU takes seconds. Until then its room is not given to anybody else."""
    async def test() -> None:
        here = Here(monkeypatch, tmp_path)
        await here.begin(2)
        (source,) = here.made
        source.quota, source.lingers = 80, True
        await asyncio.wait_for(here.transitions.obey("s", "m", "forget", 2), 1.0)
        assert "forget" in source.asked and not source.closed.is_set() and "s" not in here.held.running
        assert here.devices.free("cpu:0") == 20
        small = await asyncio.wait_for(here.starts.start(session="small", epoch=1, quota=20), 1.0)
        assert small["device"] == "cpu:0", "what fits beside it does not wait"
        large = asyncio.ensure_future(here.starts.start(session="large", epoch=1, quota=60))
        await settled()
        assert not large.done(), "it waits for the room, and is not refused"
        source.closed.set()
        await settled()
        assert (await large)["device"] == "cpu:0" and here.held.leaving.handles == set()

    asyncio.run(test())


def test_a_process_that_does_not_go_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test() -> None:
        monkeypatch.setattr(worker_exits, "END_SECONDS", 0.05)
        here = Here(monkeypatch, tmp_path)
        await here.begin(2)
        (source,) = here.made
        source.lingers = True
        await here.transitions.obey("s", "m", "forget", 2)
        assert not source.closed.is_set()
        await asyncio.sleep(0.2)
        assert source.closed.is_set() and here.held.leaving.handles == set()

    asyncio.run(test())


def test_workers_of_one_run_share_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Here(monkeypatch, tmp_path)
    for name in ("job", "job/2", "other"):
        worker = Handle(1, {})
        worker.session, worker.quota = name, 40
        here.held.running[name] = worker  # type: ignore[assignment]
    assert here.devices.free("cpu:0") == 20
    assert here.devices.free("cpu:0", "job/3") == 60 and here.devices.free("cpu:0", "job/2") == 20, \
        "the worker that it replaces is still there"
    assert here.devices.choose("cpu:0", 40, "job/3") == "cpu:0"
    with pytest.raises(Refused, match="cpu:0 has 20 bytes free of the 40"):
        here.devices.choose("cpu:0", 40, "new")


def test_several_devices_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Here(monkeypatch, tmp_path)
    facts: Any = SimpleNamespace()
    here.devices.slots["cpu:1"] = DeviceSlot("cpu:1", facts, 60)
    both = Handle(1, {})
    both.device, both.quota = "cpu:0+1", 50
    here.held.running["s"] = both  # type: ignore[assignment]
    assert (here.devices.free("cpu:0"), here.devices.free("cpu:1")) == (50, 10)
    assert here.devices.choose("cpu:0+1", 10) == "cpu:0+1" and here.devices.choose(None, 30) == "cpu:0"
    with pytest.raises(Refused, match="cpu:1 has 10 bytes free of the 20"):
        here.devices.choose("cpu:0+1", 20)
    with pytest.raises(Refused, match="no device cpu:2; it has cpu:0, cpu:1"):
        here.devices.choose("cpu:0+2", 1)
