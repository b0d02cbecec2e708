"""Checkpoints of a program that changes all its memory all the time, while their background is slow.

The checkpoint is of the moment of the pause, whatever the program did since; and whoever comes while it
is written (a kill, a move, the session's end, another checkpoint) is not held up by it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.checkpoint.blobs.base import DirectoryBlobs
from rgpu.checkpoint.session.snapshot import compare, of_checkpoint
from rgpu.checkpoint.store.checkpoint_store import user_key
from rgpu.checkpoint.store.grants import UserCheckpoints
from rgpu.server.device.spec import make_device
from rgpu.server.worker.apply.replaying import Replay
from rgpu.session.journal.recording import Recording
from tests.support.eventually import eventually
from tests.support.pools.fire import OTHER
from tests.support.pools.pool import ROOT, LocalPool, Program, VerbError
from tests.support.pools.staged import line

RIGHT = hashlib.sha256(b"right").hexdigest()
SLOW = 4.0  #: seconds that the background of a checkpoint is held up
LONG = 40.0  #: so long that whoever comes meanwhile does come meanwhile, on a busy machine too


class Restless:
    """A pool, a program that never rests, and a fault point that can be armed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.released = folder, folder / "released"
        self.pool = LocalPool(folder, nodes=2, lease=8.0)
        self.pool.environment["RGPU_FAULT_FILE"] = str(folder / "fault")
        self.options = options
        self.program: Program

    def __enter__(self) -> Restless:
        self.pool.__enter__()
        self.program = self.pool.run(*line("restless", self.released), name="restless", options=self.options)
        self.program.wait_lines(3)
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.__exit__(*error)

    def slow_checkpoint(self, seconds: float = SLOW) -> subprocess.Popen[str]:
        """One whose cut is taken and whose background waits."""
        (self.folder / "fault.new").write_text(f"cut:delay:{seconds}")
        os.rename(self.folder / "fault.new", self.folder / "fault")
        asked = subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "checkpoint", "restless", "-o", "json"],
                                 env=self.pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True)
        fired = self.folder / "fault.cut.fired"
        eventually(lambda: fired.exists() or asked.poll() is not None, asked.communicate, 30)
        assert fired.exists(), asked.communicate()
        return asked

    def runs_on(self) -> None:
        self.program.wait_lines(len(self.program.lines) + 2, seconds=30)

    def end(self) -> None:
        self.released.touch()
        assert self.program.finish() == RIGHT


