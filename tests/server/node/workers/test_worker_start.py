"""A worker is started where an earlier one of the same epoch may still listen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.link.local.channel import listen
from rgpu.server.node.workers import handles as workers
from rgpu.server.node.workers import homes
from rgpu.session.errors import Refused, TimedOut
from tests.support.eventually import eventually_async

LISTENS = """
import sys, time
from pathlib import Path
from rgpu.link.local.channel import listen
time.sleep(0.3)
sock = listen(Path(sys.argv[1]))
time.sleep(60)
"""


def test_the_new_worker_is_reached_not_one_that_is_on_its_way_out(tmp_path: Path) -> None:
    folder = workers.worker_folder(tmp_path, "s")
    folder.mkdir(parents=True)
    earlier = homes.make(tmp_path)
    homes.link(earlier, folder, 2)
    leaving = listen(earlier.socket)  # this process: it accepts nobody any more
    made: list[subprocess.Popen[bytes]] = []

    def spawn(arguments: list[str], home: homes.Home, log_path: Path, apart: bool) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", LISTENS, str(home.socket)]))
        return made[-1]

    boxes: Any = SimpleNamespace(spawn=spawn, release=lambda home: None, memory=0)

    async def event(*values: Any) -> None: ...

    async def test() -> None:
        handle = await workers.start(tmp_path, "s", epoch=2, device="cpu:0", quota=1, state="empty", on_event=event,
                                     boxes=boxes)
        assert handle.pid == made[0].pid != os.getpid()
        assert (folder / "2" / homes.SOCKET).samefile(handle.home.socket if handle.home else "")
        handle.leave()

    try:
        asyncio.run(test())
    finally:
        leaving.close()
        for process in made:
            process.kill()
            process.wait()


def test_a_death_is_told_whatever_cannot_be_found_out_of_it(tmp_path: Path) -> None:
    """Without it a session waits until its agent has reached nobody for 10 s, and `rgpu ps` says that it runs."""
    made: list[subprocess.Popen[bytes]] = []
    told: list[tuple[str, dict[str, Any]]] = []

    def spawn(arguments: list[str], home: homes.Home, log_path: Path, apart: bool) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", LISTENS, str(home.socket)]))
        return made[-1]

    def killed_for_memory(home: homes.Home) -> bool:
        raise TypeError("no such group")

    async def event(session: str, name: str, values: dict[str, Any]) -> None:
        told.append((name, values))
        if name == "fault":
            raise ValueError("a handler's own bug")

    async def test() -> None:
        boxes: Any = SimpleNamespace(spawn=spawn, release=lambda *_: None, memory=0,
                                     killed_for_memory=killed_for_memory)
        handle = await workers.start(tmp_path, "s", epoch=2, device="cpu:0", quota=1, state="empty", on_event=event,
                                     boxes=boxes)
        handle._take({"event": "fault"})
        made[0].kill()
        made[0].wait()
        async with asyncio.timeout(30):
            while len(told) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(test())
    assert told[1] == ("died", {"pid": made[0].pid, "position": None})


def test_a_worker_that_does_not_start_leaves_nothing_but_its_log(tmp_path: Path) -> None:
    """A link would stand for a worker: the folder would never be removed."""
    def spawn(arguments: list[str], home: homes.Home, log_path: Path, apart: bool) -> subprocess.Popen[bytes]:
        with open(log_path, "wb") as log:
            return subprocess.Popen([sys.executable, "-c", "raise SystemExit('no such device')"], stderr=log)

    async def event(*values: Any) -> None: ...

    boxes: Any = SimpleNamespace(spawn=spawn, release=lambda home: home.clear(), memory=0)
    with pytest.raises(TimedOut, match="status 1; its log ends: .*no such device"):
        asyncio.run(workers.start(tmp_path, "s", epoch=2, device="cpu:0", quota=1, state="empty", on_event=event,
                                  boxes=boxes))
    assert [path.name for path in workers.worker_folder(tmp_path, "s").iterdir()] == ["worker.log"]
    assert not homes.all_of(tmp_path)


async def nobody(*values: Any) -> None:
    pass


def begin(folder: Path, spawn: Any) -> Any:
    boxes: Any = SimpleNamespace(spawn=spawn, release=lambda home: home.clear(), memory=0)
    return workers.start(folder, "s", epoch=2, device="cpu:0", quota=1, state="empty", on_event=nobody, boxes=boxes)


@pytest.mark.parametrize(("error", "raised"), [(OSError("no process can be forked"), TimedOut),
                                               (Refused("all users have a worker"), Refused)])
def test_a_process_that_cannot_be_started_is_reported(tmp_path: Path, error: Exception,
                                                      raised: type[Exception]) -> None:
    def spawn(*values: Any, **named: Any) -> subprocess.Popen[bytes]:
        raise error

    with pytest.raises(raised, match=str(error)):
        asyncio.run(begin(tmp_path, spawn))
    assert not homes.all_of(tmp_path)


def test_the_daemon_works_while_a_process_is_started(tmp_path: Path) -> None:
    """The first worker of a node waits for its template; a daemon that stops meanwhile leaves no worker behind."""
    made: list[subprocess.Popen[bytes]] = []
    go_on = threading.Event()

    def spawn(arguments: list[str], home: homes.Home, log_path: Path, apart: bool) -> subprocess.Popen[bytes]:
        assert go_on.wait(30)
        made.append(subprocess.Popen([sys.executable, "-c", LISTENS, str(home.socket)]))
        return made[-1]

    async def test() -> None:
        task = asyncio.ensure_future(begin(tmp_path, spawn))
        await eventually_async(lambda: homes.all_of(tmp_path))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await eventually_async(lambda: made and made[0].poll() is not None)
        await eventually_async(lambda: not homes.all_of(tmp_path))

    asyncio.run(test())
