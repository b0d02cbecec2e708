"""Runs that outlive their terminal: started, followed, signalled, waited for; what is local needs no pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rgpu.session.errors import AlreadyExists, NotFound, Refused, TimedOut, UsageError
from tests.support import user_manager
from tests.support.detached import RGPU, ask, detach, in_terminal, output, read_terminal, record, says
from tests.support.eventually import eventually
from tests.support.pools.pool import EXAMPLES, HELD, ROOT, LocalPool
from tests.support.processes import state

HEAT = (sys.executable, "-W", "ignore", str(HELD), "/never released", "0", "0.4", str(EXAMPLES / "heat.py"),
        "--n", "96", "--steps", "12000", "--report", "50")
#: Writes its number of signals; ends by TERM with 7.
COUNTS = """import signal, sys, time
def count(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    number == signal.SIGTERM and sys.exit(7)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, count)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("detached"), nodes=3, lease=8.0) as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_it_outlives_its_terminal_a_move_and_a_kill(pool: LocalPool, heat_digest: Callable[..., str]) -> None:
    script = f'{" ".join(RGPU)} run -d --name heat --host node-a -- "$@"; echo "code $?"; sleep 600'
    pid, master = in_terminal(pool, "sh", "-c", script, "sh", *HEAT)
    assert b"heat" in read_terminal(master, b"code 0")
    os.close(master)  # SIGHUP to the shell
    os.waitpid(pid, 0)
    says(pool, "heat", "step")
    assert pool.rgpu("migrate", "heat", "node-b")["outcome"] == "committed"
    row = pool.session("heat")
    assert (row["detached"], row["host"]) == ("running", "node-b")
    os.kill(pool.session("heat")["worker_pid"], signal.SIGKILL)
    done = ask(pool, "wait", "heat", "-o", "json", timeout=400)
    assert done.returncode == 0 and '"exit_code": 0' in done.stdout, done.stderr
    assert f"digest {heat_digest()}" in output(pool, "heat", "--tail", "3").decode()
    assert pool.ends("heat") and pool.session("heat")["exit_code"] == 0
    decisions = [event["decision"] for event in pool.rgpu("history", "heat")]
    assert "recover" in " ".join(decisions), decisions


@pytest.mark.timeout(400)
def test_output_is_bounded_and_any_bytes(pool: LocalPool) -> None:
    code = ("import os, sys; os.write(1, b'first\\xff\\xfe\\n'); "
            "[os.write(1 + i % 2, b'%07d \\xe9\\n' % i) for i in range(40000)]; os.write(2, b'last\\x00\\xff')")
    detach(pool, "writes", sys.executable, "-c", code, options=("--log-limit", "64KiB"))
    assert ask(pool, "wait", "writes").returncode == 0
    whole = output(pool, "writes")
    assert whole.startswith(b"first\xff\xfe\n0000000 \xe9\n0000001 \xe9\n")
    assert whole.endswith(b"39999 \xe9\nlast\x00\xff")
    assert b"bytes of the output are left out here" in whole
    files = list((Path(pool.environment["RGPU_RUNS_DIR"]) / "writes").glob("output-*"))
    assert sum(path.stat().st_size for path in files) <= 64 << 10 < 40000 * 10
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert output(pool, "writes", "--tail", "2") == b"0039999 \xe9\nlast\x00\xff"
    assert pool.rgpu("logs", "writes", "-n", "1")["lines"] == ["last\\x00\\xff"]
    assert "source" not in pool.rgpu("logs", "writes", "--worker", "-n", "5")


