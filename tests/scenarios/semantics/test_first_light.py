"""An unmodified program on a remote session: it runs, it moves, it outlives its server."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, LocalPool, VerbError
from tests.support.pools.staged import line as ours
from tests.support.pools.sweep import SWEEP

OTHER = {"node-a": "node-b", "node-b": "node-c", "node-c": "node-a"}
LONG = 600 if SWEEP else 120  #: seconds for a program of a sweep, whose runs are longer and whose jobs are many


def test_runs_and_waits_rarely(pool: LocalPool) -> None:
    """The heat example waits fewer than 3 times for each time step it launches."""
    steps, began = 3000, time.monotonic()
    program = pool.heat("awaited", steps=steps, report=10, rest=0)
    program.wait_lines(20)
    row = pool.session("awaited")
    assert {"session", "state", "host", "epoch", "memory_bytes", "calls", "awaited_calls", "pid",
            "worker_pid"} <= set(row)
    program.finish()
    row = pool.session("awaited")
    assert 0 < row["exchanged_calls"] <= row["awaited_calls"] < 3 * steps
    assert row["calls"] > steps
    waits = row["waits"]  # also of a program that has ended
    assert 0 < sum(call["count"] for call in waits.values()) <= row["awaited_calls"]
    assert waits["memcpy_d2h"]["count"] >= 20 and 0 < waits["memcpy_d2h"]["seconds"] < time.monotonic() - began


def command(example: str, scale: float = 1.0) -> tuple:
    """An example that runs for some seconds on the cpu device; ``scale`` times as long."""
    line = {"heat": ("heat.py", "--n", "192", "--steps", int(12000 * scale), "--report", "50"),
            "numba_life": ("numba_life.py", "--n", "64", "--steps", int(5000 * scale)),
            "cudart_saxpy": ("cudart_saxpy.py", "--n", "262144", "--rounds", int(8000 * scale))}[example]
    return (sys.executable, EXAMPLES / line[0], *line[1:])


FIELDS = {"outcome", "reason", "from", "to", "epoch", "downtime_ms", "total_ms", "rounds", "pages_total", "pages_sent",
          "bytes_sent", "verified"}


@pytest.mark.parametrize("example", ["heat", pytest.param("numba_life", marks=pytest.mark.slow)])
def test_examples_are_deterministic_and_move(pool: LocalPool, example: str, tmp_path: Path) -> None:
    line, released = [str(part) for part in command(example, 0.4)], tmp_path / "released"
    first = pool.run(*line, name=f"{example}-still").finish()
    moved = pool.run(*ours("held", released, 20, 0.02, *line[1:]), name=f"{example}-moved")
    moved.wait_lines(8)
    host = pool.wait_state(moved.name, "running")["host"]
    move = pool.rgpu("migrate", moved.name, OTHER[host])
    assert move["outcome"] == "committed" and move["verified"] is True
    assert set(move) >= FIELDS
    released.touch()
    assert moved.finish() == first


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_work_is_under_way_and_moves(pool: LocalPool) -> None:
    """The example that gives all its launches at once, and waits."""
    for scale in (1, 3, 9):  # on a busy machine a command may take longer than the program
        first = pool.run(*command("cudart_saxpy", scale), name=f"saxpy-still-{scale}").finish()
        moved = pool.run(*command("cudart_saxpy", scale), name=f"saxpy-moved-{scale}")
        moved.wait_lines(1)
        host = pool.wait_state(moved.name, "running")["host"]
        try:
            move = pool.rgpu("migrate", moved.name, OTHER[host])
        except VerbError as error:
            assert pool.ends(moved.name), error
            assert moved.finish() == first
            continue
        assert move["outcome"] == "committed" and move["verified"] is True
        assert set(move) >= FIELDS
        assert moved.finish() == first
        return
    pytest.fail("the program always ended before it could be moved")


@pytest.mark.slow
@pytest.mark.timeout(3600 if SWEEP else 900)
@pytest.mark.parametrize("example", ["heat", pytest.param("numba_life", marks=pytest.mark.slow),
                                     pytest.param("cudart_saxpy", marks=pytest.mark.slow)])
def test_moves_at_random_moments(pool: LocalPool, example: str) -> None:
    """Moves to and fro while it computes; the digest does not change. 50 of each example in a sweep."""
    line = command(example, 4.0 if SWEEP else 1.5)  # more moves of each run, where there are many
    undisturbed = pool.run(*line, name=f"{example}-not-moved").finish(LONG)
    moves, done, run = 50 if SWEEP else 2, 0, 0
    chance = random.Random(20)
    while done < moves:
        run += 1
        program = pool.run(*line, name=f"{example}-wander-{run}")
        program.wait_lines(1)
        pool.wait_state(program.name, "running")
        while program.process.poll() is None and done < moves:
            time.sleep(chance.random() * 0.4)
            row = pool.session(program.name)
            if row["state"] != "running":
                break
            try:
                result = pool.rgpu("migrate", program.name, OTHER[row["host"]])
            except VerbError as error:
                # The program may end while it is asked: nothing else may go wrong.
                assert pool.ends(program.name), error
                break
            assert result["outcome"] == "committed", result
            done += 1
        assert program.finish(LONG) == undisturbed
    assert done == moves


@pytest.mark.parametrize("checkpoint", [pytest.param(False, marks=pytest.mark.slow), True])
def test_worker_killed(pool: LocalPool, undisturbed: str, checkpoint: bool) -> None:
    """kill -9 of the worker, without and with a checkpoint: its node brings it back."""
    program = pool.heat(f"worker-{checkpoint}")
    program.wait_lines(3)
    if checkpoint:
        checkpoint = pool.rgpu("checkpoint", program.name)
        assert checkpoint["position"] > 0 and checkpoint["pages"] > 0
    before = pool.session(program.name)
    os.kill(before["worker_pid"], signal.SIGKILL)
    assert program.finish() == undisturbed
    assert pool.session(program.name)["epoch"] > before["epoch"]


def test_a_worker_that_nothing_holds_is_killed(tmp_path: Path, undisturbed: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no control groups its node tells of its death as anywhere else, before an agent misses it."""
    monkeypatch.setenv("RGPU_BOX", "off")
    with LocalPool(tmp_path / "plain", nodes=2, lease=5.0) as pool:
        program = pool.heat("plain")
        program.wait_lines(3)
        before = pool.session("plain")
        assert "memory" not in before["box"]
        os.kill(before["worker_pid"], signal.SIGKILL)
        assert program.finish() == undisturbed
        reasons = [row["reason"] for row in pool.rgpu("history", "plain") if row["decision"] == "recover"]
        assert len(reasons) == 1 and "died" in reasons[0], reasons


