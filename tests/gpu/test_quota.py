"""Device memory to the MiB on a GPU, and that a neighbour notices nothing: `pytest -m gpu tests/gpu/test_quota.py`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import PROGRAMS, Staged, wait_end

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU")]
QUOTA = 256
#: An agent that tells its program of four times as much, as one would that was tampered with.
LIAR = """
from rgpu.session import facts
encode = facts.SessionFacts.encode
def lie(self):
    import dataclasses
    return encode(dataclasses.replace(self, quota=4 * self.quota))
facts.SessionFacts.encode = lie
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=1, device="cuda:0", lease=8.0) as running:
        yield running


@pytest.fixture
def neighbour(pool: LocalPool, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A program that checks its own memory, before and behind what the test does."""
    staged = Staged(pool, tmp_path, "steady", name=f"neighbour-{request.node.originalname[-8:]}")
    staged.reach("1")
    yield
    staged.open("1", "2", "3", "end")
    staged.finish()
    assert pool.session(staged.name)["epoch"] == 1


@pytest.mark.usefixtures("neighbour")
def test_all_of_it_and_not_a_mib_more(pool: LocalPool) -> None:
    program = pool.run(sys.executable, str(PROGRAMS / "quota_edge.py"), "honest", name="edge",
                       options=("--memory", f"{QUOTA}MiB"))
    assert wait_end(program) == 0, program.errors[-20:]
    assert program.lines == ["one more 2 left 0", "given back 0"]


@pytest.mark.usefixtures("neighbour")
def test_an_agent_that_lies_gets_error_2_from_the_worker(pool: LocalPool, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIAR)
    monkeypatch.setitem(pool.environment, "PYTHONPATH", f"{tmp_path}{os.pathsep}{pool.environment['PYTHONPATH']}")
    monkeypatch.setitem(pool.environment, "RGPU_RESIDENT", "off")
    program = pool.run(sys.executable, str(PROGRAMS / "quota_edge.py"), "lies", name="liar",
                       options=("--memory", f"{QUOTA}MiB", "--recover", "off"))
    assert wait_end(program) == 0, program.errors[-20:]
    told = re.fullmatch(r"free (\d+) ended 2 again 2", program.lines[-1])
    assert told and int(told[1]) > 2 * QUOTA, program.lines
