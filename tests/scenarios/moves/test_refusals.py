"""Moves that cannot be: refused before anything stops, with the reason, and the program notices nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, VerbError
from tests.support.pools.staged import Staged

MEMORY = ("--device-memory", "512MiB")


class Node:
    """One more node of a local pool, unlike the others."""

    def __init__(self, pool: LocalPool, host: str, *options: str, **environment: str) -> None:
        self.log = open(pool.folder / f"{host}.log", "w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", "2.0", *options],
            env={**pool.environment, **environment}, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=self.log)
        eventually(lambda: self.process.poll() is not None
                   or any(row["host"] == host and row["state"] == "ready" for row in pool.living()),
                   f"{host} did not join the pool", 30, every=0.1)
        assert self.process.poll() is None, f"{host} ended with {self.process.returncode}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.log.close()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """node-a, node-b as usual; `old` has an older driver, `small` has half a GiB."""
    with LocalPool(tmp_path_factory.mktemp("mixed"), nodes=2, lease=8.0) as pool:
        nodes = [Node(pool, "old", "--coordinator", "never", RGPU_CPU_DRIVER_VERSION="12080"),
                 Node(pool, "small", "--coordinator", "never", *MEMORY)]
        try:
            yield pool
        finally:
            for node in nodes:
                node.stop()


@pytest.fixture(scope="module")
def steady(mixed: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    """A session of 400 MiB on node-a, which goes on to its end after all refusals."""
    staged = Staged(mixed, tmp_path_factory.mktemp("steady"), "steady", name="steady",
                    options=("--host", "node-a", "--memory", "400MiB"))
    staged.reach("1")
    yield staged
    staged.open("1", "2", "3", "end")
    staged.finish()
    assert mixed.session("steady")["epoch"] == 1


def refused(pool: LocalPool, host: str) -> str:
    """What `rgpu migrate` says; the session is where it was, at the same epoch, with the same worker."""
    before = pool.session("steady")
    with pytest.raises(VerbError) as caught:
        pool.rgpu("migrate", "steady", host)
    after = pool.session("steady")
    keys = ("host", "epoch", "worker_pid", "state")
    assert [after[key] for key in keys] == [before[key] for key in keys]
    assert after["state"] == "running"
    return caught.value.text


def test_an_unknown_host(mixed: LocalPool, steady: Staged) -> None:
    said = refused(mixed, "nowhere")
    assert "nowhere" in said and "node-b" in said, said


def test_the_host_it_is_on(mixed: LocalPool, steady: Staged) -> None:
    assert "already" in refused(mixed, "node-a")


def test_an_older_driver(mixed: LocalPool, steady: Staged) -> None:
    said = refused(mixed, "old")
    assert "driver" in said and "12080" in said and "13000" in said, said


def test_a_full_host(mixed: LocalPool, steady: Staged) -> None:
    """512 MiB of which another session has 200: 400 MiB do not fit, though an empty `small` would take them."""
    filler = Staged(mixed, mixed.folder, "steady", name="filler", options=("--host", "small", "--memory", "200MiB"))
    filler.reach("1")
    said = refused(mixed, "small")
    assert "312 MiB" in said and "400 MiB" in said, said
    filler.open("1", "2", "3", "end")
    filler.finish()


def test_a_dead_host(mixed: LocalPool, steady: Staged, tmp_path: Path) -> None:
    gone = Node(mixed, "gone", "--coordinator", "never")
    os.kill(gone.process.pid, signal.SIGKILL)
    gone.process.wait(10)
    gone.log.close()
    assert "gone" in refused(mixed, "gone")
