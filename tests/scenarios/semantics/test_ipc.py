"""Processes of a run that share device memory and events by handle (CUDA IPC), on a real pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, Program, VerbError

PROGRAM = Path(__file__).parents[1] / "programs" / "ipc.py"
EVENTS = PROGRAM.with_name("ipc_events.py")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("ipc"), nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> str:
    return subprocess.run([sys.executable, PROGRAM, "expected"], capture_output=True, text=True,
                          check=True).stdout.strip()


def begin(pool: LocalPool, mode: str, name: str) -> Program:
    return pool.run(sys.executable, str(PROGRAM), mode, str(pool.folder / f"{name}.go"), name=name)


def go_on(pool: LocalPool, name: str) -> None:
    (pool.folder / f"{name}.go").touch()


def done(program: Program) -> list[str]:
    assert program.process.wait(90) == 0, program.errors
    return program.lines


def open_memory(pid: int) -> int:
    """How many descriptors of shared device memory a process has."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if
             os.path.lexists(f"/proc/{pid}/fd/{fd}")]
    return sum("rgpu-alias" in link for link in links)


def test_each_works_in_the_others_memory(pool: LocalPool, expected: str) -> None:
    assert done(begin(pool, "exchange", "exchange")) == [expected, "end 0"]


def test_handles_that_open_nothing(pool: LocalPool) -> None:
    assert done(begin(pool, "wrong", "wrong")) == [
        "own 201", "flags 1", "nothing 1", "flipped 1", "pooled 1", "host 1", "imported 1 1", "inside True",
        "again True 0", "range True", "freed 1", "reused 1 True", "closed 0 0 1 1", "end 0"]


def test_who_shares_is_pinned_and_ps_says_with_whom(pool: LocalPool, expected: str) -> None:
    program = begin(pool, "hold", "held")
    program.wait_lines(1)
    for name, other in (("held", "held/2"), ("held/2", "held")):
        row = pool.session(name)
        assert f"shares device memory or events with session {other} (CUDA IPC)" in row["note"]
        for verb in (("migrate", name, "node-b"), ("migrate", name, "node-b", "--mode", "replay"),
                     ("checkpoint", name)):
            with pytest.raises(VerbError, match=f"session {other} ") as caught:
                pool.rgpu(*verb)
            assert caught.value.code == 5
    eventually(lambda: pool.session("held")["exposure"] == "unprotected", lambda: pool.session("held"), 20, every=0.2)
    workers = [pool.session(name)["worker_pid"] for name in ("held", "held/2")]
    if os.geteuid() == 0:  # nobody else may look into a worker
        assert [open_memory(pid) for pid in workers] == [2, 2], "its own memory; that of others is mapped"
    go_on(pool, "held")
    assert done(program) == ["holding", expected, "end 0"]
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), lambda: workers, 20)


@pytest.mark.parametrize("lost", ["", "/2"])
def test_a_lost_worker_ends_both_with_the_reason(pool: LocalPool, lost: str) -> None:
    name = "lost" if not lost else "lost-other"
    program = begin(pool, "hold", name)
    program.wait_lines(1)
    os.kill(pool.session(f"{name}{lost}")["worker_pid"], signal.SIGKILL)
    assert program.process.wait(60) == 1
    assert program.lines == ["holding"], "no result comes of it"
    for one, other in ((name, f"{name}/2"), (f"{name}/2", name)):
        row = pool.wait_state(one, "failed", not_on="any")
        assert f"shares device memory with {other} (CUDA IPC)" in row["reason"]
        told = [entry["reason"] for entry in pool.rgpu("history", one) if entry["decision"] == "fail"]
        assert len(told) == 1 and f"shares device memory with {other}" in told[0]
    killed, taken = (name, f"{name}/2") if not lost else (f"{name}/2", name)
    assert f"shared device memory with session {killed}, whose worker was lost" in pool.session(taken)["reason"]
    assert any("shares device memory" in line for line in program.errors)


@pytest.mark.parametrize(("mode", "wanted"), [
    ("order", None), ("late", ["asked 600 600", "found 7 0"]),
    ("wrong", ["plain 400 timed 1", "own 201 nothing 1 memory 1", "record 801 elapsed 400 handle 400", "open 1 open 0",
               "open 1 destroyed 0 400"])])
