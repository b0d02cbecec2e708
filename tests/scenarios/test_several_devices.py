"""Several devices of one host in one session: what a program sees, and what a move and a recovery keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.pool import LocalPool
from tests.scenarios.staged import Staged, wait_end

TWO = ("--gpus", "2", "--memory", "64MiB")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """Three nodes of two devices each."""
    with LocalPool(tmp_path_factory.mktemp("pairs"), nodes=3, lease=8.0, device="cpu:0,cpu:1") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pairs: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    staged = Staged(pairs, tmp_path_factory.mktemp("still"), "several", "remote", name="still", options=TWO)
    staged.open(1, 2, 3, 4)
    return staged.finish()


def test_a_program_sees_two_devices(undisturbed: str) -> None:
    assert len(undisturbed) == 64


def test_moved_killed_and_restored(pairs: LocalPool, tmp_path: Path, undisturbed: str) -> None:
    staged = Staged(pairs, tmp_path, "several", "remote", name="disturbed", options=TWO)
    staged.disturb(1, "move")
    assert pairs.rgpu("describe", "disturbed")["device"] == "cpu:0+1"
    staged.disturb(2, "kill")
    staged.disturb(3, "checkpoint")
    staged.disturb(4, "move")
    assert staged.finish() == undisturbed
    assert pairs.session("disturbed")["epoch"] >= 5


@pytest.mark.parametrize("mode", ["copy", "replay"])
def test_both_ways_of_moving(pairs: LocalPool, tmp_path: Path, undisturbed: str, mode: str) -> None:
    staged = Staged(pairs, tmp_path, "several", "remote", name=f"by-{mode}", options=TWO)
    row = staged.reach(1)
    there = next(host for host in ("node-a", "node-b", "node-c") if host != row["host"])
    found = pairs.rgpu("migrate", staged.name, there, "--mode", mode)
    assert found["outcome"] == "committed" and found["verified"] is True, found
    staged.open(1, 2, 3, 4)
    assert staged.finish() == undisturbed


def test_places_are_counted_on_both(pairs: LocalPool, tmp_path: Path) -> None:
    """Whole GPUs: one such session fills a node, a fourth waits for nobody and is told where it would fit."""
    held = [Staged(pairs, tmp_path, "several", "remote", name=f"full-{n}", options=TWO) for n in range(3)]
    try:
        assert {one.reach(1)["host"] for one in held} == {"node-a", "node-b", "node-c"}
        nodes = pairs.rgpu("nodes")
        assert [device["sessions"] for node in nodes for device in node["devices"]] == [1] * 6
        one_more = pairs.run(sys.executable, "-c", "import cuda.bindings.driver as d; print(d.cuInit(0))",
                             name="fourth", options=TWO)
        wait_end(one_more)
        text = "\n".join(one_more.lines + one_more.errors)
        assert "0 of the 2 devices of one kind that it needs" in text, text
    finally:
        for one in held:
            one.open(1, 2, 3, 4)
    for one in held:
        one.finish()


@pytest.mark.parametrize(("gpus", "why"), [("3", "the host with the most that would do has 2"),
                                           ("7", "6 GPUs at most")])
def test_more_than_a_host_has_is_refused_at_once(pairs: LocalPool, gpus: str, why: str) -> None:
    program = pairs.run(sys.executable, "-c", "import cuda.bindings.driver as d; print(int(d.cuInit(0)[0]))",
                        name=f"too-many-{gpus}", options=("--gpus", gpus, "--memory", "1MiB", "--queue"))
    wait_end(program)
    assert why in "\n".join(program.errors) and program.lines in ([], ["100"]), (program.lines, program.errors)
