"""What a program may observe, while its session is moved, killed and rebuilt under it (issue 2, SEMANTICS)."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.client.shim.handshake.conftest import stock_runtime
from tests.support.pools.pool import EXAMPLES, LocalPool, Program, VerbError
from tests.support.pools.staged import OTHER, Staged, line, run_to_end, wait_end

#: program → how its session is disturbed at each of its gates, in order
DISTURBED: dict[str, list[tuple[str, str]]] = {
    "handoff": [("1", "kill"), ("2", "move"), ("3", "kill")],
    "streams": [("events-4", "move"), ("legacy-5", "kill"), ("events-8", "kill"), ("legacy-9", "move")],
    "hostfuncs": [("between-1", "move"), ("inside-1", "kill"), ("between-2", "kill"), ("inside-2", "kill")],
    "pinned": [("busy-10", "move"), ("idle-15", "kill"), ("busy-20", "kill"), ("idle-25", "checkpoint")],
    "downloads": [("busy-3", "move"), ("idle-9", "kill"), ("busy-11", "kill"), ("busy-19", "copy"),
                  ("idle-25", "checkpoint"), ("busy-27", "replay"), ("busy-35", "kill"), ("busy-43", "kill")],
    "modules": [("7", "move"), ("12", "kill"), ("17", "checkpoint")],
    "graphs": [("3", "move"), ("6", "kill"), ("9", "checkpoint")],
    "textures": [("1", "move"), ("2", "kill"), ("3", "checkpoint"), ("4", "move"), ("5", "kill")],
    "managed": [("host", "move"), ("device", "kill"), ("both", "checkpoint"), ("busy", "copy"), ("list", "replay"),
                ("variable", "kill"), ("attached", "move")],
    "conditions": [("3", "copy"), ("5", "replay"), ("7", "kill"), ("9", "checkpoint")],
    "virtual": [("kept", "move"), ("overtaken", "kill"), ("both", "checkpoint")],
    "aliases": [("twice", "move"), ("thrice", "kill"), ("kept", "copy"), ("overtaken", "checkpoint"),
                ("released", "kill")],
    "registered": [("busy-3", "move"), ("idle-4", "kill"), ("busy-6", "kill"), ("idle-8", "checkpoint")],
    "hostmapped": [("host", "move"), ("busy", "kill"), ("both-1", "checkpoint"), ("both-2", "kill"),
                   ("unmapped", "copy")],
    "polled": [("running-6", "kill"), ("idle-10", "move"), ("idle-14", "checkpoint"), ("running-18", "kill")],
    "profiled": [("2", "move"), ("4", "kill"), ("6", "checkpoint")],
    "churn": [("80", "kill"), ("140", "move"), ("200", "kill")],
}


#: Tried when everything is asked for; each has a like among the others, or among the programs of the chaos.
SELDOM = {"handoff", "churn", "pinned", "hostfuncs", "virtual", "hostmapped"}


@pytest.mark.parametrize("program", [pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else [])
                                     for name in DISTURBED])
def test_moved_and_killed(pool: LocalPool, tmp_path: Path, program: str) -> None:
    """Each checks every byte of its own against a model on the host."""
    staged = Staged(pool, tmp_path, program)
    before = epoch = 1
    for gate, how in DISTURBED[program]:
        before = staged.disturb(gate, how)["epoch"]
        assert before >= epoch
        epoch = before + 1
    staged.finish()
    assert pool.session(program)["epoch"] >= epoch
    assert "divergence" not in (pool.folder / "agent.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["move", "kill", "checkpoint"])
@pytest.mark.parametrize("program", DISTURBED)
def test_every_gate_every_way(pool: LocalPool, tmp_path: Path, program: str, how: str) -> None:
    staged = Staged(pool, tmp_path, program, name=f"{program}-{how}")
    for gate, _ in DISTURBED[program]:
        if how == "kill" or not gate.startswith(("inside", "running")):  # else nothing drains: it waits for the CPU
            staged.disturb(gate, how)
        else:
            staged.open(gate)
    staged.finish()


def test_a_host_function_that_does_not_return_holds_up_a_move_not_the_program(pool: LocalPool, tmp_path: Path) -> None:
    """Work that does not drain: the move is given up, the session runs on where it was (SEMANTICS 19)."""
    staged = Staged(pool, tmp_path, "hostfuncs", name="standstill")
    staged.open("between-1", "between-2", "inside-2")
    row = staged.reach("inside-1")
    result = move_or_error(pool, "standstill", OTHER[row["host"]])
    assert "a host function" in result and "has not ended" in result, result
    after = pool.session("standstill")
    assert (after["host"], after["state"], after["worker_pid"]) == (row["host"], "running", row["worker_pid"])
    staged.open("inside-1")
    staged.finish()


def move_or_error(pool: LocalPool, name: str, host: str) -> str:
    """Why a move did not happen."""
    try:
        result = pool.rgpu("migrate", name, host)
    except VerbError as error:
        return error.text
    assert result["outcome"] != "committed", result
    return str(result["reason"])


# -- processes --------------------------------------------------------------------------
def test_forked_and_executed_children(pool: LocalPool) -> None:
    """A session for each process that uses CUDA itself, by the order in which they do; none for a late fork."""
    ended = run_to_end(pool, "children", name="family")
    pids = next(text for text in ended.lines if text.startswith("pids")).split()[1:]
    rows = {row["session"]: row for row in pool.rgpu("ps", "--all") if row["session"].startswith("family")}
    assert list(sorted(rows)) == ["family", "family/2", "family/3"]
    assert [str(rows[name]["pid"]) for name in sorted(rows)] == pids
    assert {row["state"] for row in rows.values()} == {"ended"}


# -- limits and errors --------------------------------------------------------------------
def test_quota_is_exact_and_nothing_is_awaited(pool: LocalPool) -> None:
    run_to_end(pool, "quota", name="quota", options=("--memory", "64MiB"))
    row = pool.session("quota")
    assert row["calls"] > 2000 and row["awaited_calls"] <= 2, row


def test_arguments_that_are_wrong(pool: LocalPool) -> None:
    """Each gives the driver's code at the call; the worker notices nothing."""
    run_to_end(pool, "wild")
    logs = "\n".join(pool.rgpu("logs", "wild", "-n", "1000")["lines"])
    assert "our bug" not in logs and "Traceback" not in logs, logs[-3000:]


