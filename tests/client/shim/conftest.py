"""Builds the shim once, starts programs that use it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import libraries
from tests.support.shim.fake_agent import FakeAgent

PRELUDE = (Path(__file__).parents[2] / "support/shim/prelude.py").read_text()


@pytest.fixture(scope="session")
def shim() -> Path:
    """The library in $RGPU_SHIM_DIR (say, one built with a sanitizer), else built from the sources as they are."""
    return libraries() / "libcuda.so.1"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as running:
        yield running


class Program:
    """A Python process that loads the shim and runs ``code`` behind the prelude."""

    def __init__(self, shim: Path, agent: FakeAgent | None, code: str, **environment: str) -> None:
        env = {**os.environ, "SHIM": str(shim), **environment}
        env.pop("RGPU_AGENT", None)
        if agent is not None:
            env["RGPU_AGENT"] = agent.path
        self._errors = tempfile.TemporaryFile()
        self._agent = agent
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)

    def close(self) -> None:
        self.process.wait(20)
        self.process.stdout.close()
        with contextlib.suppress(OSError):  # what it never read
            self.process.stdin.close()
        self._errors.close()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-3000:]

    def hear(self) -> Any:
        """The next thing it tells."""
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended ({self.process.wait(20)}): {self.errors()}")
        return json.loads(line)

    def tell(self, text: str = "") -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, timeout: float = 60) -> list[Any]:
        """Waits for the program, and until the agent has read all of it; what it told since."""
        self.process.stdin.close()
        told = [json.loads(line) for line in self.process.stdout]
        code = self.process.wait(timeout)
        assert code == 0, f"{code}: {self.errors()}"
        if self._agent is not None and self._agent.sockets:
            assert self._agent.ended.wait(20), "the agent goes on although its program has ended"
        return told


@pytest.fixture
def program(shim: Path) -> Iterator[Any]:
    """``program(agent, code)`` starts one; those still alive are killed at the end."""
    started: list[Program] = []

    def start(agent: FakeAgent | None, code: str, **environment: str) -> Program:
        started.append(Program(shim, agent, code, **environment))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.close()
