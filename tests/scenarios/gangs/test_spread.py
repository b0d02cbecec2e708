"""One process that uses devices of three hosts: what it computes, undisturbed and with its sessions moved and lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged, line

SIX = ("--gpus", "6", "--spread")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """Four nodes of two devices each."""
    with LocalPool(tmp_path_factory.mktemp("wide"), nodes=4, lease=8.0, device="cpu:0,cpu:1") as running:
        yield running


def complaints(staged: Staged) -> list[str]:
    """What the program was told on stderr, beside the one refusal that it provokes."""
    return [line for line in staged.errors if "managed memory of devices of two hosts" not in line]


@pytest.fixture(scope="module")
def undisturbed(wide: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    staged = Staged(wide, tmp_path_factory.mktemp("still"), "spread", name="still", session="still.0", options=SIX)
    staged.open(1, 2, 3, 4)
    digest = staged.finish()
    assert not complaints(staged)
    return digest


def free_host(pool: LocalPool, gang: str) -> str:
    used = pool.rgpu("describe", gang)["hosts"]
    return next(node["host"] for node in pool.living() if node["host"] not in used)


def test_one_process_uses_the_devices_of_three_hosts(undisturbed: str) -> None:
    """It checks its results itself; they are also those of any other run."""
    assert len(undisturbed) == 64


def test_its_sessions_are_moved_and_lost(wide: LocalPool, tmp_path: Path, undisturbed: str) -> None:
    staged = Staged(wide, tmp_path, "spread", name="ring", session="ring.2", options=SIX)
    staged.reach(1)
    row = wide.rgpu("describe", "ring")
    assert [one["session"] for one in row["members"]] == ["ring.0", "ring.2", "ring.4"] and len(row["hosts"]) == 3
    assert all(one["came"] for one in row["members"])
    moved = wide.rgpu("migrate", "ring.2", free_host(wide, "ring"))
    assert moved["outcome"] == "committed" and moved["verified"] is True, moved
    staged.open(1)

    os.kill(staged.reach(2)["worker_pid"], signal.SIGKILL)
    os.kill(wide.session("ring.0")["worker_pid"], signal.SIGKILL)  # two members at once
    staged.open(2)
    staged.wait_epoch(3)

    staged.reach(3)
    assert wide.rgpu("checkpoint", "ring.4")["position"] > 0
    staged.open(3)

    staged.reach(4)
    for name in ("ring.0", "ring.4"):
        os.kill(wide.session(name)["worker_pid"], signal.SIGKILL)
    staged.open(4)
    assert staged.finish() == undisturbed, staged.errors[-20:]
    assert not complaints(staged)


def test_two_members_are_lost_and_their_backlogs_overlap(tmp_path: Path, undisturbed: str) -> None:
    """As after a stall: what one member sends again must not be overwritten before, though the journal of no member
    but the receiving one contains the wait that forbade it."""
    with LocalPool(tmp_path, nodes=3, lease=8.0, device="cpu:0,cpu:1") as pool:
        pool.rgpu("down")
        pool.environment["RGPU_CATCH_UP"] = "overlap"
        pool.rgpu("up", "--nodes", "3", "--device", pool.device, "--lease", "8", "--detach", "--no-supervise")
        staged = Staged(pool, tmp_path, "spread", name="ring", session="ring.4", options=SIX)
        for gate, names in enumerate((("ring.0", "ring.4"), ("ring.2", "ring.4"), ("ring.0", "ring.2")), 1):
            staged.reach(gate)
            for name in names:
                os.kill(pool.session(name)["worker_pid"], signal.SIGKILL)
            staged.open(gate)
        staged.open(4)
        assert staged.finish() == undisturbed, staged.errors[-20:]
        assert not complaints(staged)


@pytest.mark.parametrize("mode", ["copy", pytest.param("replay", marks=pytest.mark.slow)])
def test_a_move_while_it_computes(wide: LocalPool, tmp_path: Path, mode: str) -> None:
    """Between gates: copies between hosts are under way. The program checks each device's result itself."""
    staged = Staged(wide, tmp_path, "spread", "long", name=f"by-{mode}", session=f"by-{mode}.0", options=SIX)
    staged.reach(1)
    staged.open(1, 2, 3, 4)
    moved = wide.rgpu("migrate", staged.name, free_host(wide, f"by-{mode}"), "--mode", mode)
    assert moved["outcome"] == "committed" and moved["verified"] is True, moved
    staged.open("enough")
    assert len(staged.finish()) == 64 and not complaints(staged)


@pytest.mark.slow
def test_fifty_five_devices(tmp_path: Path) -> None:
    """Of ten hosts, in one list: as many as one server is known to have shown a program (Fungible, 2022)."""
    with LocalPool(tmp_path, nodes=10, lease=20.0, device=",".join(f"cpu:{n}" for n in range(6))) as pool:
        program = pool.run(*line("many_devices"), name="many", options=("--gpus", "55", "--spread"))
        assert program.process.wait(240) == 0, program.errors[-20:]
        program.finish_reading()
        assert program.lines[-1].startswith("55 devices: ") and not program.errors
        print(program.lines[-1])


def test_nccl_in_one_process(wide: LocalPool, tmp_path: Path) -> None:
    """A communicator of all devices of the list, whose sessions are moved and lost; it checks its results itself."""
    staged = Staged(wide, tmp_path, "spread_nccl", name="sums", session="sums.2", options=SIX)
    staged.reach(1)
    wide.rgpu("migrate", "sums.2", free_host(wide, "sums"))
    staged.open(1)
    staged.reach(2)
    os.kill(wide.session("sums.0")["worker_pid"], signal.SIGKILL)
    staged.open(2)
    assert len(staged.finish()) == 64 and not staged.errors
