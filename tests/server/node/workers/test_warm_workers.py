"""Warm workers: ready ahead, taken by sessions, replaced when killed, counted, gone with their daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rgpu.server.node.workers import handles as workers
from rgpu.server.node.workers import warm_workers
from rgpu.server.node.workers.boxes import basic
from rgpu.server.node.workers.warm_pool_size import CONTEXT_MEMORY
from rgpu.server.node.workers.warm_workers import WarmWorkers
from rgpu.server.worker import warm_worker
from rgpu.server.worker.warm_worker import ROOM
from tests.support.eventually import eventually_async


async def nobody(session: str, event: str, values: dict[str, Any]) -> None:
    pass


def make(folder: Path, wanted: int = 1) -> WarmWorkers:
    boxes = basic(folder)
    return WarmWorkers(folder, wanted, spawn=boxes.spawn, release=boxes.release, room=lambda device: 1 << 40,
                  options=workers.common_options(folder, "info", 0))


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_a_session_takes_a_warm_worker_and_another_takes_its_place(tmp_path: Path) -> None:
    async def work() -> None:
        warm = make(tmp_path)
        warm.start(["cpu:0"])
        try:
            await eventually_async(lambda: warm.ready("cpu:0"))
            (pid,) = warm.pids()
            handle = await workers.start(tmp_path, "a/1", epoch=3, device="cpu:0", quota=64 << 20, state="empty",
                                         on_event=nobody, warm=warm)
            assert handle.pid == pid and (warm.used, warm.missed) == (1, 0)
            view = await handle.refresh()
            assert (view["session"], view["epoch"], view["quota"], view["state"]) == ("a/1", 3, 64 << 20, "empty")
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            assert b"a/1" in line and b"rgpu.server.worker.main" in line, "ps shows whose worker it is"
            assert "worker started" in handle.log_path.read_text(), "it logs for its session now"
            await eventually_async(lambda: warm.ready("cpu:0"))
            assert warm.pids() != [pid]
            handle.leave()
            adopted = await workers.adopt(tmp_path, nobody)  # as a restarted daemon would
            assert [item.session for item in adopted] == ["a/1"]
            adopted[0].kill()
            await eventually_async(adopted[0].closed.is_set)
        finally:
            warm.close()

    run(work)


def test_a_killed_warm_worker_is_replaced_and_none_is_needed(tmp_path: Path) -> None:
    async def work() -> None:
        warm = make(tmp_path)
        warm.start(["cpu:0"])
        try:
            await eventually_async(lambda: warm.ready("cpu:0"))
            (pid,) = warm.pids()
            os.kill(pid, signal.SIGKILL)
            await eventually_async(lambda: warm.pids() and warm.pids() != [pid])
            (pid,) = warm.pids()
            os.kill(pid, signal.SIGSTOP)  # frozen: it does not answer, and a worker is started as ever
            handle = await workers.start(tmp_path, "b", epoch=1, device="cpu:0", quota=1 << 20, state="empty",
                                         on_event=nobody, warm=warm)
            assert handle.pid != pid and (await handle.refresh())["session"] == "b"
            handle.kill()
        finally:
            warm.close()

    run(work)


def test_whoever_comes_while_one_is_being_started_waits_for_it(tmp_path: Path) -> None:
    """It is ahead of any that would be started now; the next one finds none on its way and starts its own."""
    async def work() -> None:
        warm = make(tmp_path)
        warm.start(["cpu:0"])
        try:
            await eventually_async(lambda: warm._begun.get("cpu:0"))
            options: Any = {"epoch": 1, "device": "cpu:0", "quota": 1 << 20, "state": "empty", "on_event": nobody,
                            "warm": warm}
            first, second = await asyncio.gather(workers.start(tmp_path, "a", **options),
                                                 workers.start(tmp_path, "b", **options))
            assert sorted((first.warm, second.warm)) == [False, True]
            assert (warm.used, warm.missed) == (1, 1)
            for handle in (first, second):
                handle.kill()
        finally:
            warm.close()

    run(work)


def test_nobody_waits_for_one_that_does_not_start(tmp_path: Path) -> None:
    async def work() -> None:
        warm = make(tmp_path)

        async def fails(device: str) -> Any:
            await asyncio.sleep(0.05)
            raise OSError("no room")

        warm._make = fails  # type: ignore[method-assign]
        warm.start(["cpu:0"])
        await eventually_async(lambda: warm._begun.get("cpu:0"))
        assignment: Any = None
        assert await asyncio.wait_for(warm.become("cpu:0", assignment, tmp_path / "x.sock"), 5.0) is None
        assert warm.missed == 1
        warm.close()

    run(work)


def test_nobody_waits_long_for_one_that_is_slow_and_those_beyond_the_first_give_way(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        warm = make(tmp_path, 2)
        monkeypatch.setattr(warm_workers, "SOON_SECONDS", 0.2)
        never = asyncio.Event()

        async def hangs(device: str) -> Any:
            await never.wait()

        warm._make = hangs  # type: ignore[method-assign]
        warm.start(["cpu:0"])
        await eventually_async(lambda: warm._begun.get("cpu:0"))
        assignment: Any = None
        assert await asyncio.wait_for(warm.become("cpu:0", assignment, tmp_path / "x.sock"), 5.0) is None
        warm.close()
        warm = make(tmp_path, 2)
        monkeypatch.setattr(warm_workers.warm_pool_size, "IDLE", -1.0)
        warm.start(["cpu:0"])
        try:
            await eventually_async(lambda: warm.ready("cpu:0") == 2)
            first, second = warm.pids()
            await warm.give_way("cpu:0", 1 << 40)
            assert warm.pids() == [first], "the next session's own stays"
            assert not Path(f"/proc/{second}").exists()
            await asyncio.sleep(3 * warm_workers.warm_pool_size.LOOK_SECONDS)
            assert not warm._making.get("cpu:0"), "none is started while the session takes the memory"
            monkeypatch.setattr(warm_workers, "AWAY_SECONDS", 1.0)
            warm._away.clear()
            warm._fill("cpu:0")
            await eventually_async(lambda: warm._making.get("cpu:0"))
            (third,) = warm._making["cpu:0"]
            await warm.give_way("cpu:0", 1)
            assert third.poll() is not None and warm.pids() == [first], "one that was being started is not waited for"
            await eventually_async(lambda: warm.ready("cpu:0") == 2)
        finally:
            warm.close()

    run(work)


def test_warm_workers_end_with_their_daemon(tmp_path: Path) -> None:
    path = tmp_path / "one.sock"
    process = subprocess.Popen([sys.executable, "-m", "rgpu.server.worker.main", "--device", "cpu:0", "--socket",
                                str(path), "--spare", ROOM], stderr=subprocess.DEVNULL)
    try:
        from rgpu.link.local.channel import connect

        channel = connect(path, 60)
        assert channel.receive()[0] == {"event": "ready"}
        channel.close()
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_only_those_beyond_the_next_sessions_own_are_counted(tmp_path: Path) -> None:
    async def work() -> None:
        warm = make(tmp_path, 3)
        warm._ready["cuda:0"], warm._starting["cuda:0"] = [], 3
        assert warm.memory("cuda:0") == 2 * CONTEXT_MEMORY and warm.memory("cpu:0") == 0
        warm._starting["cuda:0"] = 1
        assert warm.memory("cuda:0") == 0
        warm._ready["cuda:0"] = [None]  # type: ignore[list-item]
        assert warm.memory("cuda:0") == CONTEXT_MEMORY
        warm._away["cuda:0"] = time.monotonic() + 5
        assert warm.memory("cuda:0") == 0, "that one ends before it is ready"

    run(work)


def test_a_daemon_that_never_comes_leaves_no_warm_worker_behind(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed while the process started: nobody would ever connect, and nobody would end it."""
    monkeypatch.setattr(warm_worker, "CONNECT_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        assert warm_worker.wait(listener, None) is None  # type: ignore[arg-type]
        assert listener.gettimeout() is None, "the worker goes on with it"