@pytest.mark.timeout(500)
def test_attach_wait_and_signal(pool: LocalPool) -> None:
    detach(pool, "counts", sys.executable, "-c", COUNTS)
    says(pool, "counts", "ready")
    taken = ask(pool, "run", "--detach", "--name", "counts", "--", "touch", str(pool.folder / "ran"))
    assert taken.returncode == AlreadyExists.exit_code and len(taken.stderr.splitlines()) == 1, taken.stderr
    assert not (pool.folder / "ran").exists()
    attached = subprocess.Popen([*RGPU, "attach", "counts"], env=pool.environment, cwd=ROOT, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)
    assert attached.stdout is not None and attached.stdout.readline() == b"ready\n"
    for text in ("USR1", "HUP"):
        assert ask(pool, "signal", "counts", text).returncode == 0
        assert attached.stdout.readline() == f"got SIG{text}\n".encode()
    attached.send_signal(signal.SIGINT)
    _, said = attached.communicate(timeout=60)
    assert attached.returncode == 130 and b"detached from counts, which goes on" in said
    late = ask(pool, "wait", "counts", "--timeout", "1s")
    assert late.returncode == TimedOut.exit_code and "still runs" in late.stderr
    for verb in (("wait", "count"), ("attach", "count"), ("signal", "count", "TERM")):
        unknown = ask(pool, *verb)
        assert unknown.returncode == NotFound.exit_code and "did you mean 'counts'?" in unknown.stderr
    assert ask(pool, "signal", "counts", "TREM").returncode == UsageError.exit_code
    again = subprocess.Popen([*RGPU, "attach", "counts", "-n", "1"], env=pool.environment, cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert again.stdout is not None and again.stdout.readline() == b"got SIGHUP\n"
    assert ask(pool, "signal", "counts", "TERM").returncode == 0
    rest, said = again.communicate(timeout=90)
    assert (again.returncode, rest, said) == (7, b"got SIGTERM\n", b"")
    assert ask(pool, "wait", "counts").returncode == 7
    assert ask(pool, "signal", "counts", "TERM").returncode == NotFound.exit_code
    detach(pool, "counts", "true")  # its name is free
    assert ask(pool, "wait", "counts").returncode == 0
    assert b"got" not in output(pool, "counts")


@pytest.mark.timeout(300)
def test_refusals_are_those_of_the_foreground(pool: LocalPool, tmp_path: Path) -> None:
    refused = ask(pool, "run", "-d", "--name", "never", "--memory", "1TB", "--", "touch", str(tmp_path / "ran"))
    assert refused.returncode == Refused.exit_code and refused.stdout == "", refused.stderr
    (line,) = refused.stderr.splitlines()
    assert line.startswith("rgpu: ") and "the largest that would fit is 8192 MiB" in line
    missing = ask(pool, "run", "-d", "--name", "never", "--", "/no/such/program")
    assert missing.returncode == 127 and missing.stderr == "rgpu: /no/such/program: not found\n"
    assert not (tmp_path / "ran").exists() and ask(pool, "wait", "never").returncode == NotFound.exit_code
    for options in (("--log-limit", "64KiB"), ("-d", "--log-limit", "1KiB"), ("--signal-before", "USR1@1m"),
                    ("-d", "--name", "a/b")):
        assert ask(pool, "run", *options, "--", "true").returncode == UsageError.exit_code


@pytest.mark.timeout(400)
def test_one_that_waits_for_a_place_is_withdrawn_by_ctrl_c(pool: LocalPool) -> None:
    options = ("--gpus", "1", "--anti-affinity", "hold")
    holders = [pool.run("sleep", "600", name=f"holds-{host}", options=("--memory", "8GiB", "--host", host))
               for host in ("node-a", "node-b", "node-c")]
    for holder in holders:
        pool.wait_state(holder.name, "running", 90)
    waits = subprocess.Popen([*RGPU, "run", "-d", "--queue", "--name", "waits", *options, "--", "true"],
                             env=pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waits.stderr is not None
    line = waits.stderr.readline()
    assert "waits" in line and [row["session"] for row in pool.rgpu("ps", "--state", "queued")] == ["waits"], line
    waits.send_signal(signal.SIGINT)
    out, said = waits.communicate(timeout=90)
    assert waits.returncode == 130 and out == "", said
    assert pool.rgpu("ps", "--state", "queued") == []
    for holder in holders:
        holder.stop()


@pytest.mark.timeout(400)
def test_time_limits_are_on_record(pool: LocalPool) -> None:
    in_front = subprocess.run(
        [*RGPU, "run", "--name", "front", "--time-limit", "3s", "--signal-before", "USR1@2s", "--", sys.executable,
         "-c", COUNTS], env=pool.environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert in_front.returncode == 7 and in_front.stdout == "ready\ngot SIGUSR1\ngot SIGTERM\n", in_front
    assert in_front.stderr == "rgpu: front: its time limit of 3 s was reached: SIGTERM\n"
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    detach(pool, "stubborn", sys.executable, "-c", stubborn, options=("--time-limit", "2s", "--kill-after", "1s"))
    assert ask(pool, "wait", "stubborn").returncode == 128 + signal.SIGKILL
    eventually(lambda: pool.ends("stubborn"))
    for name, code, why in (("front", 7, "SIGTERM"), ("stubborn", 137, "SIGTERM, and SIGKILL 1 s later")):
        row = pool.session(name)
        assert row["exit_code"] == code and row["reason"].endswith(f"s was reached: {why}"), row
    assert record(pool, "stubborn")["reason"] == pool.session("stubborn")["reason"]
    assert "time limit of 2 s" in output(pool, "stubborn").decode()


@pytest.mark.timeout(400)
def test_it_goes_on_without_its_supervisor(pool: LocalPool) -> None:
    detach(pool, "orphan", sys.executable, "-c", COUNTS)
    says(pool, "orphan", "ready")
    os.kill(record(pool, "orphan")["supervisor"]["pid"], signal.SIGKILL)
    eventually(lambda: "supervisor died" in record(pool, "orphan")["trouble"])
    (row,) = [row for row in pool.rgpu("ps") if row["session"] == "orphan"]
    assert row["detached"] == "running" and "its supervisor died, its agent went on" in row["note"]
    assert ask(pool, "signal", "orphan", "USR1").returncode == 0
    says(pool, "orphan", "got SIGUSR1")
    assert ask(pool, "signal", "orphan", "TERM").returncode == 0
    assert ask(pool, "wait", "orphan").returncode == 7
    assert output(pool, "orphan") == b"ready\ngot SIGUSR1\ngot SIGTERM\n"


@pytest.mark.timeout(400)
def test_it_goes_on_without_its_agent(pool: LocalPool) -> None:
    detach(pool, "agentless", sys.executable, "-c", COUNTS)
    says(pool, "agentless", "ready")
    os.kill(record(pool, "agentless")["agent"]["pid"], signal.SIGKILL)
    says(pool, "agentless", "its agent ended (SIGKILL): its calls of the GPU fail from then on")
    assert ask(pool, "signal", "agentless", "TERM").returncode == 0
    assert ask(pool, "wait", "agentless").returncode == 7
    (row,) = [row for row in pool.rgpu("ps", "--detached", "--all") if row["session"] == "agentless"]
    assert (row["state"], row["exit_code"]) == ("ended", 7) and "its agent ended (SIGKILL)" in row["reason"]


@pytest.mark.timeout(400)
def test_an_end_that_nobody_saw_is_not_guessed(pool: LocalPool) -> None:
    detach(pool, "lost", "sleep", "600")
    pids = {who: record(pool, "lost")[who]["pid"] for who in ("supervisor", "agent", "program")}
    os.kill(pids["supervisor"], signal.SIGSTOP)  # so that neither goes on without the other
    os.kill(pids["agent"], signal.SIGKILL)
    os.kill(pids["supervisor"], signal.SIGKILL)
    (row,) = eventually(lambda: [row for row in pool.rgpu("ps", "--detached") if "agent died" in row["note"]])
    assert "its program goes on" in row["note"]
    os.kill(pids["program"], signal.SIGKILL)
    eventually(lambda: state(pids["program"]) in ("", "Z"))
    done = ask(pool, "wait", "lost")
    assert done.returncode == 18 and "how is not known" in done.stderr
    attached = ask(pool, "attach", "lost")
    assert attached.returncode == 18
    (row,) = [row for row in pool.rgpu("ps", "--detached", "--all") if row["session"] == "lost"]
    assert (row["state"], row["exit_code"]) == ("unknown", None)


@pytest.mark.timeout(300)
def test_a_user_manager_has_the_supervisor_where_there_is_one(pool: LocalPool, tmp_path: Path) -> None:
    """The stand-in does what ``systemd-run --scope`` does to its caller: it becomes the command."""
    stand_in, said = tmp_path / "systemd-run", tmp_path / "said"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {said}\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nexec "$@"\n')
    stand_in.chmod(0o755)
    (tmp_path / "systemd").mkdir()
    before = dict(pool.environment)
    pool.environment |= {"PATH": f"{tmp_path}:{before['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}
    try:
        detach(pool, "scoped", "true")
    finally:
        pool.environment.clear()
        pool.environment.update(before)
    assert ask(pool, "wait", "scoped").returncode == 0
    unit = record(pool, "scoped")["how"].removeprefix("systemd scope ")
    assert unit.startswith("rgpu-scoped-") and f"--user --scope --quiet --collect --unit={unit}" in said.read_text()


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(user_manager.unavailable()), reason=user_manager.unavailable())
def test_the_end_of_a_login_spares_it(pool: LocalPool) -> None:
    """A real systemd ends all that a login started: not the run, which is in a scope of its own."""
    login = f"sleep 600 & {' '.join(RGPU)} run -d --name stays -- {sys.executable} -c '{COUNTS}' && wait"
    with user_manager.UserManager() as manager:
        shell = manager.start(("systemd-run", "--user", "--scope", "--quiet", "--unit=login.scope", "sh", "-c", login),
                              pool.environment)
        says(pool, "stays", "ready")
        assert manager.members("login.scope"), "what is left of the login waits"
        assert manager.run("systemctl", "--user", "stop", "login.scope").returncode == 0
        assert shell.wait(30) != 0
        unit = record(pool, "stays")["how"].removeprefix("systemd scope ")
        assert unit in manager.run("systemctl", "--user", "list-units", "--plain", "rgpu-*").stdout
        pids = {record(pool, "stays")[who]["pid"] for who in ("supervisor", "agent", "program")}
        assert pids <= manager.members(unit)
        assert ask(pool, "signal", "stays", "TERM").returncode == 0
        assert ask(pool, "wait", "stays").returncode == 7, "it was there until it was told to end"


@pytest.mark.timeout(300)
def test_what_is_on_record_needs_no_pool(pool: LocalPool, tmp_path: Path) -> None:
    detach(pool, "local", "sh", "-c", "echo here; exit 4")
    assert ask(pool, "wait", "local").returncode == 4
    alone = LocalPool(tmp_path)  # never started
    alone.environment["RGPU_RUNS_DIR"] = pool.environment["RGPU_RUNS_DIR"]
    assert ask(alone, "wait", "local").returncode == 4 and output(alone, "local") == b"here\n"
    assert ask(alone, "attach", "local").returncode == 4
    assert "local" in ask(alone, "ps", "--detached", "--all", "-o", "name").stdout.split()
    damaged = Path(pool.environment["RGPU_RUNS_DIR"]) / "local" / "run.json"
    damaged.write_bytes(damaged.read_bytes().replace(b'"rgpu_run": 1', b'"rgpu_run": 9'))
    done = ask(alone, "wait", "local")
    assert done.returncode == 9 and "version 9" in done.stderr
