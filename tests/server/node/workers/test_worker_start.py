"""A worker is started where an earlier one of the same epoch may still listen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rgpu.link.local.channel import listen
from rgpu.server.node.workers import handles as workers
from rgpu.server.node.workers import homes

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

    def spawn(arguments: list[str], home: homes.Home, log_path: Path) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-c", LISTENS, str(home.socket)]))
        return made[-1]

    boxes: Any = SimpleNamespace(spawn=spawn, release=lambda home: None)

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
