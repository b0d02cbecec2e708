"""Sessions opened, and killed at random moments, leave nothing behind: figures of a pool before and after.

Some in `make test`, 1,000 in `make sweep`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rgpu.server.box import host
from rgpu.server.box.cgroups import Cgroups
from rgpu.server.node.workers.boxes import group_prefix
from tests.support.eventually import eventually
from tests.support.pools.growth import look
from tests.support.pools.pool import LocalPool, Program, VerbError
from tests.support.pools.storm import TICKS
from tests.support.pools.sweep import SWEEP
from tests.support.processes import living

pytestmark = pytest.mark.timeout(7200 if SWEEP else 400)

COUNT = 1000 if SWEEP else 18
BESIDE = 3  #: sessions at a time
SETTLED = 90.0  #: seconds until all that is left behind must have gone
#: What becomes of a session, and which process dies of it.
ENDINGS = ("program", "launcher", "agent", "worker", "verb", "nothing")
USERS = "392000-392999"


def keys(pool: LocalPool) -> dict[str, int]:
    """Keys of the registry by their first part, but for the records of sessions that ended, which are kept to be seen.
    """
    counted: dict[str, int] = {}
    (path,) = (pool.folder / "pool").glob("registry*.db")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
        names = [row[0] for row in base.execute("select key from entries")]
    for name in names:
        first = str(name).split("/")[0]
        if first not in ("sessions", "history"):
            counted[first] = counted.get(first, 0) + 1
    return counted


def figures(pool: LocalPool, daemons: dict[str, int]) -> dict[str, object]:
    """All that a session can leave behind, in numbers."""
    nodes = pool.folder / "pool" / "nodes"
    links = [path for path in nodes.glob("*/workers/*/*") if path.is_symlink()]
    return {
        "processes": len(living(pool.folder)),
        "homes": len(list(nodes.glob("*/homes/*"))),
        "links": len(links),
        "journals": len([path for path in (pool.folder / "journal").rglob("*") if path.is_file()]),
        "control groups": sum(len(Cgroups.find("").left(group_prefix(path))) for path in nodes.glob("node-*"))
        if "cgroup" not in host.missing() else 0,
        "registry": keys(pool),
        "device memory": [(device["device"], device["free_memory"]) for row in pool.rgpu("nodes")
                          for device in row["devices"]],
        "descriptors": {name: held.descriptors for name, pid in daemons.items() if (held := look(pid))},
        "threads": {name: held.threads for name, pid in daemons.items() if (held := look(pid))},
    }


def end(pool: LocalPool, program: Program, how: str, chance: random.Random) -> None:
    """Have it end that way, at a moment of its life."""
    time.sleep(chance.choice((0.0, 0.3, 1.0, 2.0, 4.0)) * chance.random())
    if how == "program":
        with contextlib.suppress(VerbError, AssertionError, ProcessLookupError):
            os.kill(int(pool.session(program.name)["pid"]), signal.SIGKILL)
    elif how == "launcher":
        program.process.terminate()
    elif how == "agent":
        program.process.kill()
    elif how == "worker":
        with contextlib.suppress(VerbError, AssertionError, ProcessLookupError, TypeError):
            os.kill(int(pool.session(program.name)["worker_pid"]), signal.SIGKILL)
            time.sleep(chance.random())
        program.process.terminate()
    elif how == "verb":
        with contextlib.suppress(VerbError):
            pool.rgpu("kill", program.name)
    (pool.folder / f"{program.name}.released").touch()
    program.process.wait(120)


def one(pool: LocalPool, number: int) -> str:
    chance = random.Random(number)
    how = chance.choice(ENDINGS)
    name = f"s{number}"
    program = pool.run(sys.executable, "-W", "ignore", TICKS, pool.folder / f"{name}.released", "0.05", name=name,
                       options=("--memory", "32MiB", "--client-grace", "2s"))
    pool.programs.remove(program)
    end(pool, program, how, chance)
    return how


@pytest.mark.parametrize("users", ["", pytest.param(USERS, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_sessions_killed_at_random_moments_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         users: str) -> None:
    if users and "root" in host.missing():
        pytest.skip(host.missing()["root"])
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RGPU_WORKER_UIDS", users)
    with LocalPool(tmp_path, nodes=2) as pool:
        daemons = {row["host"]: row["pid"] for row in pool.rgpu("nodes")}
        for number in (10**6, 10**6 + 1, 10**6 + 2):  # what is made once, and kept
            one(pool, number)
        settle(pool)
        before, began = figures(pool, daemons), {name: look(pid) for name, pid in daemons.items()}
        with ThreadPoolExecutor(BESIDE) as several:
            ended = list(several.map(lambda number: one(pool, number), range(COUNT // 2 if users else COUNT)))
        assert len(set(ended)) >= 4
        settle(pool)
        after = eventually(lambda: (now := figures(pool, daemons)) == before and now or near(before, now) and now,
                           lambda: (before, figures(pool, daemons)), SETTLED, every=1.0)
        grown = {name: (held.resident_mib - was.resident_mib) for name, pid in daemons.items()
                 if (held := look(pid)) and (was := began[name])}
        print(f"{len(ended)} sessions, users {users or 'of the daemon'}\nbefore {before}\nafter  {after}\n"
              f"resident, MiB more: { {name: round(more, 1) for name, more in grown.items()} }")
        assert near(before, after), (before, after)
        assert all(more < 30 + 0.06 * len(ended) for more in grown.values()), grown
    assert not living(pool.folder)


def settle(pool: LocalPool) -> None:
    """Until every session is on record as ended, and no device memory as taken."""
    deadline = time.monotonic() + SETTLED
    while rows := [(row["session"], row["state"], row["note"]) for row in pool.rgpu("ps")] or [
            (row["host"], device) for row in pool.rgpu("nodes") for device in row["devices"]
            if device["free_memory"] < device["total_memory"]]:
        assert time.monotonic() < deadline, rows
        time.sleep(0.3)


def near(before: dict[str, object], after: dict[str, object]) -> bool:
    """The same, but for a few threads and descriptors that come and go with requests."""
    for name, value in before.items():
        if name in ("threads", "descriptors"):
            now, was = after[name], value
            assert isinstance(now, dict) and isinstance(was, dict)
            if any(now[host_] > was[host_] + 6 for host_ in was):
                return False
        elif after[name] != value:
            return False
    return True
