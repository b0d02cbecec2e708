"""A full pool lets somebody in: by moves that were predicted, by parking, from the queue; every program ends right."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, Program

PROGRAMS = Path(__file__).parents[1] / "programs"
WHOLE = 8 * 1024  #: MiB of a device
ARGUMENTS = ("--n", "96", "--steps", "4000", "--report", "50")


class Stage:
    """Programs that go on until they are released, on a pool of three devices."""

    def __init__(self, pool: LocalPool, folder: Path) -> None:
        self.pool, self.release = pool, folder / "release"
        self.held: list[Program] = []

    def hold(self, name: str, share: float, *options: str, host: str = "") -> Program:
        """A program whose session has that share of a device's memory, and holds it."""
        where = ("--host", host) if host else ()
        program = self.pool.run(sys.executable, PROGRAMS / "paced_heat.py", self.release, *ARGUMENTS, name=name,
                                options=("--memory", f"{int(WHOLE * share)}MiB", *where, *options))
        self.held.append(program)
        return program

    def running(self) -> dict[str, int]:
        """Epoch of each session that was placed."""
        rows = {row["session"]: row for row in self.pool.rgpu("ps") if row["state"] != "queued"}
        return {program.name: rows[program.name]["epoch"] for program in self.held if program.name in rows}

    def finish(self) -> set[str]:
        self.release.touch()
        return {program.finish() for program in self.held}


@pytest.fixture(scope="module")
def digest(pool: LocalPool) -> str:
    """Of such a program that nobody disturbed."""
    return pool.run(sys.executable, ROOT / "examples" / "heat.py", *ARGUMENTS, name="alone").finish()


@pytest.fixture
def stage(pool: LocalPool, tmp_path: Path, digest: str) -> Iterator[Stage]:
    pool.rgpu("rebalance", "--auto", "off")
    stage = Stage(pool, tmp_path)
    yield stage
    for program in stage.held:  # what a test that failed left
        program.stop()
    eventually(lambda: not pool.rgpu("ps"))