@pytest.mark.parametrize("way", ["null", "low", "client", "read", "freed", "past", "misaligned"])
def test_a_kernel_that_faults(pool: LocalPool, way: str) -> None:
    """An illegal address at the next wait, for good; the program's error alone, with the kernel's name in the logs."""
    run_to_end(pool, "faults", way, name=f"fault-{way}")
    logs = "\n".join(pool.rgpu("logs", f"fault-{way}")["lines"])
    assert "Traceback" not in logs, logs[-3000:]


def test_a_fault_touches_no_other_session(pool: LocalPool, tmp_path: Path) -> None:
    neighbour = Staged(pool, tmp_path, "steady", name="neighbour")
    row = neighbour.reach("1")
    run_to_end(pool, "faults", "low", name="fault-beside", options=("--host", row["host"]))
    assert pool.session("fault-beside")["epoch"] == 1, "the program's own error is no loss to recover from"
    node = pool.node(row["host"])
    assert (node["state"], [device["healthy"] for device in node["devices"]]) == ("ready", [True])
    neighbour.open("1", "2", "3", "end")
    neighbour.finish()
    assert pool.session("neighbour")["epoch"] == 1


def test_modules_that_cannot_run(pool: LocalPool) -> None:
    """They fail at load, with line and instruction in the JIT log and in `rgpu logs`."""
    ended = run_to_end(pool, "unrunnable")
    number = next(text.split()[1] for text in ended.lines if text.startswith("line "))
    logs = "\n".join(pool.rgpu("logs", "unrunnable", "-n", "1000")["lines"])
    assert f"line {number}" in logs and "mma.sync.aligned.m16n8k8" in logs, logs[-3000:]


# -- events ---------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["move", "kill", "checkpoint"])
def test_time_goes_on(pool: LocalPool, tmp_path: Path, how: str) -> None:
    """Elapsed times are positive, grow and add up, across moves and deaths; queries are not awaited."""
    staged = Staged(pool, tmp_path, "timing", name=f"timing-{how}")
    staged.disturb("idle-2", how)
    staged.disturb("busy-2", how)
    staged.open("idle-3", "busy-3")
    assert wait_end(staged.program) == 0 and "ok" in staged.lines, (staged.lines, staged.errors[-10:])
    polls = int(next(text.split()[1] for text in staged.lines if text.startswith("polls")))
    row = pool.session(staged.name)
    assert polls > 50 and row["awaited_calls"] < 50, (polls, row)
    if how != "kill":  # the time of a finished event moves with it; only a replay from the start measures anew
        was = next(match for text in staged.lines if (match := re.match(r"was (\S+) is (\S+)", text)))
        assert was.group(1) == was.group(2)


