"""What a worker may have of the host's memory, and who ends when it takes more."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rgpu.server.box import host
from rgpu.server.box.cgroups import Cgroups, Group
from rgpu.server.box.walls import Mode
from rgpu.server.node.workers import handles, homes
from rgpu.server.node.workers.boxes import Boxes
from rgpu.session.errors import UsageError
from tests.support.eventually import eventually

missing = host.missing()
needs_cgroups = pytest.mark.skipif("cgroup" in missing, reason=missing.get("cgroup", ""))
LIMIT = 512 << 20
#: Takes memory until it is ended; says how much it had.
GREEDY = "held = []\nwhile len(held) < 64:\n    held.append(b'x' * (32 << 20)); print(len(held) * 32, flush=True)"


def node(folder: Path) -> Path:
    directory = folder / "nodes" / "a"
    directory.mkdir(parents=True)
    return directory


@needs_cgroups
def test_a_worker_that_takes_all_its_memory_ends_alone_and_the_daemon_is_told_why(tmp_path: Path) -> None:
    boxes = Boxes.of_node(node(tmp_path), Mode.AUTO, memory=LIMIT)
    assert {"memory", "tasks"} <= set(boxes.names)
    told: dict[str, dict[str, Any]] = {}

    async def hear(session: str, event: str, values: dict[str, Any]) -> None:
        if event == "died":
            told[session] = values

    async def work() -> None:
        options: Any = {"epoch": 1, "device": "cpu:0", "quota": 1 << 30, "state": "empty", "on_event": hear,
                        "boxes": boxes}
        lone, other = await asyncio.gather(handles.start(boxes.directory, "greedy", **options),
                                           handles.start(boxes.directory, "other", **options))
        greedy = homes.make(boxes.directory)  # in a group of its own, like the two
        assert lone.home is not None
        procs = boxes._group(lone.home).joins()
        script = ("open('/proc/self/oom_score_adj', 'w').write('1000')\n"
                  + "".join(f"open({path!r}, 'w').write('0')\n" for path in procs) + GREEDY)
        output = tmp_path / "greedy"
        process = Boxes.of_node(boxes.directory, Mode.OFF).execute([sys.executable, "-c", script], greedy, output)
        status = await asyncio.to_thread(process.wait, 60)
        taken = int(output.read_text().split()[-1])
        assert status == -9 and taken < LIMIT >> 20, (status, output.read_text())
        deadline = time.monotonic() + 10
        while "greedy" not in told and time.monotonic() < deadline:
            if boxes.killed_for_memory(lone.home):
                lone.kill()  # version 1 ends one process of a group, version 2 the group
            await asyncio.sleep(0.05)
        assert "all the memory that it may have (512 MiB)" in told["greedy"]["why"]
        assert (await other.refresh())["session"] == "other" and not other.closed.is_set()
        other.kill()
        while "other" not in told:
            await asyncio.sleep(0.02)
        assert "why" not in told["other"]
        boxes.release(greedy)

    asyncio.run(work())
    eventually(lambda: not boxes.cgroups.left(boxes._prefix) and not list((boxes.directory / "homes").iterdir()),
               "a group or a home is left", within=20, every=0.05)


def unified(folder: Path, controllers: str = "cpu memory pids") -> tuple[Path, Path]:
    """A tree like that of version 2, of plain files: its root, and a process' /proc/self/cgroup."""
    own = folder / "tree" / "system.slice" / "rgpu.service"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (own / "cgroup.subtree_control").write_text("")
    membership = folder / "cgroup"
    membership.write_text("0::/system.slice/rgpu.service\n")
    return folder / "tree", membership


def test_in_version_2_the_daemon_goes_into_a_leaf_and_each_worker_gets_a_bounded_group(tmp_path: Path) -> None:
    root, own = unified(tmp_path)
    groups = Cgroups.find("", root=root, own=own)
    groups.prepare()
    assert groups.reason == ""
    folder = root / "system.slice" / "rgpu.service"
    assert (folder / "daemon" / "cgroup.procs").read_text() == str(os.getpid())
    assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids"
    group = groups.make("rgpu-a-1", LIMIT)
    assert group.joins() == [str(folder / "rgpu-a-1" / "cgroup.procs")]
    read = {name: (folder / "rgpu-a-1" / name).read_text()
            for name in ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")}
    assert read == {"memory.max": str(LIMIT), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "4096"}
    (folder / "rgpu-a-1" / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    assert group.killed() == 3


def test_why_there_are_none_is_said(tmp_path: Path) -> None:
    root, own = unified(tmp_path, "cpu io")
    assert "Delegate=yes" in Cgroups.find("", root=root, own=own).reason
    with pytest.raises(UsageError, match="no control group"):
        Cgroups.find(str(tmp_path))


def test_a_worker_without_a_group_was_ended_by_none() -> None:
    assert Group().killed() == 0
