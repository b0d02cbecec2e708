"""A run that was handed over is for its user and its program what it is without a resident."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent.resident_user import ResidentUser, agents
from tests.support.eventually import eventually

SHOWS = """
import json, os, resource, signal, sys
skip = ("RGPU_AGENT", "RGPU_RESIDENT", "RGPU_SESSION", "_")
print(json.dumps([sorted((k, v) for k, v in os.environ.items() if k not in skip), os.getcwd(), os.umask(0),
    resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)),
    [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGPIPE, signal.SIGHUP, signal.SIGTERM)],
    sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), os.getpgrp() == os.getpgid(os.getppid()),
    os.getsid(0) == os.getsid(os.getppid()), sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")),
    os.readlink("/proc/self/ns/mnt"), open("/proc/self/cgroup").read()]))
"""


def both(user: ResidentUser, *arguments: str, **more: Any) -> tuple[int, str, str]:
    """What a run gives with a resident, which is what it gives without."""
    found = user.run(*arguments, **more)
    assert found == user.run(*arguments, resident=False, **more)
    return found


@pytest.mark.parametrize(("script", "end"), [
    ("true", (0, "", "")), ("echo out; echo err >&2; exit 7", (7, "out\n", "err\n")), ("exit 255", (255, "", "")),
    ("cat", (0, "said", "")), ("kill -TERM $$", (-15, "", "")), ("kill -KILL $$", (-9, "", "")),
    ("ulimit -c 0; kill -SEGV $$", (-11, "", "")), ("kill -INT $$", (-2, "", "")),
    ("kill -PIPE $$", (-13, "", "")), ("ls /proc/$PPID/fd >/dev/null && exec 1>&- && exit 3", (3, "", "")),
])
def test_ends(user: ResidentUser, script: str, end: tuple[int, str, str]) -> None:
    assert both(user, "--", "sh", "-c", script, said="said") == end


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (("--", "/no/such/program"), 127, "not found"), (("--", "no-such-program"), 127, "not found"),
    (("--", "/etc/hostname"), 126, "/etc/hostname: "), (("--", "/etc"), 126, "Is a directory"),
    (("--lazy", "--", "/no/such/program"), 127, "not found"),
    (("--lazy", "--", "/etc/hostname"), 126, "/etc/hostname: "),
    (("--memory", "much", "--", "true"), 2, "is no size"), (("--gpus", "99", "--", "true"), 2, "not 99"),
])
def test_what_is_refused(user: ResidentUser, arguments: tuple[str, ...], code: int, said: str) -> None:
    found = both(user, *arguments, cwd=Path(__file__).parents[1])
    assert found[:2] == (code, "") and said in found[2] and len(found[2].splitlines()) == 1


def test_without_a_pool(user: ResidentUser) -> None:
    path = user.pool.files.description_path
    path.rename(path.with_suffix(".away"))
    try:
        code, out, err = both(user, "--", "true")
    finally:
        path.with_suffix(".away").rename(path)
    assert (code, out) == (3, "") and "there is no pool" in err


def test_what_the_pool_refuses(user: ResidentUser) -> None:
    user.pool.places = 0
    try:
        assert both(user, "--name", "full", "--", "true")[:2] == (5, "")
    finally:
        user.pool.places = 1
    assert user.run("--name", "taken", "--", "true")[0] == 0  # the fake pool forgets no session
    assert both(user, "--name", "taken", "--", "true")[:2] == (4, "")


def test_what_the_program_sees(user: ResidentUser, tmp_path: Path) -> None:
    """Also where its folder's name and its variables are no text."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff odd"))
    odd.mkdir()
    given = {os.fsencode(name): os.fsencode(value) for name, value in user.environment.items()}
    given |= {b"ODD": b"\xfe=\n2", b"EMPTY": b"", b"TMPDIR": os.fsencode(tmp_path)}
    seen = []
    for more in ({}, {b"RGPU_RESIDENT": b"off"}):
        done = subprocess.run(user.command("--", sys.executable, "-c", SHOWS), env={**given, **more}, cwd=odd,
                              capture_output=True, umask=0o027, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr
        seen.append(done.stdout)
    assert seen[0] == seen[1] and b'["ODD", "' in seen[0] and b"odd" in seen[0]


def test_descriptors_of_the_shell_do_not_reach_the_program(user: ResidentUser) -> None:
    script = 'exec 7</etc/hostname; exec "$@"'
    for value in ("on", "off"):
        done = subprocess.run(["sh", "-c", script, "sh", *user.command("--lazy", "--", "sh", "-c", "cat <&7")],
                              env={**user.environment, "RGPU_RESIDENT": value}, capture_output=True, timeout=60)
        assert done.returncode and not done.stdout


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1", "1 2", "0 1 2"])
def test_without_standard_descriptors(user: ResidentUser, closed: str) -> None:
    shut = " ".join(f"{one}>&-" for one in closed.split())
    code = subprocess.run(["sh", "-c", f'exec "$@" {shut}', "sh", *user.command("--", "sh", "-c", "exit 5")],
                          env=user.environment, capture_output=True, timeout=60).returncode
    assert code == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_signals_reach_the_program_and_its_end_is_ours(user: ResidentUser, number: int) -> None:
    process = user.start("--name", f"gets-{number}", "--", "sh", "-c", "ulimit -c 0; echo up; exec sleep 30",
                         preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # tests behind `&` ignore SIGQUIT
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number
    (end,) = [end for end in user.pool.said("session.end") if end["session"] == f"gets-{number}"]
    assert end["exit_code"] == 128 + number


def test_a_signal_that_is_blocked_here_is_told_by_the_exit_status(user: ResidentUser) -> None:
    code = "import os, signal; signal.pthread_sigmask(signal.SIG_SETMASK, ()); os.kill(os.getpid(), signal.SIGTERM)"
    found = both(user, "--", sys.executable, "-c", code,
                 preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))
    assert found == (128 + signal.SIGTERM, "", "")


def test_the_pool_is_told_of_the_process_that_its_user_started(user: ResidentUser) -> None:
    process = user.start("--name", "whose", "--", "sh", "-c", "echo up; read word; exit 6")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    (created,) = [made for made in user.pool.said("session.create") if made["name"] == "whose"]
    assert created["program"]["pid"] == process.pid and created["program"]["command"] == "/usr/bin/sh"
    process.communicate("go\n", timeout=20)
    assert process.returncode == 6


def test_a_signal_is_ignored_as_under_nohup(user: ResidentUser) -> None:
    process = user.start("--", "sh", "-c", "echo up; read word; echo still",
                         preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate("go\n", timeout=20)
    assert (process.returncode, out) == (0, "still\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_stops_waiting_starts_nothing_and_leaves_nothing(user: ResidentUser, number: int) -> None:
    user.pool.line = ["a is full"]
    try:
        process = user.start("--queue", "--name", f"waits-{number}", "--", "echo", "ran")
        assert process.stderr is not None and "waits at position 1" in process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    finally:
        user.pool.line = []
    assert (process.returncode, out, err) == (-number, "", "")
    (said,) = [said for said in user.pool.said("session.withdraw") if said["session"] == f"waits-{number}"]
    assert signal.Signals(number).name in said["reason"]


def test_several_at_once_have_an_agent_each(user: ResidentUser) -> None:
    (resident,) = user.residents()
    before = set(agents(resident))  # one of a run before may be ending
    several = [user.start("--name", f"side-{number}", "--", "sh", "-c", f"echo up; read word; exit {number}")
               for number in range(4)]
    for process in several:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert len(set(agents(resident)) - before) == 4
    for process in reversed(several):
        process.communicate("go\n", timeout=20)
    assert [process.returncode for process in several] == [0, 1, 2, 3]
    eventually(lambda: set(agents(resident)) <= before)