def test_events_order_the_work_of_both(pool: LocalPool, mode: str, wanted: list[str] | None) -> None:
    if wanted is None:
        wanted = subprocess.run([sys.executable, EVENTS, "expected"], capture_output=True, text=True,
                                check=True).stdout.split()
    assert done(pool.run(sys.executable, str(EVENTS), mode, name=f"events-{mode}")) == [*wanted, "end 0"]


def test_memory_goes_by_descriptor(pool: LocalPool) -> None:
    """Of cuMemCreate: counted once, mapped where each wants it, there as long as one of them has it."""
    program = pool.run(sys.executable, str(PROGRAM.with_name("ipc_handles.py")), name="handles")
    assert done(program) == [
        "unmapped 801", "wrong 1 1 1 1", "own [11]", "child [11] [11, 22, 33] True True 64", "parent [11, 22, 33]",
        "kept [11, 22, 33]", "gone 1", "end 0"]


def test_memory_of_a_pool(pool: LocalPool) -> None:
    """Pointers of a pool that was made for it: opened through its descriptor, freed by each for itself."""
    program = pool.run(sys.executable, str(PROGRAM.with_name("ipc_pools.py")), name="pools")
    assert done(program) == [
        "wrong 1 1 1 1 1 1", "child [11] [12] [13] True", "not so 1 1 1 1", "parent [11, 22] [12, 33] [13]",
        "kept [11, 22]", "gone 1 1", "third [13]", "end 0"]


def test_another_run_of_the_user_may_open_it_here_and_not_from_another_node(pool: LocalPool) -> None:
    exporter = begin(pool, "export", "exporter")
    exporter.wait_lines(1)
    here = pool.session("exporter")["host"]
    (elsewhere,) = {"node-a", "node-b"} - {here}
    handle = exporter.lines[0].split()[1]
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from common import start; from cuda.bindings import driver; "
            "start(); h = driver.CUipcMemHandle(); h.reserved = bytes.fromhex(sys.argv[2]); "
            "print(int(driver.cuIpcOpenMemHandle(h, 1)[0]))")
    for host, wanted in ((here, "0"), (elsewhere, "1")):
        opener = pool.run(sys.executable, "-c", code, str(PROGRAM.parent), handle, name=f"opener-{host}",
                          options=("--host", host))
        assert done(opener) == [wanted]
    go_on(pool, "exporter")
    assert done(exporter)[1:] == ["end 0"]


@pytest.mark.slow
def test_neither_a_restarted_daemon_nor_a_lost_host_makes_one_go_on_alone(tmp_path: Path, expected: str) -> None:
    """The workers stay tied while their daemon is away; with their host both are lost, and neither is brought back."""
    with LocalPool(tmp_path, nodes=2, lease=20) as pool:
        first = pool.run(sys.executable, str(PROGRAM), "hold", str(tmp_path / "first.go"), name="first",
                         options=("--host", "node-b"))
        first.wait_lines(1)
        os.kill(pool.node("node-b")["pid"], signal.SIGKILL)
        daemon = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "server", "--host", "node-b", "--lease", "20"],
            env=pool.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(lambda: pool.node("node-b").get("pid") == daemon.pid, "the new daemon did not register", 90,
                   every=0.1)
        assert "first/2" in pool.session("first")["note"]
        (tmp_path / "first.go").touch()
        assert done(first) == ["holding", expected, "end 0"]

        second = pool.run(sys.executable, str(PROGRAM), "hold", str(tmp_path / "second.go"), name="second",
                          options=("--host", "node-b"))
        second.wait_lines(1)
        rows = [pool.session(name) for name in ("second", "second/2")]
        for pid in (daemon.pid, *(row["worker_pid"] for row in rows)):
            os.kill(pid, signal.SIGKILL)
        for name, other in (("second", "second/2"), ("second/2", "second")):
            reason = pool.wait_state(name, "failed", seconds=90, not_on="any")["reason"]
            assert f"shares device memory with {other} (CUDA IPC)" in reason
        assert second.process.wait(60) == 1 and second.lines == ["holding"]
        daemon.wait(20)
