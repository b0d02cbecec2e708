"""Callbacks of training frameworks: checkpoints of the session beside those of the trainer, on a real pool."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rgpu
from tests.support import frameworks
from tests.support.pools.pool import ROOT, LocalPool

TRAINERS = ("lightning", "transformers")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("frameworks"), nodes=1, lease=8.0) as running:
        yield running


def program(local: LocalPool, name: str, code: str, folder: Path, python: str = sys.executable,
            path: tuple[Path, ...] = ()) -> str:
    """What a program writes that must end well."""
    environment = {**local.environment, "PYTHONPATH": ":".join(map(str, (*path, ROOT)))}
    with rgpu.Pool(local.environment["RGPU_POOL"]) as pool, \
            pool.run([python, "-c", code], name=name, env=environment, cwd=folder, stdout=subprocess.PIPE,
                     stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        said = run.stdout.read().decode()
        assert run.wait(60) == 0, said
    return said


@pytest.mark.timeout(300)
def test_the_calls_that_trainers_make(local: LocalPool, tmp_path: Path) -> None:
    """The failure of a checkpoint is a warning and training goes on, or raised at the next call where that is asked."""
    path = (frameworks.base_classes(tmp_path / "packages"),)
    for framework in TRAINERS:
        said = program(local, framework, frameworks.DOCUMENTED[framework], tmp_path, path=path)
        images = re.findall(rf"^latest {framework} (\S+)$", said, re.M)
        assert len(set(images)) == 2, said
        assert set(images) <= {row["image"] for row in local.rgpu("image", "ls")}
        assert re.search(rf"^rgpu.integrations: checkpoint {images[0]} of session {framework} at step 1: ", said, re.M)
        warned = re.search(rf"^rgpu.integrations: no checkpoint of session {framework} at step 3: .*training goes on$",
                           said, re.M)
        assert warned and re.search(r"^raised \w+$", said, re.M), said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", TRAINERS)
def test_outside_a_run_they_do_nothing_and_without_the_framework_they_say_what_to_install(
        framework: str, tmp_path: Path) -> None:
    path = frameworks.base_classes(tmp_path)
    code = re.sub(r"from cuda.core.*\n.*\n", "", frameworks.DOCUMENTED[framework])
    code = code[:code.index("save(one, 1)")] + "save(one, 1); end(one); print(one.latest)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env={"PYTHONPATH": f"{path}:{ROOT}"})
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    hide = "import sys; sys.modules.update(dict.fromkeys(['lightning', 'pytorch_lightning', 'transformers']))\n"
    done = subprocess.run([sys.executable, "-c", f"{hide}import rgpu.integrations.{framework}"], capture_output=True,
                          text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and f"pip install 'rgpu-live[{framework}]'" in done.stderr, done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize("framework", TRAINERS)
def test_a_training(local: LocalPool, framework: str, tmp_path: Path) -> None:
    """Steps 2 and 4 are saved by the trainer, and beside each the session is."""
    if not frameworks.installed(framework):
        pytest.skip(f"{framework} and torch are not installed (RGPU_FRAMEWORKS_PYTHON names a Python that has them)")
    said = program(local, f"{framework}-train", frameworks.REAL[framework], tmp_path, frameworks.PYTHON)
    told = re.findall(r"^rgpu.integrations: checkpoint (\S+) of session \S+ at step (\d+): ", said, re.M)
    assert [step for _, step in told] == ["2", "4"], said
    assert told[-1][0] == re.findall(r"^latest \S+ (\S+)$", said, re.M)[-1]
    assert len(list((tmp_path / "out").iterdir())) == 2
