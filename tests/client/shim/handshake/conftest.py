"""Where the shim and the stock runtimes come from, and how a program is run on them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.building import libraries, one_at_a_time
from tests.support.shim.peer import Peer

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session")
def shim() -> Path:
    """The folder with ``libcuda.so.1``: $RGPU_SHIM_DIR, else ``build/tests``."""
    return libraries()


@pytest.fixture(scope="session")
def library(shim: Path) -> Path:
    """``libcuda.so.1`` itself."""
    return shim / "libcuda.so.1"


def stock_runtime(version: str) -> Path:
    """``libcudart`` of that version from PyPI, kept in ``build/``; fails the test when it cannot be had."""
    name = "nvidia-cuda-runtime-cu12" if version.startswith("12.") else "nvidia-cuda-runtime"
    folder = ROOT / "build" / "cudart" / version
    with one_at_a_time(folder):
        if not list(folder.rglob("libcudart.so.*")):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q",
                       "-d", str(folder), f"{name}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.fail(f"stock libcudart {version} is needed and cannot be downloaded: {done.stderr[-800:]}")
            for wheel in folder.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder)
    return next(path for path in sorted(folder.rglob("libcudart.so.*")))


@dataclass
class Outcome:
    """What a program did."""

    status: int
    out: str
    err: str


@dataclass
class Stage:
    """A peer, and programs that run against it."""

    peer: Peer
    shim: Path

    def run(self, code: str, *arguments: object, **environ: str | None) -> Outcome:
        """Runs Python code in a process of its own, which must end well. A variable set to None is removed."""
        env = {**os.environ, "RGPU_AGENT": str(self.peer.path), "PYTHONPATH": str(ROOT),
               "LD_LIBRARY_PATH": os.pathsep.join((str(self.shim), os.environ.get("LD_LIBRARY_PATH", ""))),
               "PYTHONFAULTHANDLER": "1"}
        for key, value in environ.items():
            if value is None:
                env.pop(key, None)
            else:
                env[key] = value
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        outcome = Outcome(done.returncode, done.stdout, done.stderr)
        assert outcome.status == 0, outcome
        return outcome


@pytest.fixture
def make_stage(shim: Path) -> Iterator[Callable[..., Stage]]:
    """Stages with facts of one's own; arguments go to :class:`Peer`."""
    made: list[Peer] = []

    def make(**options: object) -> Stage:
        made.append(Peer(**options))  # type: ignore[arg-type]
        return Stage(made[-1], shim)

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    """A stage with one sm_75 device."""
    return make_stage()
