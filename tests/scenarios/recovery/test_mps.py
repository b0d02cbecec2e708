"""A node whose workers share an MPS server: an error there may be another session's, and a replay outside shows whose.

A control daemon of NVIDIA's needs a GPU; a program in its place notes what it is told. The workers, on the cpu device,
see its folder as they would see the real one's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.server.node.devices.mps_server import MpsServer
from tests.support.breakable_pool import BreakablePool
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool

SEVEN_HUNDRED = " ".join(["codes", *["700"] * 9])
PROGRAMS = Path(__file__).parents[1] / "programs"
#: `nvidia-cuda-mps-control`: -d makes the folder's entry; commands are noted in a file, behind their folder.
CONTROL = """#!/bin/sh
pipes=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then echo "$pipes start" >> "$MPS_SAID"; : > "$pipes/control"; exit 0; fi
[ -e "$pipes/control" ] || { echo "no control daemon" >&2; exit 1; }
read word; echo "$pipes $word" >> "$MPS_SAID"
[ "$word" != get_server_list ] || echo 4242
[ "$word" != quit ] || rm -f "$pipes/control"
"""


class MpsPool(BreakablePool):
    """Two nodes whose workers are clients of an MPS server each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.control = folder / "bin" / "nvidia-cuda-mps-control"
        self.control.parent.mkdir()
        self.control.write_text(CONTROL)
        self.control.chmod(0o755)
        self.environment |= {"RGPU_MPS": "60", "MPS_SAID": str(folder / "said"),
                             "PATH": f"{self.control.parent}:{os.environ['PATH']}"}

    def expect(self, name: str, inside: bool) -> None:
        """Check whether a session's worker is a client of its node's server: by `rgpu ps`, and by the worker's
        environment, which only root may read."""
        row = self.session(name)
        assert row["mps"] is inside
        if os.geteuid() == 0:
            pairs = Path(f"/proc/{row['worker_pid']}/environ").read_text().split("\0")
            told = dict(pair.split("=", 1) for pair in pairs if pair.startswith("CUDA_MPS_"))
            assert (told["CUDA_MPS_PIPE_DIRECTORY"] == str(self.pipes(row["host"]))) is inside
            assert told.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == ("60" if inside else None)

    def said(self, host: str) -> list[str]:
        """What a node's control daemon was told, in order."""
        begin = f"{self.pipes(host)} "
        lines = (self.folder / "said").read_text().splitlines()
        return [line.removeprefix(begin) for line in lines if line.startswith(begin)]

    def pipes(self, host: str) -> Path:
        return MpsServer(self.folder / "pool" / "nodes" / host, 60).pipes


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MpsPool]:
    with MpsPool(tmp_path) as running:
        yield running
    for host in ("node-a", "node-b"):  # of daemons that were killed, or left workers behind
        shutil.rmtree(running.pipes(host), ignore_errors=True)


@pytest.mark.timeout(180)
def test_a_programs_own_error_reaches_it_after_a_replay_outside_mps(pool: MpsPool) -> None:
    program = pool.run(sys.executable, str(PROGRAMS / "faults.py"), "null", name="faulty")
    assert program.process.wait(90) == 0, program.errors
    assert SEVEN_HUNDRED in program.lines
    row = next(row for row in pool.rgpu("ps", "--all") if row["session"] == "faulty")
    assert row["epoch"] == 2
    assert "error 700, which all sessions of an MPS server get" in pool.reasons("faulty")


@pytest.mark.timeout(180)
def test_anothers_error_is_not_seen(pool: MpsPool) -> None:
    program = pool.restless("well")
    pool.expect("well", inside=True)
    pool.fail("neighbour")
    row = pool.on("well", 2)
    pool.expect("well", inside=False)
    assert "error 700, which all sessions of an MPS server get" in pool.reasons("well")
    pool.rgpu("migrate", "well", "--to", "node-b" if row["host"] == "node-a" else "node-a")  # and back inside
    pool.expect("well", inside=True)
    pool.release(program)


@pytest.mark.timeout(120)
def test_a_session_that_cannot_be_recovered_stays_outside(pool: MpsPool) -> None:
    program = pool.run(sys.executable, str(PROGRAMS / "faults.py"), "null", name="fragile",
                       options=("--recover", "off"))
    assert program.process.wait(60) == 0, program.errors
    assert SEVEN_HUNDRED in program.lines
    row = next(row for row in pool.rgpu("ps", "--all") if row["session"] == "fragile")
    assert row["epoch"] == 1


@pytest.mark.timeout(120)
def test_a_worker_is_taken_off_its_server_before_it_is_killed(pool: MpsPool) -> None:
    """Its kernel is running: a client that disappears then takes the others with it."""
    program = pool.run(sys.executable, str(PROGRAMS / "spinning.py"), name="spins", options=("--host", "node-a"))
    program.wait_lines(1)
    pid = pool.session("spins")["worker_pid"]
    pool.rgpu("kill", "spins")
    eventually(lambda: not Path(f"/proc/{pid}").exists(), pool.logs, 30)
    assert f"terminate_client 4242 {pid}" in pool.said("node-a")


@pytest.mark.timeout(120)
def test_the_control_daemon_is_found_again_and_ends_with_its_node(pool: MpsPool) -> None:
    pipes = pool.pipes("node-b")

    def daemon() -> dict[str, Any]:
        return dict(json.loads((pool.folder / "pool" / "nodes" / "node-b" / "server.json").read_bytes()))

    first = daemon()["pid"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{first}").exists(), pool.logs, 20)
    assert (pipes / "control").exists()  # as workers, it outlives a daemon
    pool.start_daemon("node-b")
    eventually(lambda: daemon()["pid"] != first and daemon()["ready"], pool.logs, 60)
    assert pool.said("node-b").count("start") == 1 and "quit" not in pool.said("node-b")
    os.kill(daemon()["pid"], signal.SIGTERM)
    eventually(lambda: not (pipes / "control").exists(), pool.logs, 60)
    assert pool.said("node-b").count("start") == 1 and pool.said("node-b")[-1] == "quit"


@pytest.mark.timeout(60)
def test_without_nvidias_program_the_node_does_not_start(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, nodes=1)
    pool.environment |= {"RGPU_MPS": "50", "PATH": "/usr/bin:/bin"}
    with pytest.raises(Exception, match="nvidia-cuda-mps-control is not on PATH"):  # noqa: SIM117
        with pool:
            pass
