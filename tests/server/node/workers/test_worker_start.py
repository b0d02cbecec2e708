"""A worker is started where an earlier one of the same epoch may still listen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.local.channel import listen
from rgpu.server.node.workers import handles as workers

LISTENS = """
import sys, time
from pathlib import Path
from rgpu.link.local.channel import listen
time.sleep(0.3)
sock = listen(Path(sys.argv[1]))
time.sleep(60)
"""


def test_the_new_worker_is_reached_not_one_that_is_on_its_way_out(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workers.worker_folder(tmp_path, "s")
    folder.mkdir(parents=True)
    leaving = listen(folder / "2.sock")  # this process: it accepts nobody any more
    made: list[subprocess.Popen[bytes]] = []

    def spawn(arguments: list[str], log_path: Path) -> subprocess.Popen[bytes]:
        path = arguments[arguments.index("--socket") + 1]
        made.append(subprocess.Popen([sys.executable, "-c", LISTENS, path]))
        return made[-1]

    async def event(*values: Any) -> None: ...

    async def test() -> None:
        handle = await workers.start(tmp_path, "s", epoch=2, device="cpu:0", quota=1, state="empty", on_event=event)
        assert handle.pid == made[0].pid != os.getpid()
        handle.leave()

    monkeypatch.setattr(workers, "spawn", spawn)
    try:
        asyncio.run(test())
    finally:
        leaving.close()
        for process in made:
            process.kill()
            process.wait()