def ended(asked: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = asked.communicate(timeout=60)
    assert asked.returncode == 0, err
    return dict(json.loads(out))


def failed(asked: subprocess.Popen[str]) -> str:
    out, err = asked.communicate(timeout=60)
    assert asked.returncode not in (0, 1) and "Traceback" not in err, (asked.returncode, out, err)
    return err


def recovered(pool: LocalPool, epoch: int) -> dict[str, Any]:
    def running() -> dict[str, Any]:
        row = pool.session("restless")
        return row if row["epoch"] >= epoch and row["state"] == "running" else {}

    return eventually(running, lambda: (pool.session("restless"), pool.logs()), 60, every=0.1)


@pytest.fixture
def restless(tmp_path: Path) -> Iterator[Restless]:
    with Restless(tmp_path) as made:
        yield made


def test_the_checkpoint_is_of_the_pause_and_brings_the_session_back(tmp_path: Path) -> None:
    """Taken from a running program, slowly: it equals a replay of the recorded journal to that very call."""
    with Restless(tmp_path, "--record", str(tmp_path / "recorded")) as restless:
        pool = restless.pool
        asked = restless.slow_checkpoint()
        restless.runs_on()
        checkpoint = ended(asked)
        assert checkpoint["cut_bytes"] >= 4 << 20, checkpoint
        assert checkpoint["total_ms"] > SLOW * 1000 > 2 * checkpoint["pause_ms"] > 0, checkpoint
        restless.runs_on()
        os.kill(int(pool.session("restless")["worker_pid"]), signal.SIGKILL)
        recovered(pool, 2)
        restless.end()
        root = tmp_path / "pool"
        (tag,) = [path.name for path in (root / "images" / "users").iterdir()]
        checkpoints = UserCheckpoints(DirectoryBlobs(root / "images"), tag, user_key((root / "secret").read_bytes(),
                                                                                     tag))
        with checkpoints.open(checkpoint["image"]) as opened:
            held = of_checkpoint(opened)
    device = make_device("cpu:0", 1 << 30)
    try:
        recording = Recording(tmp_path / "recorded" / "restless.rgpuj")
        replayed = Replay(recording, device).run([checkpoint["position"]])
    finally:
        device.close()
    assert replayed.divergences == [] and replayed.snapshots[0].position == checkpoint["position"]
    found = compare(replayed.snapshots[0], held)
    assert found.equal and found.pages >= 64, found


def test_a_worker_that_dies_while_its_checkpoint_is_written(restless: Restless) -> None:
    pool = restless.pool
    first = pool.rgpu("checkpoint", "restless")
    asked = restless.slow_checkpoint(LONG)
    os.kill(int(pool.session("restless")["worker_pid"]), signal.SIGKILL)
    failed(asked)
    row = recovered(pool, 2)
    restless.program.wait_lines(len(restless.program.lines) + 5)
    assert pool.rgpu("describe", "restless")["image"]["name"] == first["image"], row
    second = pool.rgpu("checkpoint", "restless")
    assert pool.rgpu("image", "verify", second["image"])["pages"] == second["pages"]
    restless.end()


def test_a_move_goes_first(restless: Restless) -> None:
    pool = restless.pool
    host = pool.session("restless")["host"]
    asked = restless.slow_checkpoint(LONG)
    moved = pool.rgpu("migrate", "restless", OTHER[host] if OTHER[host] != "node-c" else "node-a")
    assert moved["outcome"] == "committed"
    assert failed(asked), "it gave way; held up here, it may have ended with its worker before it could say so"
    assert pool.rgpu("image", "ls") == []
    after = pool.rgpu("checkpoint", "restless")
    assert pool.rgpu("image", "verify", after["image"])["pages"] == after["pages"]
    restless.end()


@pytest.mark.slow
def test_a_second_checkpoint_waits_its_turn(restless: Restless) -> None:
    pool = restless.pool
    asked = restless.slow_checkpoint()
    restless.runs_on()
    second = pool.rgpu("checkpoint", "restless")
    first = ended(asked)
    assert second["position"] > first["position"] and second["unchanged_pages"] >= 0
    assert {row["image"] for row in pool.rgpu("image", "ls")} == {first["image"], second["image"]}
    restless.end()


@pytest.mark.slow
def test_a_session_that_ends_waits_for_no_checkpoint(restless: Restless) -> None:
    pool = restless.pool
    asked = restless.slow_checkpoint(LONG)
    began = time.monotonic()
    pool.rgpu("kill", "restless")
    assert time.monotonic() - began < LONG, "it did not wait for the checkpoint"
    failed(asked)
    assert pool.session("restless")["state"] == "ended"
    with pytest.raises(VerbError):
        pool.rgpu("checkpoint", "restless")


def test_several_checkpoints_keep_to_the_bandwidth(tmp_path: Path) -> None:
    """Two sessions of random bytes at once, one budget: both are as slow as half of it."""
    pool = LocalPool(tmp_path, nodes=1, lease=8.0)
    pool.environment["RGPU_CHECKPOINT_BANDWIDTH"] = "2MiB"
    pool.environment["RGPU_IMAGE_PROCESSES"] = "2"  # none by itself, where there are few processors
    with pool:
        programs = [pool.run(*line("restless", tmp_path / "released"), name=name) for name in ("a", "b")]
        for program in programs:
            program.wait_lines(3)
        began = time.monotonic()
        asked = [subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "checkpoint", name, "-o", "json"],
                                  env=pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  text=True) for name in ("a", "b")]
        checkpoints = [ended(one) for one in asked]
        seconds, written = time.monotonic() - began, sum(checkpoint["bytes"] for checkpoint in checkpoints)
        assert written > 2 << 20 and written / seconds < 2.6 * (1 << 20), (written, seconds)
        assert all(checkpoint["pause_ms"] < checkpoint["total_ms"] / 2 for checkpoint in checkpoints), \
            "the budget is not the session's to wait for"
        (tmp_path / "released").touch()
        assert [program.finish() for program in programs] == [RIGHT] * 2
