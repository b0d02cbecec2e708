"""numba-cuda's own tests on the cpu device: a few modules always, all of them in `make sweep`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.suites import numba_cuda, numba_reasons
from tests.support.pools.pool import ROOT, LocalPool

#: Linking, local memory, kernels that allocate, call through pointers and free; a plain function as a test.
FEW = ("cudadrv.test_linker", "cudapy.test_localmem", "cudapy.test_array_methods", "cudapy.test_matmul")
#: That so many pass is claimed (docs/users/numba.md): fewer may not.
LEAST = {"cudadrv": 235, "cudapy": 1540}


def wrong(found: list[numba_cuda.Module]) -> str:
    return "\n".join(numba_cuda.problems(found))


def test_a_few_modules(tmp_path: Path) -> None:
    with LocalPool(tmp_path / "pool", nodes=1, lease=10.0) as pool:
        found = numba_cuda.run(FEW, pool.environment, tmp_path / "out", jobs=2, limit=160)
    assert not wrong(found)
    assert all(module.counts()["passed"] and not module.ended for module in found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_modules(tmp_path: Path) -> None:
    """The results stay in bench/results/numba-cuda, or $RGPU_SWEEP_OUT."""
    output = Path(os.environ.get("RGPU_SWEEP_OUT", ROOT / "bench" / "results")) / "numba-cuda"
    with LocalPool(tmp_path / "pool", nodes=1, lease=10.0) as pool:
        found = numba_cuda.run(numba_cuda.modules(), pool.environment, output, jobs=2, limit=900)
    about = numba_cuda.report(found, "make sweep")
    (output / "numba-cuda.json").write_text(json.dumps(about, indent=1) + "\n")
    assert not wrong(found)
    short = {name: counts for name, counts in about["summary"].items() if counts.get("passed", 0) < LEAST[name]}
    assert not short


def test_a_test_that_fails_without_a_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are a test that was lost with its process, one that passes in spite of a reason, a module without tests."""
    listed = "cudapy.test_ipc.TestIpcMemory.test_ipc_array"
    monkeypatch.setattr(numba_reasons, "KNOWN", (numba_reasons.Known("a reason", ("cudapy.test_ipc.*",)),))
    lines = [{"planned": [f"numba.cuda.tests.{name}" for name in ("a.b.lost", "a.b.failed", listed)]},
             {"id": "numba.cuda.tests.a.b.failed", "outcome": "failed", "reason": "1 is\n not 2", "trace": ""},
             {"id": f"numba.cuda.tests.{listed}", "outcome": "passed", "reason": "", "trace": ""}]
    path = tmp_path / "a.b.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    module = numba_cuda.Module("a.b", 1.0, "exit status 139", numba_cuda.read(path))
    said = numba_cuda.problems([module, numba_cuda.Module("a.c", 1.0, "", numba_cuda.read(tmp_path / "none"))])
    assert said == ["a.b.failed: failed: 1 is not 2",
                    f"{listed}: passed, and is listed as failing: a reason",
                    "a.b.lost: lost: exit status 139", "a.c: no test was run (no tests in it)"]


def test_what_ends_otherwise_than_natively_is_named() -> None:
    def module(name: str, *tests: tuple[str, str]) -> numba_cuda.Module:
        return numba_cuda.Module(name, 1.0, "", [numba_cuda.Test(test, outcome, "why") for test, outcome in tests])

    native = [module("a.b", ("a.b.one", "passed"), ("a.b.two", "failed"), ("a.b.three", "passed")),
              module("a.c", ("a.c.one", "passed"))]
    remote = [module("a.b", ("a.b.one", "passed"), ("a.b.two", "failed"), ("a.b.three", "skipped"),
                     ("a.b.only", "passed")), module("a.c")]
    assert numba_cuda.differences(native, remote) == [
        "a.b.only: passed, natively not there: why", "a.b.three: skipped, natively passed: why",
        "a.c.one: not there, natively passed: why"]


def test_a_module_runs_natively_without_a_pool(tmp_path: Path) -> None:
    """Without a GPU each of its tests fails or is skipped there; that is noted as such."""
    (module,) = numba_cuda.run(["cudadrv.test_cuda_libraries"], None, tmp_path / "out", jobs=1, limit=100)
    assert module.tests and not module.ended.startswith("not within")
    assert not any("rgpu" in test.reason for test in module.tests)


def test_every_listed_reason_is_of_tests_that_exist() -> None:
    names = {name.partition(".")[2] for name in numba_cuda.modules()}
    listed = {pattern.split(".")[1] for known in numba_reasons.KNOWN for pattern in known.tests}
    assert listed <= names