def test_where_a_worker_died_is_known(pool: LocalPool) -> None:
    """Not where it said last, a second ago: a session that goes on between its losses is not one that always dies."""
    program = pool.heat("where", steps=200_000, report=10, rest=0)
    row = pool.wait_state("where", "running")
    reports = len(program.lines)
    for _ in range(3):
        program.wait_lines(reports + 20)
        reports = len(program.lines)
        os.kill(row["worker_pid"], signal.SIGKILL)
        row = pool.wait_state("where", "running", epoch=row["epoch"] + 1)
        died = [json.loads(line) for path in pool.folder.rglob("*.log") for line in path.read_text().splitlines()
                if '"a worker died"' in line]
        position = max(entry["position"] for entry in died if entry["session"] == "where")
        assert position >= 10 * reports, "each report comes behind the launches of its steps"
    program.stop()


def test_whole_node_killed(fresh_pool: LocalPool, undisturbed: str) -> None:
    pool = fresh_pool
    program = pool.heat("node")
    program.wait_lines(3)
    row = pool.session("node")
    node = pool.node(row["host"])
    for pid in (node["pid"], row["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    after = pool.wait_state("node", "running", not_on=row["host"])
    assert after["epoch"] > row["epoch"]
    assert program.finish() == undisturbed


def test_daemon_restarts_under_its_worker(tmp_path: Path, heat_digest: Callable[..., str]) -> None:
    """kill -9 of the daemon alone; a new one adopts the worker within the lease."""
    with LocalPool(tmp_path, nodes=3, lease=30) as pool:  # beside the rest of the suite a daemon took more than eight
        restarted_daemon_adopts(pool, heat_digest(steps=20000))


def restarted_daemon_adopts(pool: LocalPool, expected: str) -> None:
    program = pool.heat("adopted", steps=20000)
    program.wait_lines(3)
    row = pool.session("adopted")
    node = pool.node(row["host"])
    os.kill(node["pid"], signal.SIGKILL)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "rgpu.cli.main", "server", "--host", row["host"], "--lease", str(pool.lease)],
        env=pool.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: pool.node(row["host"]).get("pid") == daemon.pid, "the new daemon did not register", 90,
                   every=0.1)
        after = pool.wait_state("adopted", "running", 60)  # the worker says hello after the daemon has registered
        assert (after["host"], after["epoch"]) == (row["host"], row["epoch"]), pool.rgpu("history", "adopted")
        assert after["worker_pid"] == row["worker_pid"]
        assert program.finish() == expected
    finally:
        daemon.terminate()
        daemon.wait(20)


def test_exit_code_signals_and_output(pool: LocalPool) -> None:
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", "--", sys.executable, "-c",
                           "import sys; print(sys.stdin.read().upper(), end=''); sys.exit(7)"],
                          env=pool.environment, input="hello", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "HELLO")
    killed = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", "--", "sh", "-c", "kill -TERM $$"],
                            env=pool.environment, capture_output=True, timeout=60)
    assert killed.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_refusals(pool: LocalPool) -> None:
    """Each is refused before anything stops, with a reason and its class's exit code."""
    program = pool.heat("refused", steps=200000)
    program.wait_lines(1)
    here = pool.session("refused")["host"]
    for host, code, word in (("nowhere", 3, "nowhere"), (here, 5, "already")):
        with pytest.raises(VerbError) as error:
            pool.rgpu("migrate", "refused", host)
        assert (error.value.code, word in error.value.text) == (code, True), error.value.text
    with pytest.raises(VerbError) as error:
        pool.rgpu("migrate", "nobody", here)
    assert error.value.code == 3 and "nobody" in error.value.text
    taken = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", "--name", "refused", "--", sys.executable,
                            str(EXAMPLES / "heat.py"), "--n", "32", "--steps", "1"], env=pool.environment,
                           capture_output=True, text=True, timeout=60)
    assert taken.returncode != 0 and "refused" in taken.stderr
    assert pool.session("refused")["state"] == "running"
    pool.rgpu("kill", "refused")
    assert program.process.wait(30) != 0


def test_no_pool_no_key(pool: LocalPool, tmp_path) -> None:
    """One line that says what to do."""
    environment = {**pool.environment, "RGPU_POOL": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "ps"], env=environment, capture_output=True,
                          text=True)
    assert done.returncode == 3 and "rgpu up" in done.stderr and done.stderr.count("\n") == 1
