"""Monitors, refused calls and versions, on a real pool of one node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.link import versions
from rgpu.session.errors import DeviceError, VersionMismatch
from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool

PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("single"), nodes=1, lease=8.0) as running:
        yield running


def rgpu_run(pool: LocalPool, name: str, *command: str, options: tuple[str, ...] = (), before: str = "",
             **more: object) -> subprocess.Popen[str]:
    """``rgpu run`` with pipes; ``before``: Python that the client, its own agent then, runs first."""
    alone = {"RGPU_RESIDENT": "off"} if before else {}
    client = f"import sys\n{before}\nfrom rgpu.cli.main import main\nsys.argv[0] = 'rgpu'\nmain()"
    return subprocess.Popen([sys.executable, "-c", client, "run", "--name", name, *options, "--", *command],
                            env={**pool.environment, **alone}, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("options", "before"), [((), 1), (("--lazy",), 0)])
def test_nvml_agrees_with_the_driver(single: LocalPool, options: tuple[str, ...], before: int) -> None:
    for module in ("pynvml", "gpustat", "cuda.bindings.driver"):
        pytest.importorskip(module, reason="in the test extra")
    process = rgpu_run(single, f"monitored-{before}", sys.executable, str(PROGRAMS / "monitored.py"), str(before),
                       options=("--memory", "64MiB", *options))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err[-3000:]
    assert out.rstrip().endswith("monitored")
    (gpu,) = json.loads(out[:out.rindex("}") + 1])["gpus"]
    assert gpu["memory.total"] == 64 and gpu["utilization.gpu"] is None
    assert [p["gpu_memory_usage"] for p in gpu["processes"]] == [gpu["memory.used"]] and gpu["memory.used"] > 8


def test_what_is_refused_is_said_in_one_line_and_named_in_ps(single: LocalPool, tmp_path: Path) -> None:
    """The program is linked with -lcuda where no driver is known to the linker: LIBRARY_PATH leads to ours."""
    program = tmp_path / "refuses"
    build = f"cc '{PROGRAMS / 'refuses.c'}' -o '{program}' -lcuda"
    process = rgpu_run(single, "refuses", "sh", "-c", f"{build} && '{program}'")
    try:
        assert process.stdout is not None and process.stdin is not None
        assert [process.stdout.readline().strip() for _ in range(4)] == ["801"] * 4
        wanted = ["cuImportExternalMemory", "cuFlushGPUDirectRDMAWrites"]
        eventually(lambda: single.session("refuses")["unsupported_calls"] == wanted,
                   lambda: single.session("refuses")["unsupported_calls"], 15, every=0.2)
    finally:
        _, err = process.communicate("\n", timeout=30)
    assert process.returncode == 0, err
    for name in wanted:
        (line,) = [line for line in err.splitlines() if name in line]
        assert "is not supported: it returns CUDA_ERROR_NOT_SUPPORTED" in line


@pytest.mark.parametrize(("newer", "accepted"), [(1, True), (2, False), (-2, False)])
@pytest.mark.parametrize("link", ["CONTROL", "DATA"])
def test_versions_that_do_not_fit_are_refused(single: LocalPool, link: str, newer: int, accepted: bool) -> None:
    number = getattr(versions, link) + newer
    before = f"import rgpu.link.versions as v\nv.{link} = {number}\nimport rgpu\nv.__version__ = '7.8.9'"
    process = rgpu_run(single, f"version-{link}-{number}", sys.executable, "-c", "print('ran')", before=before)
    out, err = process.communicate(timeout=60)
    if accepted:
        assert (process.returncode, out) == (0, "ran\n"), err
        return
    import rgpu

    assert process.returncode == VersionMismatch.exit_code and out == ""
    assert "7.8.9" in err and rgpu.__version__ in err and len(err.splitlines()) == 1, err


def test_a_node_without_driver_says_what_to_do(single: LocalPool) -> None:
    """Both say it in one line; doctor is content, since a client and a cpu node need no GPU."""
    from tests.conftest import gpu_count

    if gpu_count():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "server", "--host", "bare", "--device", "cuda:0"],
                          env=single.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = done.stderr.strip().splitlines()
    assert done.returncode == DeviceError.exit_code, done.stderr
    assert len(said) == 1 and said[0].startswith("rgpu: cuda:0: ") and "--device cpu" in said[0], said
    findings = single.rgpu("doctor")
    (gpu,) = [finding for finding in findings if finding["check"] == "gpu"]
    assert gpu["ok"] and said[0].removeprefix("rgpu: ") in gpu["found"]
