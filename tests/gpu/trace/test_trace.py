"""The script of driver calls through a session, compared with the recording of a real driver.

On a GPU every section (marker ``gpu``); on the cpu device, in `make test`, those that need no kernels. The
recording is made by ``python -m tests.gpu.trace.record`` on a machine with a GPU and driver 580.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.session.calls.functions import FUNCTIONS
from rgpu.session.calls.functions.model import REFUSED
from tests.gpu.trace.record import FILE, answers, flat
from tests.gpu.trace.script import KERNELS, SECTIONS
from tests.support.pools.pool import LocalPool

needs_recording = pytest.mark.skipif(
    not FILE.exists(), reason=f"{FILE.name} does not exist yet: python -m tests.gpu.trace.record, on an H200")

#: ``section: call`` → why the answer differs on purpose. An entry that does not differ is an error.
ON_PURPOSE: dict[str, str] = {
    "pointers: held registered / device pointer": "registered memory has no mirror: kernels cannot reach it",
}
#: Deviations that are to be mended, not wanted: each stands in docs/users/limits.md.
NOT_YET: dict[str, str] = {}
#: Section → the driver function without which it cannot run; compared as soon as that is supported.
WAITING: dict[str, str] = {"capture": "cuStreamBeginCapture_v2", "graphs": "cuStreamBeginCapture_v2"}
#: The same for the cpu device alone.
ON_THE_CPU_DEVICE: dict[str, str] = {}


def differences(section: str, recorded: dict[str, Any], answered: dict[str, Any], allowed: dict[str, str],
                volatile: list[str]) -> list[str]:
    """What is not as recorded, and what is allowed to differ without need."""
    found = []
    for key in sorted(recorded.keys() | answered.keys()):
        name = f"{section}: {key}"
        if name in volatile:
            continue
        same = recorded.get(key) == answered.get(key)
        if not same and name not in allowed:
            found.append(f"{name}: driver {recorded.get(key)}, session {answered.get(key)}")
        if same and name in allowed:
            found.append(f"{name}: does not differ; remove it from the list")
    return found


def run(pool: LocalPool, section: str) -> dict[str, Any]:
    prefix = (sys.executable, "-m", "rgpu.cli.main", "run", "--name", f"trace-{section}".replace("_", "-"),
              "--memory", "256MiB", "--")
    return flat(answers(section, prefix, pool.environment))


def compare(pool: LocalPool, section: str, allowed: dict[str, str]) -> None:
    content = json.loads(FILE.read_text())
    assert section in content["sections"], f"{FILE.name} lacks the section: record it again"
    if section in WAITING and FUNCTIONS[WAITING[section]].answer == REFUSED:
        pytest.skip(f"{WAITING[section]} is not supported yet")
    # Through JSON, as the recording went: tuples become lists.
    answered = json.loads(json.dumps(run(pool, section)))
    found = differences(section, content["sections"][section], answered, allowed, content["volatile"])
    assert not found, "\n".join(found[:40])


@pytest.fixture(scope="module")
def gpu_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("trace"), nodes=1, device="cuda:0", lease=5.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def cpu_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("trace"), nodes=1, lease=5.0) as pool:
        yield pool


@pytest.mark.gpu
@needs_recording
@pytest.mark.parametrize("section", SECTIONS)
def test_answers_on_a_gpu(gpu_pool: LocalPool, section: str) -> None:
    compare(gpu_pool, section, ON_PURPOSE | NOT_YET)


@needs_recording
@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in KERNELS])
def test_answers_on_the_cpu_device(cpu_pool: LocalPool, section: str) -> None:
    compare(cpu_pool, section, ON_PURPOSE | NOT_YET | ON_THE_CPU_DEVICE)


def test_differences_are_found() -> None:
    recorded = flat([["alloc", 0], ["alloc", 1], ["state", "a", 3]])
    assert list(recorded) == ["alloc", "alloc #2", "state / a"]
    assert differences("s", recorded, dict(recorded), {}, []) == []
    changed = {**recorded, "alloc #2": [2]}
    assert differences("s", recorded, changed, {}, []) == ["s: alloc #2: driver [1], session [2]"]
    assert differences("s", recorded, changed, {"s: alloc #2": "why"}, []) == []
    assert differences("s", recorded, changed, {}, ["s: alloc #2"]) == []
    assert "remove it" in differences("s", recorded, dict(recorded), {"s: alloc": "why"}, [])[0]
    assert "session None" in differences("s", recorded, {}, {}, [])[0]


def test_the_script_runs_on_a_session(cpu_pool: LocalPool) -> None:
    """Without a recording too: a section of the script gives answers through the shim."""
    found = run(cpu_pool, "arguments")
    assert found["alloc 0"] == [1] and found["free twice"] == [1] and found["then"] == [0]
    assert Path(__file__).with_name("script.py").exists()
