"""kill -9, freeze and cut-off of worker, daemon, node and links at each step of a move.

Whatever happens: the program ends with the digest of an undisturbed run, and one
worker has the session. Whole in `make sweep` (its table goes to bench/results/),
a seeded sample in `make test`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pools.fire import FROZEN_SECONDS, HEAT, OTHER, Fire, Outcome
from tests.support.pools.move_cases import (
    DAEMON_CASES,
    LINK_CASES,
    LOST_CASES,
    NODE_CASES,
    PEER_CASES,
    REPLAY_CASES,
    WORKER_CASES,
)
from tests.support.pools.pool import ROOT, LocalPool
from tests.support.pools.proxy import Proxy, free_port
from tests.support.pools.sweep import SWEEP, sample
from tests.support.pools.table import record

OUTCOMES: list[Outcome] = []  #: of the test that runs


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """The sweep's table."""
    OUTCOMES.clear()
    yield
    for outcome in OUTCOMES if SWEEP else ():
        record("moves-under-fire", WORKER_CASES + DAEMON_CASES + LOST_CASES + NODE_CASES + LINK_CASES
               + REPLAY_CASES + PEER_CASES, outcome)


@pytest.fixture(scope="module")
def expected(heat_digest: Callable[..., str]) -> str:
    """The digest of an undisturbed run."""
    return heat_digest(**HEAT)


def disturb(case: str, expected: str, *, frozen: bool, workers: bool = True, mode: str = "copy",
            pages: str = "auto") -> None:
    with Fire(case, case, mode, pages) as fire:
        OUTCOMES.append(fire.outcome)
        fire.arm()
        move = fire.move_into_fault()
        if frozen:
            time.sleep(FROZEN_SECONDS)
            fire.thaw()
        fire.finish_move(move)
        fire.survive(expected, workers=workers)


@pytest.mark.parametrize("case", sample(WORKER_CASES, 1, seed=3))
def test_a_worker_breaks(case: str, expected: str) -> None:
    """With pages on the connection, as between hosts."""
    disturb(case, expected, frozen=case.endswith(":stop"), pages="stream")


@pytest.mark.parametrize("case", sample(PEER_CASES, 1, seed=8))
def test_a_worker_breaks_while_pages_are_pulled(case: str, expected: str) -> None:
    """Memory of a process that has just died, or that was frozen in the middle of a pull, gives no wrong page."""
    disturb(case, expected, frozen=case.endswith(":stop"))


@pytest.mark.parametrize("case", sample(REPLAY_CASES, 1, seed=7))
def test_a_worker_breaks_in_a_replay(case: str, expected: str) -> None:
    """The destination's replay is thrown away, and the move may fall back to copying; the program sees nothing."""
    disturb(case, expected, frozen=case.endswith(":stop"), mode="replay")


@pytest.mark.parametrize("case", sample(DAEMON_CASES, 1, seed=4))
def test_a_daemon_breaks(case: str, expected: str) -> None:
    """Its workers are orphans then: they serve nobody that the registry does not name."""
    disturb(case, expected, frozen=case.endswith(":stop"), workers=case.endswith(":stop"))


@pytest.mark.parametrize("case", LOST_CASES if SWEEP else LOST_CASES[-1:])
def test_an_answer_of_the_registry_is_lost(case: str, expected: str) -> None:
    disturb(case, expected, frozen=False)


@pytest.mark.parametrize("case", sample(NODE_CASES, 1, seed=5))
def test_a_whole_node_dies(case: str, expected: str) -> None:
    """Daemon and workers of source or destination, while the move stands at a step."""
    point, side = case.split("/")
    with Fire(case, f"{point}:delay:2") as fire:
        OUTCOMES.append(fire.outcome)
        host = fire.row["host"] if side == "source" else OTHER[fire.row["host"]]
        daemon = fire.pool.node(host)["pid"]
        fire.arm()
        move = fire.move_into_fault()
        folder = str(fire.pool.folder / "pool" / "nodes" / host / "workers").encode()
        mine = [pid for pid in fire.workers() if folder in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in (daemon, *mine):
            os.kill(pid, signal.SIGKILL)
        fire.finish_move(move)
        fire.survive(expected)


class ProxiedPool(LocalPool):
    """Three daemons started singly, each behind a :class:`Proxy` for its data port."""

    def __enter__(self) -> LocalPool:
        self.begin_registry()
        self.rgpu("keys", "init")
        self.proxies: dict[str, Proxy] = {}
        self.daemons = []
        for host in sorted(OTHER):
            port = free_port()
            proxy = self.proxies[host] = Proxy(("127.0.0.1", port))
            log = open(self.folder / f"{host}.log", "ab")
            self.daemons.append(subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", str(self.lease),
                 "--data-port", str(port), "--advertise-data", f"127.0.0.1:{proxy.address[1]}"], env=self.environment,
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        deadline = time.monotonic() + 60
        while True:
            try:
                if len(self.living()) == 3:
                    return self
            except AssertionError:
                pass
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for proxy in self.proxies.values():
            proxy.close()
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()


@pytest.mark.parametrize("case", sample(LINK_CASES, 1, seed=6))
def test_a_link_breaks(case: str, expected: str, tmp_path: Path) -> None:
    """Agent's and pages' links, in the middle of frames too. A frame that does not open ends its connection."""
    mode, side, when = case.replace(" ", "/").split("/")
    fire = Fire(case)
    fire.pool = ProxiedPool(fire.folder, nodes=3)
    with fire:
        OUTCOMES.append(fire.outcome)
        host = fire.row["host"] if side == "source" else OTHER[fire.row["host"]]
        proxy = fire.pool.proxies[host]  # type: ignore[attr-defined]
        move = fire.start_move() if when == "moving" else None
        if side == "destination":  # it has no link before, and a busy machine takes its time over the command's start
            assert proxy.joined.wait(60), "nobody came"
            time.sleep(0.05)
        elif move is not None:
            time.sleep(0.45)
        proxy.set(mode)
        fire.outcome.fired = proxy.hit.wait(10.0)
        time.sleep(1.0)
        proxy.set("pass")
        if move is not None:
            fire.finish_move(move)
        fire.survive(expected)


@pytest.mark.parametrize("way", ["in", pytest.param("out", marks=pytest.mark.slow)])
def test_a_frame_that_never_ends(way: str, expected: str) -> None:
    """Its length was damaged, and both sides say so little then that it would be complete in hours."""
    fire = Fire(f"longer {way}")
    fire.pool = ProxiedPool(fire.folder, nodes=3)
    with fire:
        proxy = fire.pool.proxies[fire.row["host"]]  # type: ignore[attr-defined]
        proxy.set(f"longer {way}")
        fire.outcome.fired = proxy.hit.wait(10.0)
        fire.survive(expected)
        log = (fire.folder / "agent.log").read_text()
    assert "the worker says nothing any more" in log and log.count('"event": "attached"') == 2, log
