"""Several devices of one host in one session: what a program sees, and what a move and a recovery keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.shim.handshake.conftest import stock_runtime
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged, line, wait_end

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


def test_in_the_programs_own_order(pairs: LocalPool, tmp_path: Path, undisturbed: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES turns them round; with one of them named the other is not there."""
    monkeypatch.setitem(pairs.environment, "CUDA_VISIBLE_DEVICES", "1,0")
    staged = Staged(pairs, tmp_path, "several", "remote", name="turned", options=TWO)
    staged.disturb(1, "move")
    staged.open(2, 3, 4)
    assert staged.finish() == undisturbed
    monkeypatch.setitem(pairs.environment, "CUDA_VISIBLE_DEVICES", "1")
    seen = pairs.run(sys.executable, "-c", "from cuda.bindings import driver as d; d.cuInit(0)\n"
                     "print(d.cuDeviceGetCount()[1], int(d.cuDeviceGet(1)[0]))", name="one-of-two", options=TWO)
    assert wait_end(seen) == 0 and seen.lines == ["1 101"], (seen.lines, seen.errors)


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


def test_graphs_of_both_devices(pairs: LocalPool, tmp_path: Path) -> None:
    """Random ones; each launch comes behind the one before and is in the order of its edges, moved and killed too."""
    staged = Staged(pairs, tmp_path, "graph_devices", 4, 6, 4, name="graphs", options=TWO)
    staged.disturb(1, "move")
    staged.disturb(2, "kill")
    assert wait_end(staged.program) == 0 and staged.lines[-1] == "ok 96", (staged.lines, staged.errors)


def test_places_are_counted_on_both(pairs: LocalPool, tmp_path: Path) -> None:
    """Whole GPUs: one such session fills a node, a fourth waits for nobody and is told where it would fit."""
    held = [Staged(pairs, tmp_path, "several", "remote", name=f"full-{n}", options=TWO) for n in range(3)]
    try:
        assert {one.reach(1)["host"] for one in held} == {"node-a", "node-b", "node-c"}
        nodes = pairs.living()
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


def test_who_waits_for_two_gets_them_by_a_move(pairs: LocalPool, tmp_path: Path, undisturbed: str) -> None:
    """Each host has one device free: three in all, and nowhere two. One session moves, and it fits."""
    alone = [pairs.heat(f"alone-{host}", steps=60000, options=("--gpus", "1", "--memory", "64MiB", "--host", host))
             for host in ("node-a", "node-b", "node-c")]
    for program in alone:
        program.wait_lines(1)
    staged = Staged(pairs, tmp_path, "several", "remote", name="waiting", options=(*TWO, "--queue"))
    staged.open(1, 2, 3, 4)
    eventually(lambda: any("at most 1 of one host" in text for text in staged.errors)
               or staged.program.process.poll() is not None, lambda: staged.errors[-5:], 30, every=0.1)
    assert staged.program.process.poll() is None, staged.errors[-5:]
    found = pairs.rgpu("rebalance", "--apply")
    assert found["for"] == "waiting" and len(found["moves"]) == 1 and found["applied"], found
    assert staged.finish() == undisturbed
    for program in alone:
        pairs.rgpu("kill", program.name)


@pytest.mark.parametrize(("gpus", "why"), [("3", "the host with the most that would do has 2"),
                                           ("7", "6 GPUs at most")])
def test_more_than_a_host_has_is_refused_at_once(pairs: LocalPool, gpus: str, why: str) -> None:
    program = pairs.run(sys.executable, "-c", "import cuda.bindings.driver as d; print(int(d.cuInit(0)[0]))",
                        name=f"too-many-{gpus}", options=("--gpus", gpus, "--memory", "1MiB", "--queue"))
    wait_end(program)
    assert why in "\n".join(program.errors) and program.lines in ([], ["100"]), (program.lines, program.errors)


@pytest.mark.parametrize("runtime", [pytest.param("12.8.90", marks=pytest.mark.slow), "13.0.96"])
def test_the_stock_runtime(pairs: LocalPool, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libcudart's own checks are of each device; one library is loaded on both."""
    monkeypatch.setitem(pairs.environment, "CUDART", str(stock_runtime(runtime)))
    pairs.run(*line("several_cudart"), name=f"cudart-{runtime}", options=TWO).finish()


MONITORED = """
import pynvml
from cuda.bindings import driver
assert int(driver.cuInit(0)[0]) == 0
for n in range(2):
    _, context = driver.cuDevicePrimaryCtxRetain(n)
    driver.cuCtxSetCurrent(context)
    assert int(driver.cuMemAlloc((3 + n) << 20)[0]) == 0
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
memory = [pynvml.nvmlDeviceGetMemoryInfo(h) for h in handles]
said = [(pynvml.nvmlDeviceGetUUID(h), m.used >> 20, m.total >> 20) for h, m in zip(handles, memory)]
ours = ["GPU-" + __import__("uuid").UUID(bytes=bytes(driver.cuDeviceGetUuid(n)[1].bytes)).__str__() for n in range(2)]
assert [one[0] for one in said] == ours, (said, ours)
print(*(f"{used}/{total}" for _, used, total in said))
"""


def test_monitors_see_both(pairs: LocalPool) -> None:
    pytest.importorskip("pynvml", reason="in the test extra")
    program = pairs.run(sys.executable, "-c", MONITORED, name="monitored", options=TWO)
    assert wait_end(program) == 0, program.errors[-10:]
    assert program.lines == ["4/64 4/64"], program.lines


def test_one_list_of_devices_over_several_hosts(pairs: LocalPool, tmp_path: Path) -> None:
    """``--spread``: processes see five devices of three hosts, and use any of them."""
    program = pairs.run(sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "programs" / "local_ranks.py"),
                        str(tmp_path), "0+1", "2+0", "4", name="wide", options=("--gpus", "5", "--spread"))
    program.wait_lines(5)
    assert {"rank 0 device 1: 0", "rank 2 device 0: 0", "rank 4 began"} <= set(program.lines)
    gang = pairs.rgpu("describe", "wide")
    assert gang["spread"] and [(one["session"], one["device"]) for one in gang["members"]] == [
        ("wide.0", "cpu:0+1"), ("wide.0/2", "cpu:0+1"), ("wide.2", "cpu:0+1"), ("wide.4", "cpu:0")]
    assert len(gang["hosts"]) == 3
    (tmp_path / "release").touch()
    assert wait_end(program) == 0, program.errors
    assert sum(" of 5 devices: " in line for line in program.lines) == 3
