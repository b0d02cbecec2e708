"""Who has no key: silent and half-open connections by the thousand, and a daemon without descriptors."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attacks.measuring import Asker, daemon_pid, descriptors_of, quantile, server_state
from tests.support.attacks.pool import Attack, NarrowPool
from tests.support.eventually import eventually

CONNECTIONS = 5000


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[NarrowPool]:
    with NarrowPool(tmp_path, nodes=2, lease=4.0) as pool:
        yield pool


def attach_meanwhile(pool: NarrowPool, session: str, seconds: float) -> Asker:
    asker = Asker(pool)
    asker.measure(lambda: asker.attach(session), seconds)
    return asker


@pytest.mark.parametrize("says", [pytest.param("nothing", marks=pytest.mark.slow), "signature",
                                  pytest.param("head", marks=pytest.mark.slow)])
def test_thousands_of_connections_that_prove_nothing(narrow: NarrowPool, says: str) -> None:
    program = narrow.heat("steady", n=32, steps=100000, rest=0.1)
    program.wait_lines(2)
    Asker(narrow).create("mine")
    row, before = narrow.session("steady"), narrow.session("mine")
    quiet = max(Asker(narrow).attach("mine") for _ in range(5))
    pids = {host: daemon_pid(narrow, host) for host in ("node-a", "node-b")}
    attack = Attack(narrow, "strangers", CONNECTIONS, says, *narrow.ports("node-a"), *narrow.ports("node-b"))
    assert attack.line() == "open"
    most, seen = 0, os.geteuid() == 0  # but for root a daemon hides its descriptors; that it answers shows it, too
    watching = threading.Event()

    def count() -> None:
        nonlocal most
        while seen and not watching.wait(0.05):
            most = max(most, *(descriptors_of(pid) for pid in pids.values()))

    thread = threading.Thread(target=count)
    thread.start()
    asker = attach_meanwhile(narrow, "mine", 12)
    watching.set()
    thread.join()
    lines = len(program.lines)
    made = int(attack.stop())
    assert not asker.failed, asker.failed[:3]
    print(f"{says}: {made} connections, {len(asker.waited)} attachments, p50 {quantile(asker.waited, 0.5):.3f} s, "
          f"p99 {quantile(asker.waited, 0.99):.3f} s, {asker.again} again, {most} descriptors at most")
    assert made >= CONNECTIONS
    assert quantile(asker.waited, 0.5) <= 40 * quiet, quiet  # 26 was seen on two shared processors
    assert not seen or 0 < most < narrow.descriptors
    time.sleep(5)
    for host, pid in pids.items():
        state = server_state(narrow, host)
        assert state["ready"] and state["pid"] == pid, state
    for name, was in (("steady", row), ("mine", before)):
        now = narrow.session(name)
        assert (now["epoch"], now["host"], now["state"]) == (was["epoch"], was["host"], "running"), now
    assert len(program.lines) > lines  # it computes on


@pytest.mark.skipif(os.geteuid() != 0, reason="a daemon's descriptors are not to be seen but by root")
def test_a_daemon_without_descriptors_says_so_and_comes_back(narrow: NarrowPool) -> None:
    Asker(narrow).create("mine")
    host = str(narrow.session("mine")["host"])
    pid = daemon_pid(narrow, host)
    kept = min(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()
               if int(path.name) > 2 and os.readlink(path) == os.devnull)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (kept + 1, narrow.descriptors))  # nothing is left but what is kept
    eventually(lambda: not server_state(narrow, host)["ready"], "it says that it is ready, and nobody can reach it",
               40, every=0.2)
    assert "port cannot be reached" in server_state(narrow, host)["reason"]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (narrow.descriptors, narrow.descriptors))
    eventually(lambda: server_state(narrow, host)["ready"], lambda: server_state(narrow, host), 20, every=0.2)
    eventually(lambda: narrow.node(host)["state"] == "ready", lambda: narrow.node(host), 15, every=0.2)
    assert Asker(narrow).attach("mine") < 10.0 and daemon_pid(narrow, host) == pid
