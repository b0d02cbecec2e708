"""Kills in a replay end no session, a call that ends each worker does, the third time (OWNERSHIP 9)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rgpu.server import position_page
from rgpu.server.position_page import Reached
from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, HELD, LocalPool
from tests.support.pools.staged import line as ours


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    running = LocalPool(tmp_path, nodes=2, lease=6.0)
    running.environment.update(RGPU_FAULT_FILE=str(tmp_path / "fault"), RGPU_SPARES="0")
    with running:
        yield running


def page(pool: LocalPool, name: str, epoch: int) -> Path | None:
    """Where the session's worker at that epoch writes how far its work is."""
    home = next((pool.folder / "pool" / "nodes").glob(f"*/workers/{name}/{epoch}"), None)
    return None if home is None else next(home.resolve().glob("*.position"), None)


def worker(home: Path) -> int:
    """The process that has this home."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(home) in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    raise AssertionError(f"no worker has {home}")


def kill_at(pool: LocalPool, name: str, epoch: int, position: int) -> Reached:
    """End the worker of that epoch once it has applied the call; how far it was. (Verbs are slower than a replay.)"""
    path = eventually(lambda: page(pool, name, epoch), lambda: f"no worker at epoch {epoch}: {pool.session(name)}", 90)
    pid = worker(path.parent)
    found = eventually(lambda: (now := position_page.read(path)) is not None and now.applied >= position and now,
                       lambda: position_page.read(path), 90, every=0.0005)
    os.kill(pid, signal.SIGKILL)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_killed_five_times_in_one_recovery(pool: LocalPool, heat_digest: Callable[..., str]) -> None:
    """Each successor is killed while it replays what the first one had complete."""
    expected = heat_digest(n=96, steps=6000)
    released = pool.folder / "released"
    heat = [str(EXAMPLES / "heat.py"), "--n", "96", "--steps", "6000", "--report", "50"]
    program = pool.run(sys.executable, "-W", "ignore", HELD, released, "90", "0", *heat, name="storm")
    program.wait_lines(90)
    path = page(pool, "storm", 1)
    reached = position_page.read(path) if path is not None else None
    assert reached is not None
    kills = [kill_at(pool, "storm", 1, reached.applied)]
    kills += [kill_at(pool, "storm", number, int(share * reached.applied))
              for number, share in enumerate((0.3, 0.1, 0.4, 0.05, 0.2), 2)]
    assert sum(kill.applied < reached.applied for kill in kills[1:]) >= 4, f"they were not replaying: {kills}"
    released.touch()
    assert program.finish(200) == expected
    assert pool.session("storm")["epoch"] == 7


@pytest.mark.timeout(300)
def test_a_call_that_ends_whoever_applies_it(pool: LocalPool) -> None:
    """The first kernel kills its worker, and each of its successors: the third time the session fails, and says why."""
    fault, over, fired = pool.folder / "fault", threading.Event(), []

    def arm() -> None:
        while not over.is_set():
            if not fault.exists():
                fired.append(time.monotonic())
                (pool.folder / "new").write_text("cpu.launch:kill")
                os.rename(pool.folder / "new", fault)
            time.sleep(0.002)

    killer = threading.Thread(target=arm, daemon=True)
    killer.start()
    try:
        program = pool.run(*ours("restless", pool.folder / "released"), name="poison")
        program.process.wait(90)
    finally:
        over.set()
        killer.join()
        fault.unlink(missing_ok=True)
    row = pool.session("poison")
    assert row["state"] == "failed" and "for the third time in one place" in row["reason"], row
    assert len(fired) == 4, "armed once, and after each of three kills"
    assert program.process.returncode != 0
    story = [entry for entry in pool.rgpu("history", "poison") if entry["decision"] == "recover"]
    assert len(story) == 2 and story[0]["owner"] != story[1]["owner"], "in place, then elsewhere"
