"""The suite's runner itself, with programs that need no GPU, and with a real pool of a cpu device."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from tests.gpu.compat import Suite, chosen
from tests.gpu.suite import report
from tests.gpu.suite.admission import Turns, admissible, asked, card_memory
from tests.gpu.suite.execute import PROGRAMS, BuildError, Executor, Pool
from tests.gpu.suite.outputs import Run, close, compare, failure, judge_native, parse
from tests.gpu.suite.rows import ROWS, Part, Row
from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool

A, B = "a" * 64, "b" * 64


def said(text: str, status: int | None = 0, err: str = "") -> Run:
    return Run(status, 1.0, text, err)


def test_lines_are_read() -> None:
    printed = parse(f"digest {A}\ndigest {B} loss\nvalue x 1.5 tol 1e-3\nsays e CUDA error: x\nnote m 3 GiB\n"
                    "refused cudaMalloc error 801\nnoise\nvalue broken\nskip no FFT")
    assert printed.digests == {"#1": A, "loss": B} and printed.values == {"x": (1.5, 1e-3)}
    assert printed.says == {"e": "CUDA error: x"} and printed.notes == {"m": "3 GiB"}
    assert printed.refused == {"cudaMalloc": "error 801"} and printed.wrong == ["value broken"]
    assert printed.skip == "no FFT"


@pytest.mark.parametrize(("native", "remote", "result", "word"), [
    (f"digest {A}", f"digest {A}", "same", ""),
    (f"digest {A}", f"digest {B}", "FAIL", "digest #1"),
    (f"digest {A}\ndigest {A} x", f"digest {A}", "FAIL", "remote none"),
    ("value v 1.0 tol 1e-3", "value v 1.0005 tol 1e-3", "same", ""),
    ("value v 1.0 tol 1e-3", "value v 1.01 tol 1", "FAIL", "tolerance 0.001"),
    ("value v nan tol 1e-3", "value v 1.0 tol 1e-3", "FAIL", "nan"),
    ("says e one", "says e two", "FAIL", "'two'"),
    ("says e one\nnote m 1", "says e one\nnote m 2", "same", ""),
    ("nothing", "nothing", "native", "nothing to compare"),
    ("says e one\nvalue x", "says e one", "FAIL", "malformed"),
])
def test_verdicts(native: str, remote: str, result: str, word: str) -> None:
    verdict = compare(said(native), said(remote))
    assert verdict.result == result and word in verdict.text


def test_a_native_failure_does_not_count() -> None:
    verdict = judge_native(said("", 1, "x\nRuntimeError: numba and numpy\n"))
    assert verdict and verdict.result == "native" and "fails natively too" in verdict.text
    skipped = judge_native(said("skip no such backend", 77))
    assert skipped and (skipped.result, skipped.text) == ("skipped", "no such backend")


def test_a_remote_skip_is_a_failure() -> None:
    assert compare(said(f"digest {A}"), said("skip one GPU only", 77)).result == "FAIL"


def test_refusals_must_be_named() -> None:
    native, remote = "says managed 5", "refused managed error 801"
    named = said(remote, err="rgpu[1]: cuMemAllocManaged is not supported: it returns CUDA_ERROR_NOT_SUPPORTED")
    assert compare(said(native), named, "cuMemAllocManaged").result == "refused"
    assert compare(said(native), said(remote), "cuMemAllocManaged").result == "FAIL"
    assert compare(said(native), named).result == "FAIL"
    assert compare(said(native), said("", 1, named.err), "cuMemAllocManaged").result == "FAIL"


def test_failures_are_short_and_name_the_error() -> None:
    text = failure(said("", 1, "\n".join(["Traceback", *["  frame"] * 50, "ValueError: the reason",
                                          *["later noise"] * 30])))
    assert len(text.splitlines()) <= 5 and "ValueError: the reason" in text and "exit 1" in text
    told = failure(said("", 1, f'File "{Path(__file__)}", line 1\nFile "/a/lib/python3/site-packages/x/y.py", line 2'))
    assert '"tests/gpu/test_runner.py"' in told and '"x/y.py"' in told, "no path of this machine"
    assert failure(said("", -11)).startswith("signal 11") and "limit" in failure(said("", None))


def test_closeness() -> None:
    assert close(float("inf"), float("inf"), 0) and not close(float("inf"), 1, 1) and not close(float("nan"), 0, 1)
    assert close(0.0, 0.0, 0) and not close(1e-9, -1e-9, 1e-3)


# -- running ------------------------------------------------------------------------
FAKES = {
    "good": f"print('digest {A}')",
    "argued": "import sys, hashlib; print('digest', hashlib.sha256(sys.argv[1].encode()).hexdigest())",
    "differs": "import os, hashlib; "
               "print('digest', hashlib.sha256(str('RGPU_AGENT' in os.environ).encode()).hexdigest())",
    "fails": "import os, sys; print('says a b')\n"
             "if 'RGPU_AGENT' in os.environ: sys.exit('RuntimeError: only remotely')",
    "hangs": "import os, time, subprocess, sys\nprint('says a b', flush=True)\n"
             "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
             "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)",
    "random": "import os; print('digest', os.urandom(32).hex())",
    "cached": "import os; print('note cache', os.environ['TRITON_CACHE_DIR']); print('says mine', os.environ['MINE'])",
    "devices": "import os; print('says devices', os.environ.get('CUDA_VISIBLE_DEVICES'))",
    "driver": """