def in_line(pool: LocalPool, name: str) -> dict[str, Any] | None:
    return next((row for row in pool.rgpu("ps") if row["session"] == name and row.get("position")), None)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_room_is_made_by_the_predicted_moves(pool: LocalPool, stage: Stage, digest: str) -> None:
    """A quarter, a quarter | 0.6 | 0.7: 1.2 devices are free, and a whole one nowhere; two moves make it."""
    for name, share, host in (("small-1", 0.25, "node-a"), ("small-2", 0.25, "node-a"), ("middle", 0.6, "node-b"),
                              ("large", 0.7, "node-c")):
        stage.hold(name, share, host=host)
        pool.wait_state(name, "running", 60)
    refused = pool.run(sys.executable, ROOT / "examples" / "heat.py", *ARGUMENTS, name="refused",
                       options=("--memory", f"{WHOLE}MiB"))
    assert refused.process.wait(60) != 0
    eventually(lambda: any("no place for refused" in line for line in refused.errors))
    too_much = pool.run(sys.executable, ROOT / "examples" / "heat.py", *ARGUMENTS, name="too-much",
                        options=("--memory", f"{2 * WHOLE}MiB", "--queue"))
    assert too_much.process.wait(60) != 0
    eventually(lambda: any(f"the largest that would fit is {WHOLE} MiB" in line for line in too_much.errors))

    whole = stage.hold("whole", 1.0, "--queue")
    row = eventually(lambda: in_line(pool, "whole"))
    assert row["state"] == "queued" and row["position"] == 1 and "the largest piece is 4096 MiB" in row["note"]
    eventually(lambda: any("whole waits at position 1 of 1" in line for line in whole.errors))
    assert [one["name"] for one in pool.rgpu("pool", "status")["queue"]] == ["whole"]
    plan = pool.rgpu("rebalance")
    predicted = {move["session"]: move["to"] for move in plan["moves"]}
    assert set(predicted) == {"small-1", "small-2"} and set(predicted.values()) == {"node-b", "node-c"}
    assert plan["for"] == "whole" and not plan["applied"] and stage.running() == {
        "small-1": 1, "small-2": 1, "middle": 1, "large": 1}

    assert pool.rgpu("rebalance", "--auto", "on")["auto"] is True
    placed = pool.wait_state("whole", "running", 90)
    assert placed["host"] == "node-a"
    assert stage.running() == {"small-1": 2, "small-2": 2, "middle": 1, "large": 1, "whole": 1}, "no more than planned"
    hosts = {row["session"]: row["host"] for row in pool.rgpu("ps")}
    assert {name: hosts[name] for name in predicted} == predicted
    assert pool.rgpu("pool", "status")["queue"] == []
    assert stage.finish() == {digest}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_less_important_is_parked_and_notices_nothing_but_time(pool: LocalPool, stage: Stage, digest: str) -> None:
    low = stage.hold("low", 1.0, "--priority", "-5", "--gpus", "1", host="node-a")
    for name, host in (("other-b", "node-b"), ("other-c", "node-c")):
        stage.hold(name, 0.9, host=host)
        pool.wait_state(name, "running", 60)
    low.wait_lines(10)
    high = stage.hold("high", 0.5, "--queue")
    pool.wait_state("high", "running", 90)
    assert pool.session("high")["host"] == "node-a"
    row = eventually(lambda: in_line(pool, "low"), within=30)
    assert row["state"] == "parked" and row["host"] is None
    assert row["position"] == 1 and "parked for high" in row["note"] and row["worker_pid"] is None
    assert low.process.poll() is None
    pool.rgpu("kill", "high")
    stage.held.remove(high)
    back = pool.wait_state("low", "running", 90)
    assert (back["host"], back["epoch"]) == ("node-a", 2)
    assert stage.finish() == {digest}
    decisions = [event["decision"] for event in pool.rgpu("history", "low")]
    assert ["park", "resume"] == [name for name in decisions if name in ("park", "resume")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_and_the_end_of_a_program_withdraw_a_request(pool: LocalPool, stage: Stage, digest: str) -> None:
    for host in ("node-a", "node-b", "node-c"):
        stage.hold(f"full-{host}", 1.0, host=host)
        pool.wait_state(f"full-{host}", "running", 60)
    for name, number in (("interrupted", signal.SIGINT), ("terminated", signal.SIGTERM)):
        program = stage.hold(name, 0.5, "--queue")
        stage.held.remove(program)
        eventually(lambda name=name: in_line(pool, name))
        program.process.send_signal(number)  # SIGINT: as a terminal sends it, but to the launcher alone
        assert program.process.wait(30) != 0
        eventually(lambda name=name: in_line(pool, name) is None, within=10)
    assert stage.finish() == {digest}


@pytest.mark.timeout(300)
def test_more_gpus_than_a_session_can_have_are_refused_at_once(pool: LocalPool) -> None:
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", "--gpus", "7", "--", "true"], cwd=ROOT,
                          env=pool.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "6 GPUs at most" in done.stderr, (done.returncode, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shares_of_compute_are_counted(pool: LocalPool, stage: Stage, digest: str) -> None:
    """Two halves fit on one device; with a third 60 % on another; memory follows the share."""
    stage.hold("half-1", 0.1, "--gpus", "0.5", host="node-a")
    stage.hold("half-2", 0.1, "--gpus", "0.5", host="node-a")
    for name in ("half-1", "half-2"):
        pool.wait_state(name, "running", 60)
    refused = pool.run(sys.executable, ROOT / "examples" / "heat.py", *ARGUMENTS, name="third",
                       options=("--gpus", "0.01", "--host", "node-a"))
    assert refused.process.wait(60) != 0
    eventually(lambda: any("0 % of its compute free of the 1 % needed" in line for line in refused.errors))
    quarter = pool.run(sys.executable, PROGRAMS / "paced_heat.py", stage.release, *ARGUMENTS, name="quarter",
                       options=("--gpus", "0.25", "--host", "node-b"))
    pool.wait_state("quarter", "running", 60)
    assert pool.rgpu("describe", "quarter")["quota"] == WHOLE // 4 << 20
    stage.held.append(quarter)
    assert stage.finish() == {digest}
