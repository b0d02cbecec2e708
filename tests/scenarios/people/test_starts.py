"""Nothing starts that cannot run: what is refused is refused before the program, in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.session.errors import NotFound, Refused
from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, ROOT, LocalPool

PROGRAMS = Path(__file__).parents[1] / "programs"
HEAT = (sys.executable, str(EXAMPLES / "heat.py"), "--n", "96", "--steps", "12000", "--report", "50")
#: Starts, says so, and uses the GPU only when it is told to.
WAITS = 'touch "$0.started"; while [ ! -e "$0" ]; do sleep 0.1; done; exec "$@"'


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("people"), nodes=2, lease=8.0) as running:
        yield running


def run(pool: LocalPool, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", *arguments], cwd=ROOT, env=pool.environment,
                          capture_output=True, text=True, timeout=timeout)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("options", "error", "said"), [
    (("--memory", "1TB"), Refused, "the largest that would fit is 8192 MiB"),
    (("--host", "node-x"), NotFound, "no host is called 'node-x'; the pool has: node-a, node-b"),
    (("--gpu-model", "B300"), Refused, "B300"),
])
def test_what_cannot_be_placed_is_not_started(pool: LocalPool, tmp_path: Path, options: tuple[str, ...],
                                              error: type[Exception], said: str) -> None:
    done = run(pool, "--name", "never", *options, "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == error.exit_code, done.stderr  # type: ignore[attr-defined]
    (line,) = done.stderr.splitlines()
    assert line.startswith("rgpu: ") and said in line
    assert not (tmp_path / "ran").exists() and done.stdout == ""
    lazy = run(pool, "--name", "lazy", "--lazy", *options, "--", "touch", str(tmp_path / "ran"))
    assert (lazy.returncode, lazy.stderr) == (0, "") and (tmp_path / "ran").exists()


@pytest.mark.timeout(120)
def test_a_plain_run_ends_as_its_program_does(pool: LocalPool) -> None:
    """Read at the entrance or by click (`--priority 0` is the default): the same ends, also without any output."""
    ends = {"echo out; echo err >&2; exit 7": (7, "out\n", "err\n"), "kill -TERM $$": (-15, "", "")}
    for script, end in ends.items():
        for options in ([], ["--priority", "0"]):
            done = run(pool, *options, "--", "sh", "-c", script)
            assert (done.returncode, done.stdout, done.stderr) == end
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "rgpu.cli.main", "run", "--",
                             "sh", "-c", "exit 5"], cwd=ROOT, env=pool.environment, timeout=60)
    assert closed.returncode == 5


@pytest.mark.timeout(120)
def test_memory_for_answers_is_mapped_without_filling_page_tables(pool: LocalPool) -> None:
    """The shim maps it in the thread that wakes waiting calls: 35 ms for 288 MiB between a program's first event and
    its first kernel were seen on a GPU (the compatibility suite's cpp-events)."""
    code = """
import time
from cuda.bindings import driver as d
def check(result): assert not int(result[0]), result; return result[1] if len(result) == 2 else None
check(d.cuInit(0)); check(d.cuCtxSetCurrent(check(d.cuDevicePrimaryCtxRetain(0))))
memory, back, entry = check(d.cuMemAlloc(4096)), bytearray(4096), []
while not entry:
    check(d.cuMemcpyDtoH(back, memory, 4096)); time.sleep(0.05)
    lines = list(open("/proc/self/smaps"))
    entry = [at for at, line in enumerate(lines) if "/memfd:rgpu-answers" in line]
print(*[line.split()[1] for line in lines[entry[0] + 1:] if line.startswith(("Size:", "Rss:"))][:2])
"""
    done = run(pool, "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    size, resident = map(int, done.stdout.split())
    assert size >= 16 << 10 and resident < size // 4, done.stdout


@pytest.mark.timeout(120)
def test_a_lazy_program_that_is_refused_hears_it_once(pool: LocalPool) -> None:
    code = "from cuda.bindings import driver; print(driver.cuInit(0))"
    done = run(pool, "--name", "too-lazy", "--lazy", "--memory", "1TB", "--", sys.executable, "-c", code)
    assert done.returncode == 0 and "NO_DEVICE" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("rgpu: no session: ") and "the largest that would fit is 8192 MiB" in line


@pytest.mark.timeout(180)
def test_in_a_full_pool_nothing_starts_and_the_queue_waits_before_the_start(pool: LocalPool, tmp_path: Path) -> None:
    holders = [pool.run("sleep", "600", name=f"holds-{host}", options=("--memory", "8GiB", "--host", host))
               for host in ("node-a", "node-b")]
    for holder in holders:
        pool.wait_state(holder.name, "running", 60)
    full = run(pool, "--name", "full", "--", "touch", str(tmp_path / "ran"))
    assert full.returncode == Refused.exit_code and len(full.stderr.splitlines()) == 1, full.stderr
    assert not (tmp_path / "ran").exists()
    waiting = pool.run("touch", str(tmp_path / "ran"), name="waits", options=("--queue",))
    eventually(lambda: waiting.errors)
    assert not (tmp_path / "ran").exists()
    pool.rgpu("kill", "holds-node-a")
    assert waiting.process.wait(60) == 0 and (tmp_path / "ran").exists()
    row = pool.session("waits")
    assert row["state"] == "ended" and "without using a GPU" in row["reason"]
    for holder in holders:
        holder.stop()


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_session_moves_before_its_program_uses_it(pool: LocalPool, tmp_path: Path,
                                                    heat_digest: Callable[..., str]) -> None:
    """Its client is no silent one meanwhile, however short the grace is."""
    go = tmp_path / "go"
    program = pool.run("sh", "-c", WAITS, str(go), *HEAT, name="late", options=("--host", "node-a", "--client-grace",
                                                                               "4s"))
    eventually(lambda: Path(f"{go}.started").exists(), within=60)
    assert pool.session("late")["state"] == "running"
    assert pool.rgpu("migrate", "late", "node-b")["outcome"] == "committed"
    begun = time.monotonic()
    while time.monotonic() - begun < 25:  # longer than a worker without agent is given
        row = pool.session("late")
        assert (row["state"], row["host"]) == ("running", "node-b"), row
        time.sleep(2)
    go.touch()
    assert program.finish() == heat_digest()


@pytest.mark.timeout(120)
def test_out_of_quota_is_one_line_with_what_to_do(pool: LocalPool) -> None:
    done = run(pool, "--name", "small", "--memory", "64MiB", "--", sys.executable, str(PROGRAMS / "over_quota.py"))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "30.0 MiB were asked for, and 40.0 MiB of the session's quota of 64.0 MiB are in use" in line
    assert "rgpu run --memory SIZE" in line


@pytest.mark.timeout(180)
def test_ended_sessions_say_how_when_and_why(pool: LocalPool) -> None:
    """Also of a program that a signal ended, and found by its label."""
    label = ("--label", "of=endings")
    for name, ends in (("exits", "raise SystemExit(7)"), ("dies", "import os; os.kill(os.getpid(), 9)")):
        code = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); from common import start; start(); {ends}"
        run(pool, "--name", name, *label, "--", sys.executable, "-c", code)
    killed = pool.run("sleep", "600", name="stopped", options=label)
    pool.wait_state("stopped", "running", 60)
    pool.rgpu("kill", "stopped")
    found: list[dict[str, Any]] = []

    def all_ended() -> bool:
        found[:] = pool.rgpu("ps", "--all", "--label", "of=endings", "--state", "ended")
        return len(found) == 3

    eventually(all_ended)
    rows = {row["session"]: row for row in found}
    killed.stop()
    assert {name: row["exit_code"] for name, row in rows.items()} == {"exits": 7, "dies": 137, "stopped": None}
    assert all(row["labels"] == {"of": "endings"} and row["created"] < row["ended"] < time.time() + 1
               and 0 < row["lasted_s"] < 120 for row in rows.values())
    assert "killed" in rows["stopped"]["note"] and rows["exits"]["note"] == "the program ended"
    assert pool.rgpu("ps", "--label", "of=endings") == []