import ctypes, hashlib
d = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert d.cuInit(0) == 0
assert d.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and d.cuCtxSetCurrent(context) == 0
assert d.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4096)) == 0
assert d.cuMemsetD8_v2(pointer, ctypes.c_ubyte(7), ctypes.c_size_t(4096)) == 0
back = ctypes.create_string_buffer(4096)
assert d.cuMemcpyDtoH_v2(back, pointer, ctypes.c_size_t(4096)) == 0
print("digest", hashlib.sha256(back.raw).hexdigest())
""",
}


def make(folder: Path, *names: str, **options: object) -> Row:
    return Row("row", "fake", "a fake program", tuple(Part(name) for name in names), **options)  # type: ignore[arg-type]


@pytest.fixture
def executor(tmp_path: Path) -> Executor:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, code in FAKES.items():
        (programs / f"{name}.py").write_text(code)
    (tmp_path / "logs").mkdir()
    return Executor(tmp_path / "logs", programs)


def test_a_program_that_hangs_is_ended_with_its_children(executor: Executor, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    row = Row("row", "fake", "", (Part("hangs", (str(marker),)),), limit=6)
    began = time.monotonic()
    (run,) = executor.native(row)
    assert run.status is None and time.monotonic() - began < 40 and "says a b" in run.out
    state = Path(f"/proc/{marker.read_text()}/stat")
    eventually(lambda: not (state.exists() and ") Z " not in state.read_text()), "its child lives on", 5, every=0.05)


def test_parts_run_together_and_logs_are_kept(executor: Executor) -> None:
    row = Row("pair", "fake", "", (Part("good"), Part("argued", ("x",))))
    runs = executor.native(row)
    assert [run.status for run in runs] == [0, 0] and runs[0].out != runs[1].out
    assert sorted(p.name for p in executor.folder.glob("*.log")) == ["pair.1-good.native.log",
                                                                    "pair.2-argued-x.native.log"]


def test_each_side_has_caches_of_its_own(executor: Executor) -> None:
    (run,) = executor.native(make(executor.folder, "cached", environment={"MINE": "yes"}))
    printed = parse(run.out)
    assert "/native/" in printed.notes["cache"] and printed.says["mine"] == "yes"


def test_the_native_side_has_the_gpus_that_its_row_asks_for(executor: Executor) -> None:
    for gpus, seen in ((1, "0"), (2, "0,1")):
        (run,) = executor.native(make(executor.folder, "devices", gpus=gpus))
        assert parse(run.out).says["devices"] == seen


def test_a_program_that_does_not_compile(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    (executor.programs / "bad.cu").write_text("not C++")
    compiler = executor.programs / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'bad.cu(1): error: what is this' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{executor.programs}:/usr/bin:/bin")
    with pytest.raises(BuildError, match="what is this"):
        executor.native(make(executor.folder, "bad.cu"))
    result = Suite(executor, Pool({})).row(make(executor.folder, "bad.cu"))
    assert result.result == "native" and "what is this" in result.text


def test_rows_without_their_gpus_or_their_time_are_not_run(executor: Executor) -> None:
    suite = Suite(executor, Pool({}))
    assert suite.row(make(executor.folder, "good", gpus=2)).text == "needs 2 GPUs, this machine has 1"
    suite.deadline = 0.0
    assert suite.row(make(executor.folder, "good")).result == "not run"


@pytest.mark.timeout(150)
def test_rows_on_a_real_pool(executor: Executor, tmp_path: Path) -> None:
    """Equal, different, failing and undetermined rows, through `rgpu run`; and a driver call of a remote program."""
    with LocalPool(tmp_path / "p", nodes=1) as local:
        suite = Suite(executor, Pool(local.environment, "64MiB"), jobs=2)
        rows = [Row(name, "fake", name, (Part(name),), limit=40) for name in ("good", "differs", "fails", "random")]
        seen: list[str] = []
        results = {r.row: r for r in suite.run(rows, lambda result: seen.append(result.row))}
        assert sorted(seen) == sorted(results)
        assert {name: r.result for name, r in results.items()} == {
            "good": "same", "differs": "FAIL", "fails": "FAIL", "random": "undetermined"}
        assert "only remotely" in results["fails"].text and "digest #1" in results["differs"].text
        pair = suite.executor.remote(Row("pair", "fake", "", (Part("driver"), Part("driver"))), suite.pool)
        assert [run.status for run in pair] == [0, 0], pair
        assert pair[0].out == pair[1].out and parse(pair[0].out).digests


# -- side by side ---------------------------------------------------------------------
GIB = 1 << 30


def test_what_a_row_asks_a_card_for() -> None:
    sizes = {row.name: asked(row, None) for row in ROWS}
    assert sizes["cpp-graph"] == 16 * GIB
    assert {row.name: asked(row, None) // asked(row, row.memory) for row in ROWS} == dict.fromkeys(sizes, 1)
    two = Row("two", "fake", "", (Part("good"), Part("good")), memory="6GiB")
    assert asked(two, None) == 12 * GIB and asked(two, "1GiB") == 2 * GIB
    assert asked(Row("ranks", "fake", "", (Part("good"),), ranks=2, memory="4GiB"), None) == 8 * GIB


@pytest.mark.parametrize(("wanted", "running", "jobs", "card", "may"), [
    (16, [], 3, 78, True), (16, [16, 16], 3, 78, True), (16, [16, 16, 16], 3, 78, False), (32, [32], 4, 78, True),
    (16, [32, 32], 4, 78, False), (14, [32, 32], 4, 78, True), (100, [], 4, 78, True), (1, [100], 4, 78, False),
    (16, [78] * 2, 3, 0, True), (16, [78] * 3, 3, 0, False)])
def test_rows_are_admitted_while_they_fit_together(wanted: int, running: list[int], jobs: int, card: int,
                                                   may: bool) -> None:
    assert admissible(wanted, running, jobs, card) is may


def test_the_size_of_a_card_is_what_nodes_say() -> None:
    assert card_memory([]) == 0
    assert card_memory([{"devices": [{"total_memory": 5}, {"total_memory": 4}]}, {"devices": []}]) == 4


def test_every_row_has_its_turn_and_no_two_have_too_much() -> None:
    turns, running, most = Turns(3, 10), list[int](), list[tuple[int, int]]()

    def row(wanted: int) -> None:
        with turns.turn(wanted):
            running.append(wanted)
            most.append((len(running), sum(running)))
            time.sleep(0.002)
            running.remove(wanted)

    threads = [threading.Thread(target=row, args=(wanted,)) for wanted in [1, 2, 3, 4, 5, 9, 12] * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 56 and max(count for count, _ in most) in (2, 3)
    assert max(total for count, total in most if count > 1) <= 10


class Watched(Executor):
    """Notes how much the sessions of remote runs ask for together."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.running, self.most = list[int](), list[int]()

    def native(self, row: Row) -> list[Run]:
        return [said(f"digest {A}")]

    def remote(self, row: Row, pool: Pool) -> list[Run]:
        self.running.append(asked(row, pool.memory))
        self.most.append(sum(self.running))
        time.sleep(0.05)
        self.running.remove(asked(row, pool.memory))
        return [said(f"digest {A}")]


