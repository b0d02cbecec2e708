"""The entrance of `rgpu run`: what it reads itself means what click reads, and all else is left to click."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.cli import plain_run
from rgpu.cli.plain_run import FLAGS, VALUES
from rgpu.cli.sessions.run import command

ROOT = Path(__file__).parents[3]
WORDS = ["run", "--", "-", "", "true", "-c", "--name", "--name=a", "--name=", "n", "-q", "-qq", "--quiet", "--quiet=1",
         "--lazy", "--queue", "--memory", "1GiB", "--pool=p", "--host", "--gpus=0.5", "--gpus", "2", "--ranks",
         "--help", "-h", "-d", "--detach", "--nam", "--context", "--label", "a=b", "--record=x"]


def by_click(arguments: list[str]) -> dict[str, Any]:
    """What click reads for the verb. Raises :class:`click.ClickException`."""
    with command.make_context("run", list(arguments)) as context:
        return context.params


@given(st.lists(st.sampled_from(WORDS), max_size=8))
def test_what_is_read_here_is_what_click_reads(words: list[str]) -> None:
    found = plain_run.read(["run", *words])
    if found is None:
        return
    read = by_click(words)
    assert read["program"] == found.program
    for name in set(FLAGS.values()):
        assert read.pop(name) == (name in found.flags), name
    for name in VALUES.values():
        assert read.pop(name) == found.values.get(name), name
    defaults = by_click(["true"])
    assert {name: value for name, value in read.items() if name != "program"} == {name: defaults[name] for name in read
                                                                                  if name != "program"}


@pytest.mark.parametrize(("line", "program"), [
    ("run true", ("true",)), ("run -q -- true", ("true",)),
    ("run --name n --gpus=2 -- python -c x", ("python", "-c", "x")),
    ("run --lazy -- -q", ("-q",)), ("run true -- x", ("true", "--", "x")), ("run - x", ("-", "x")),
])
def test_plain_command_lines(line: str, program: tuple[str, ...]) -> None:
    found = plain_run.read(line.split())
    assert found is not None and found.program == program


@pytest.mark.parametrize("line", [
    "", "ps", "--version", "--help run true", "run", "run -q", "run --", "run --name", "run --name -q true",
    "run --detach true", "run -d true", "run --context c true", "run --bogus", "run -h", "run -qq true",
    "run --ranks 2 true",
])
def test_what_click_is_left_with(line: str) -> None:
    assert plain_run.read(line.split()) is None


def test_both_ways_are_refused_alike(tmp_path: Path) -> None:
    """The same words and exit codes; `--priority 0` is the default, and more than the entrance knows."""
    environment = {**os.environ, "HOME": str(tmp_path), "RGPU_JOURNAL_DIR": str(tmp_path / "journal"),
                   "PYTHONPATH": str(ROOT), **{name: "" for name in ("RGPU_POOL", "RGPU_CONFIG", "RGPU_CONTEXT")}}
    for options in (["--pool", str(tmp_path / "none")], ["--memory", "1zz"], ["--gpus", "99"]):
        said = []
        for more in ([], ["--priority", "0"]):
            done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", *more, *options, "--", "true"],
                                  env=environment, capture_output=True, text=True, timeout=60)
            said.append((done.returncode, done.stdout, done.stderr))
        assert said[0] == said[1] and said[0][0] > 0 and said[0][2].startswith("rgpu: "), said


def test_completion_goes_through_click() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys; sys.argv = ['rgpu', 'run', 'true']\n"
                           "from rgpu.cli.main import main; main()"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "_RGPU_COMPLETE": "bash_complete",
                               "COMP_WORDS": "rgpu ru", "COMP_CWORD": "1"})
    assert (done.returncode, done.stdout.split()) == (0, ["plain,run"]), done.stderr