# -- the examples ------------------------------------------------------------------------------
def moved_and_killed(pool: LocalPool, program: Program) -> int:
    """Move it, kill its worker; the epoch until then."""
    row = pool.wait_state(program.name, "running")
    moved = pool.rgpu("migrate", program.name, OTHER[row["host"]])
    assert moved["outcome"] == "committed" and moved["verified"] is True
    row = pool.wait_state(program.name, "running")
    os.kill(row["worker_pid"], signal.SIGKILL)
    return int(row["epoch"])


@pytest.mark.slow  # of numba there is a program in the chaos of each run
def test_numba_moved_and_killed(pool: LocalPool, tmp_path: Path) -> None:
    """Moved, then its worker killed, while calls go on: the digest of an undisturbed run."""
    command = (str(EXAMPLES / "numba_life.py"), "--n", "64", "--steps", "2000")
    released = tmp_path / "released"
    program = pool.run(*line("held", released, 16, 0.02, *command), name="numba")
    program.wait_lines(10)
    epoch = moved_and_killed(pool, program)
    pool.wait_state("numba", "running", epoch=epoch + 1)
    released.touch()
    assert program.finish() == pool.run(sys.executable, *command, name="numba-still").finish()


def test_arrays_of_the_stock_runtime(pool: LocalPool) -> None:
    """cudaMallocArray, cudaMemcpy2DToArray, texture and surface objects; what is wrong has an error of its own."""
    ended = run_to_end(pool, "textures_cudart", name="textures-cudart")
    assert ended.lines[0] == "wrong {'no channels': 20, 'beyond': 1, 'pitch': 12, 'not one': 400}"


def test_managed_memory_of_the_stock_runtime(pool: LocalPool) -> None:
    """cudaMallocManaged, __managed__ variables, prefetch, advice, attachment; what is wrong has an error of its own."""
    ended = run_to_end(pool, "managed_cudart", name="managed-cudart")
    assert ended.lines[0] == "wrong {'flags': 1, 'too much': 2, 'not managed': 1, 'no stream': 1}"


def test_a_touch_while_its_session_recovers_waits_and_one_of_a_lost_session_is_a_fault(
        pool: LocalPool, tmp_path: Path) -> None:
    """Both are at the gate where the device alone has what they look at next; neither hangs."""
    kept = Staged(pool, tmp_path, "managed", name="managed-kept")
    lost = Staged(pool, tmp_path, "managed", name="managed-lost", options=("--recover", "off"))
    for staged in (kept, lost):
        staged.open("host", "device", "both")
        row = staged.reach("busy")
        if staged is kept:
            before = row
        os.kill(row["worker_pid"], signal.SIGSTOP)  # the touch is under way, and gets no answer
        staged.open("busy", "list", "variable", "attached")
    time.sleep(0.5)
    assert kept.program.process.poll() is None and "gate list" not in kept.lines
    for staged in (kept, lost):
        os.kill(pool.session(staged.name)["worker_pid"], signal.SIGKILL)
    assert lost.program.process.wait(60) in (139, -signal.SIGSEGV, 128 + signal.SIGSEGV), lost.errors[-5:]
    assert any("managed memory at 0x2" in text and "the session is lost" in text for text in lost.errors), lost.errors
    kept.finish()
    row = pool.session("managed-kept")
    assert row["epoch"] > before["epoch"] and row["managed_faults"] >= 10 and row["managed_waiting"] == 0


@pytest.mark.parametrize("runtime", [pytest.param("12.8.90", marks=pytest.mark.slow), "13.0.96"])
def test_cudart_moved_and_killed(pool: LocalPool, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with all its work given at once; on a busy machine commands may take longer than that work."""
    monkeypatch.setitem(pool.environment, "CUDART", str(stock_runtime(runtime)))
    for rounds in (12000, 48000, 192000):
        command = (sys.executable, str(EXAMPLES / "cudart_saxpy.py"), "--n", "65536", "--rounds", str(rounds))
        program = pool.run(*command, name=f"cudart-{runtime}-{rounds}")
        program.wait_lines(1)
        try:
            epoch = moved_and_killed(pool, program)
        except (AssertionError, ProcessLookupError, VerbError):
            if not pool.ends(program.name):
                raise
            continue
        digest, ended = program.finish(), pool.session(program.name)["epoch"]
        if ended > epoch:  # a program that had its last answer needs no other worker
            assert ended == epoch + 1
            break
    else:
        pytest.fail("every program ended before its worker could be killed")
    assert digest == pool.run(*command, name=f"cudart-{runtime}-still").finish()
    assert program.lines[0] == f"runtime {runtime.rpartition('.')[0]}"
