"""Daemons of `rgpu up` that die are started again: when, how often, and what is said of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rgpu.cli.pools import strays
from rgpu.cli.pools.supervising import MOST_SECONDS, STEADY_SECONDS, Supervisor, pause, reason
from tests.support.eventually import eventually


class Process:
    """A process whose end the test decides."""

    def __init__(self, pid: int) -> None:
        self.pid, self.status = pid, None

    def poll(self) -> int | None:
        return self.status


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def supervised(restart: bool = True) -> tuple[Supervisor, Clock, list[Any]]:
    clock, made = Clock(), []

    def start() -> Any:
        made.append(Process(len(made) + 1))
        return made[-1]

    found = Supervisor(restart=restart, now=clock)
    found.add("node-a", start, start())
    return found, clock, made


def test_one_that_dies_is_started_again_ever_later_while_it_keeps_dying() -> None:
    found, clock, made = supervised()
    waits = []
    for _ in range(10):
        made[-1].status = -9
        found.look()
        began, count = clock.time, len(made)
        while len(made) == count:
            clock.time += 0.25
            found.look()
            assert clock.time < began + MOST_SECONDS + 1
        waits.append(clock.time - began)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0] and waits[-1] == MOST_SECONDS == pause(100)
    clock.time += STEADY_SECONDS + 1
    made[-1].status = 1
    found.look()
    assert found.daemons["node-a"].failures == 1, "it had run for long: that is forgotten"


@pytest.mark.parametrize(("restart", "status"), [(True, 0), (False, -9), (False, 0)])
def test_one_that_was_told_to_end_stays_ended(restart: bool, status: int) -> None:
    found, clock, made = supervised(restart)
    made[-1].status = status
    found.look()
    clock.time += 1000
    found.look()
    assert not found.daemons and len(made) == 1


def test_reasons() -> None:
    assert [reason(status) for status in (1, -9, -200)] == [
        "it ended with status 1", "it was ended by SIGKILL", "it was ended by signal 200"]


def rgpu(pool: Path, *verb: str, code: int = 0) -> Any:
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", *verb, "-o", "json"], capture_output=True, text=True,
                          env={**os.environ, "RGPU_POOL": str(pool), "RGPU_SPARES": "0", "RGPU_CONFIG": ""}, timeout=90)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if not code else done.stderr


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_daemon_of_a_real_pool_comes_back_and_down_ends_it_for_good(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    (node,) = rgpu(pool, "up", "--nodes", "1", "--lease", "2", "--detach")["nodes"]
    try:
        os.kill(node["pid"], signal.SIGKILL)
        def another() -> dict[str, Any]:
            state = json.loads((pool / "nodes" / "node-a" / "server.json").read_text())
            return state if state["pid"] != node["pid"] and state["ready"] else {}

        state = eventually(another, (pool / "supervisor.log").read_text, 40, every=0.1)
        told = [json.loads(line) for line in (pool / "supervisor.log").read_text().splitlines()]
        died = next(line for line in told if line["event"] == "a daemon died")
        assert (died["host"], died["reason"], died["failures"]) == ("node-a", "it was ended by SIGKILL", 1)
        watcher = json.loads((pool / "supervisor.json").read_text())["pid"]
    finally:
        assert rgpu(pool, "down")["stopped"] == ["node-a"]
    eventually(lambda: not lives(watcher) and not lives(state["pid"]), (watcher, state["pid"]), 5, every=0.05)
    assert not (pool / "supervisor.json").exists()


def test_a_daemon_that_never_begins_is_said_at_once_and_leaves_nobody(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    said = rgpu(pool, "up", "--nodes", "2", "--device", "cpu", "--device", "nonsense:7", "--detach", code=6)
    assert "the daemon of node-b ended" in said and not (pool / "supervisor.json").exists()
    eventually(lambda: not any(str(pool).encode() in path.read_bytes()
                               for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()), within=10, every=0.1)


def test_daemons_whose_folder_was_removed_are_named_by_down(tmp_path: Path) -> None:
    """Also where another pool was made in its place; whoever ends them as it is told ends all."""
    pool = tmp_path / "pool"
    (first,) = rgpu(pool, "up", "--nodes", "1", "--detach")["nodes"]
    watcher = json.loads((pool / "supervisor.json").read_text())["pid"]
    try:
        shutil.rmtree(pool)
        said = rgpu(pool, "down", code=5)
        assert f"there is no pool in {pool}" in said and f"the daemon of node-a (pid {first['pid']})" in said
        assert f"the supervisor (pid {watcher})" in said and f"`kill {watcher} {first['pid']}`" in said
        (second,) = rgpu(pool, "up", "--nodes", "1", "--detach")["nodes"]
        said = rgpu(pool, "down", code=5)
        assert f"`kill {watcher} {first['pid']}`" in said and str(second["pid"]) not in said
        assert not lives(second["pid"])
    finally:
        for pid in (watcher, first["pid"]):
            os.kill(pid, signal.SIGTERM)
    eventually(lambda: not lives(watcher) and not lives(first["pid"]), (watcher, first["pid"]), 20, every=0.05)
    assert rgpu(pool, "down")["stopped"] == []


@pytest.mark.parametrize(("words", "told"), [
    (["python", "-m", "rgpu.cli.main", "server", "--pool", "/p", "--host", "a"], ("/p", "a")),
    (["/usr/bin/rgpu", "server", "--host=b", "--pool=p"], ("p", "b")),
    (["rgpu", "server", "--pool", "/p"], ("/p", "this host")), (["rgpu", "run", "--pool", "/p"], ("", "")),
    (["vi", "server", "--pool", "/p"], ("", "")), (["rgpu", "server"], ("", "this host")), ([], ("", "")),
    (["python", "-m", "rgpu.cli.pools.supervising", "/p", "{}"], ("/p", "")),
    (["python", "-m", "rgpu.cli.pools.supervising"], ("", ""))])
def test_whose_a_process_is_by_its_command_line(words: list[str], told: tuple[str, str]) -> None:
    assert strays._told(words) == told