def test_rows_whose_sessions_do_not_fit_together_run_one_after_the_other(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    suite = Suite(watched, Pool({}), jobs=4, card=78 * GIB)
    rows = [Row(f"row-{number}", "fake", "", (Part("good"),), memory=size)
            for number, size in enumerate(["32GiB", "16GiB"] * 4)]
    assert [result.result for result in suite.run(rows)] == ["same"] * 8
    assert 32 * GIB < max(watched.most) <= 78 * GIB


def test_a_row_that_compares_times_runs_alone(tmp_path: Path) -> None:
    """A GPU that is shared is sliced: a kernel of 100 ms was 154 and 174 ms beside other rows."""
    watched = Watched(tmp_path)
    rows = [Row(f"row-{number}", "fake", "", (Part("good"),), memory="1GiB", alone=number in (2, 5))
            for number in range(8)]
    assert [result.result for result in Suite(watched, Pool({}), jobs=4).run(rows)] == ["same"] * 8
    assert watched.most[-2:] == [GIB, GIB] and max(watched.most) > GIB
    assert [row.name for row in ROWS if row.alone] == ["torch-ranks", "torch-ranks-captured", "cpp-events"]


# -- reports ------------------------------------------------------------------------
def test_reports(tmp_path: Path) -> None:
    good = report.Result("torch-a", "torch", "tensors", "same", native="runs", remote="runs", native_seconds=1.0,
                         remote_seconds=2.5)
    bad = report.Result("cpp-b", "cpp", "a|b", "FAIL", "exit 1 after 3 s\n" + "\n".join(f"line {i}" for i in range(9)))
    about = {"date": "2026-01-02", "gpus": ["H200"], "python": "3.12", "versions": {"torch": "2.11"}}
    assert len(report.line(bad).splitlines()) == 6 and "torch-a" in report.line(good)
    text = report.markdown([good, bad], about, "make compat")
    assert "| torch-a | tensors | runs, 1.0 s | runs, 2.5 s | same |" in text and "## torch (torch 2.11)" in text
    assert "FAIL: exit 1 after 3 s<br>line 0" in text and "2 rows: 1 same, 1 FAIL" in text
    report.save(tmp_path / "one.json", [good, bad], about)
    fixed = report.Result("cpp-b", "cpp", "a|b", "same")
    late = report.Result("torch-a", "torch", "tensors", "not run")
    rows, again = report.load(tmp_path / "one.json")
    merged = report.merged([rows, [fixed, late]], ["cpp-b", "torch-a"])
    assert [(r.row, r.result) for r in merged] == [("cpp-b", "same"), ("torch-a", "same")] and again["date"]


def test_every_row_has_its_program() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        for part in row.parts:
            name = part.program if part.program.endswith(".cu") else f"{part.program}.py"
            assert (PROGRAMS / name).is_file(), f"{row.name}: {name}"
    used = {part.program.removesuffix(".cu") for row in ROWS for part in row.parts}
    there = {path.stem for path in PROGRAMS.iterdir() if path.suffix in (".py", ".cu")} - {
        "common", "models", "jax_common", "core_common", "torch_moving"}
    assert used == there


def test_rows_are_chosen() -> None:
    names = [row.name for row in chosen(ROWS, ["jax", "torch-gpt2*"], ["jax-s*"])]
    assert "jax-jit" in names and "torch-gpt2-bf16" in names and "jax-scan" not in names
    assert sys.modules["tests.gpu.suite.rows"].TORCH["CUBLAS_WORKSPACE_CONFIG"]


def test_a_native_failure_of_many_lines_stays_within_its_row() -> None:
    failed = report.Result("row", "fake", "a fake program", "native", "fails natively too",
                           "Traceback |\n  File <x>\nKeyError: 'a'", "", 1.0)
    text = report.markdown([failed], {}, "make compat")
    assert "| row | a fake program | KeyError: 'a', 1.0 s | - | native: fails natively too |" in text.splitlines()
