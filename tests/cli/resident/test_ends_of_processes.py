"""What becomes of runs, and of residents, when one of the processes ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.agent.resident_user import ROOT, THREADS_ABOVE, ResidentUser, agents
from tests.support.eventually import eventually
from tests.support.processes import state

SESSION = """
import os, sys
sys.path.insert(0, {root!r})
from tests.support.agent.fake_shim import FakeShim
shim = FakeShim(os.environ["RGPU_AGENT"])
shim.hello()
shim.call("stream_synchronize", bytes(8), awaited=True)
shim.wait(lambda: shim.answers)
print("up", flush=True)
"""


def session(more: str) -> tuple[str, ...]:
    """A program with a session."""
    return sys.executable, "-c", SESSION.format(root=str(ROOT)) + textwrap.dedent(more)


def started(user: ResidentUser, name: str, *program: str) -> tuple[subprocess.Popen[str], int]:
    """A run whose program said that it is up; and its agent."""
    before = {agent for resident in user.residents() for agent in agents(resident)}
    process = user.start("--name", name, "--", *program)
    assert process.stdout is not None and process.stdout.readline() == "up\n", process.stderr and process.stderr.read()
    (agent,) = {agent for resident in user.residents() for agent in agents(resident)} - before
    return process, agent


def test_a_run_outlives_its_resident_and_the_next_starts_another(user: ResidentUser) -> None:
    process, agent = started(user, "outlives", *session("""
        input()
        shim.call("stream_synchronize", bytes(8), awaited=True)
        shim.wait(lambda: len(shim.answers) > 1)
        sys.exit(7)"""))
    (resident,) = user.residents()
    os.kill(resident, signal.SIGKILL)
    eventually(lambda: state(resident) in ("", "Z"))
    out, err = process.communicate("go\n", timeout=30)
    assert (process.returncode, err) == (7, "")
    (end,) = [end for end in user.pool.said("session.end") if end["session"] == "outlives"]
    assert end["exit_code"] == 7
    eventually(lambda: state(agent) in ("", "Z"))
    assert user.ready() != resident


def test_what_killed_residents_left_is_swept_by_the_next(fresh: ResidentUser) -> None:
    first = fresh.ready()
    fresh.run("--lazy", "--", "true", env={"LC_TEST": "other"})
    eventually(lambda: len(fresh.residents()) == 2 and not list(fresh.folder.glob("*.begun")))
    for pid in fresh.residents():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not fresh.residents())
    old = fresh.folder / "00000000.begun"
    old.write_text("a reason")
    os.utime(old, (1, 1))
    assert fresh.ready() != first
    assert len(fresh.files()) == 2, fresh.files()


def test_when_the_agent_is_killed_the_program_is_told_and_goes_on(user: ResidentUser) -> None:
    process, agent = started(user, "orphan", *session("""
        shim.wait(lambda: shim.eof)
        print("told", flush=True)
        input()
        sys.exit(5)"""))
    os.kill(agent, signal.SIGKILL)
    assert process.stdout is not None and process.stdout.readline() == "told\n"
    out, err = process.communicate("go\n", timeout=30)
    assert process.returncode == 5 and err == "rgpu: the agent of this run ended before its program did\n"
    assert user.served()


def test_when_rgpu_run_is_killed_the_program_is_told_and_goes_on(user: ResidentUser, tmp_path: Path) -> None:
    mark = tmp_path / "told"
    process, agent = started(user, "headless", *session(f"""
        shim.wait(lambda: shim.eof)
        open({str(mark)!r}, "w").write("802")"""))
    process.kill()
    eventually(lambda: mark.exists() and mark.read_text() == "802")
    eventually(lambda: state(agent) in ("", "Z"))
    assert not [end for end in user.pool.said("session.end") if end["session"] == "headless"]  # as without a resident
    process.communicate(timeout=20)


def test_when_rgpu_run_is_killed_while_it_waits_the_request_is_withdrawn(user: ResidentUser) -> None:
    user.pool.line = ["a is full"]
    try:
        process = user.start("--queue", "--name", "waits-killed", "--", "echo", "ran")
        assert process.stderr is not None and "waits at position 1" in process.stderr.readline()
        process.kill()
        eventually(lambda: [said for said in user.pool.said("session.withdraw") if said["session"] == "waits-killed"])
    finally:
        user.pool.line = []
    out, _ = process.communicate(timeout=20)
    assert out == ""


def test_when_the_agent_is_killed_while_it_asks_nothing_is_started(user: ResidentUser) -> None:
    user.pool.line = ["a is full"]
    (resident,) = user.residents()
    before = agents(resident)
    try:
        process = user.start("--queue", "--name", "asks-killed", "--", "echo", "ran")
        assert process.stderr is not None and "waits at position 1" in process.stderr.readline()
        (agent,) = set(agents(resident)) - set(before)
        os.kill(agent, signal.SIGKILL)
        out, err = process.communicate(timeout=20)
    finally:
        user.pool.line = []
    assert (process.returncode, out) == (1, "") and "run it again" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_resident_that_does_not_answer_is_not_waited_for_long(fresh: ResidentUser, number: int) -> None:
    resident = fresh.ready()
    os.kill(resident, number)
    try:
        assert fresh.run("--", "sh", "-c", "exit 3") == (3, "", "")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(resident, signal.SIGCONT)


def test_another_version_of_a_file_starts_another_resident(fresh: ResidentUser) -> None:
    file = fresh.runtime / "sitecustomize.py"  # a file that it imports, and that is a test's to change
    file.write_text("VERSION = 1\n")
    fresh.environment["PYTHONPATH"] = f"{ROOT}:{fresh.runtime}"
    first = fresh.ready()
    file.write_text("VERSION = 2  # the next one\n")
    assert not fresh.served()
    eventually(lambda: state(first) in ("", "Z"))
    assert fresh.ready() != first


SWALLOWS = """
import os, signal, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rgpu.link.data.proofs" and open("/proc/self/comm").read().strip() == "rgpu-resident":
            open({told!r}, "w").close()
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            except BaseException:
                pass
sys.meta_path.insert(0, Finder())
"""


def test_it_ends_when_told_so_while_it_begins(fresh: ResidentUser) -> None:
    """Also where what it imports just then swallows the exception."""
    told = fresh.runtime / "told"
    (fresh.runtime / "sitecustomize.py").write_text(SWALLOWS.format(told=str(told)))
    fresh.environment["PYTHONPATH"] = f"{ROOT}:{fresh.runtime}"
    assert fresh.run("--lazy", "--", "true")[0] == 0
    eventually(told.exists)
    eventually(lambda: not fresh.residents(), fresh.files, 20)


def test_it_ends_when_idle(fresh: ResidentUser) -> None:
    fresh.environment["RGPU_RESIDENT_IDLE"] = "1s"
    assert fresh.run("--", "true")[0] == 0
    eventually(lambda: (fresh.folder / "x").parent.is_dir() and fresh.residents())
    eventually(lambda: not fresh.residents() and not fresh.files(), fresh.files)
    assert fresh.run("--", "sh", "-c", "exit 2")[0] == 2


@pytest.mark.parametrize("what", ["pool", "socket", "told"])
def test_it_ends_with_its_pool_with_its_socket_and_when_told(fresh: ResidentUser, what: str) -> None:
    resident = fresh.ready()
    if what == "pool":
        shutil.rmtree(fresh.pool.files.root)
    elif what == "socket":
        next(fresh.folder.glob("*.sock")).unlink()
    else:
        os.kill(resident, signal.SIGTERM)
    eventually(lambda: state(resident) in ("", "Z"))
    assert not fresh.files()


def test_a_run_that_is_within_a_run_has_an_agent_of_its_own(user: ResidentUser) -> None:
    assert not user.served(env={"RGPU_AGENT": "/no/where"})


def test_other_surroundings_other_residents(fresh: ResidentUser) -> None:
    """What a process cannot take over from another one is that one's: a run is served by its like only."""
    first = fresh.ready()
    for before in (["prlimit", "--nofile=999"], ["nice", "-n", "3"], ["taskset", "-c", "0"]):
        if not shutil.which(before[0]):
            continue
        command = [*before, *fresh.command("--lazy", "--", "sh", "-c", "ls /proc/$PPID/task | wc -l")]
        seen = [subprocess.run(command, env=fresh.environment, capture_output=True, text=True, timeout=60).stdout]
        eventually(lambda: not list(fresh.folder.glob("*.begun")))
        seen.append(subprocess.run(command, env=fresh.environment, capture_output=True, text=True, timeout=60).stdout)
        assert int(seen[0]) > 1 == int(seen[1]), (before, seen)
    assert first in fresh.residents() and len(fresh.residents()) > 1


def test_there_are_not_too_many(fresh: ResidentUser) -> None:
    for number in range(10):
        fresh.run("--lazy", "--", "true", env={"LC_TEST": str(number)})
        eventually(lambda: not list(fresh.folder.glob("*.begun")))
    assert len(fresh.residents()) == 8


@pytest.mark.parametrize(("trouble", "reason"), [
    ("sys.modules['rgpu.client.session.shipper'] = None", "shipper"),
    ("import threading, time; threading.Thread(target=time.sleep, args=(30,), daemon=True).start()", "1 threads")])
def test_one_that_cannot_start_is_not_tried_each_time(fresh: ResidentUser, trouble: str, reason: str) -> None:
    """Its reason is kept for `rgpu doctor`."""
    (fresh.runtime / "sitecustomize.py").write_text(
        f"import sys\nif len(sys.argv) == 4 and sys.argv[0] == '-c':\n    {trouble}\n")
    fresh.environment["PYTHONPATH"] = f"{ROOT}:{fresh.runtime}"
    assert fresh.run("--lazy", "--", "true")[0] == 0
    eventually(lambda: any(reason in text for text in fresh.files().values()), fresh.files)
    marks = {path: path.stat().st_mtime_ns for path in fresh.folder.glob("*.begun")}
    assert fresh.run("--lazy", "--", "true")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in fresh.folder.glob("*.begun")} == marks and marks
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "doctor"], env=fresh.environment, capture_output=True,
                          text=True, timeout=60)
    assert "resident" in done.stdout and reason in done.stdout


def test_the_configuration_switches_it_off_while_one_lives(fresh: ResidentUser) -> None:
    del fresh.environment["RGPU_CONFIG"]
    fresh.environment["XDG_CONFIG_HOME"] = str(fresh.runtime)
    fresh.ready()
    (fresh.runtime / "rgpu").mkdir()
    (fresh.runtime / "rgpu" / "config.toml").write_text("resident = false\n")
    assert not fresh.served()
    assert fresh.run("--", "sh", "-c", "exit 4") == (4, "", "")


def test_somebody_elses_folder_is_not_used(fresh: ResidentUser, tmp_path: Path) -> None:
    """Nor a link, nor one that others may look into."""
    fresh.folder.symlink_to(tmp_path)
    assert not fresh.served() and not fresh.residents() and not list(tmp_path.glob("*.sock"))
    fresh.folder.unlink()
    fresh.folder.mkdir(mode=0o755)
    os.chmod(fresh.folder, 0o755)
    assert not fresh.served() and not fresh.files()
    os.chmod(fresh.folder, 0o700)
    if os.geteuid() == 0:
        os.chown(fresh.folder, 65534, -1)
        assert not fresh.served() and not fresh.files()
        os.chown(fresh.folder, 0, -1)
    assert fresh.ready()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_socket_is_not_used_and_another_user_is_not_served(fresh: ResidentUser) -> None:
    resident = fresh.ready()
    (path,) = fresh.folder.glob("*.sock")
    other = subprocess.run([sys.executable, "-c", "import os, socket, sys\n"
                            "s = socket.socket(socket.AF_UNIX); os.setgroups([]); os.setgid(65534)\n"
                            "os.open(sys.argv[1], os.O_PATH | os.O_DIRECTORY) and os.chdir(sys.argv[1])\n"
                            "os.setuid(65534)\n"
                            "try: s.connect('./' + sys.argv[2]); print('let in', s.recv(9))\n"
                            "except OSError as error: print(type(error).__name__)", str(fresh.folder), path.name],
                           capture_output=True, text=True, timeout=20)
    assert other.stdout.strip() == "PermissionError", other
    os.chmod(path, 0o777)
    os.chmod(fresh.folder, 0o711)
    shown = subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c",
                            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
                            "print(s.recv(9))", str(path)], capture_output=True, text=True, timeout=20) \
        if shutil.which("setpriv") else None
    assert shown is None or shown.stdout in ("b''\n", ""), shown
    os.chmod(fresh.folder, 0o700)
    os.kill(resident, signal.SIGKILL)
    eventually(lambda: state(resident) in ("", "Z"))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:  # made to listen by another user, in a folder of this one's
        code = "import os, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); os.setgid(65534); " \
               "os.setuid(65534); s.listen(); print('listens', flush=True); c, _ = s.accept(); " \
               "print(c.recv(99) or 'nothing', flush=True)"
        listener.bind(str(path))
        with subprocess.Popen([sys.executable, "-c", code, str(listener.fileno())], pass_fds=[listener.fileno()],
                              stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "listens\n"
            assert not fresh.served()
            assert process.stdout.readline() == "nothing\n"


def test_a_resident_keeps_no_secrets_of_runs(fresh: ResidentUser) -> None:
    fresh.environment |= {"SECRET_TOKEN": "x", "RGPU_MEMORY": "1MiB"}
    held = Path(f"/proc/{fresh.ready()}/environ").read_bytes()
    assert b"SECRET_TOKEN" not in held and b"RGPU_MEMORY" not in held and b"RGPU_POOL" in held


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_a_run_that_is_traced_is_all_that_its_tracer_waits_for(fresh: ResidentUser) -> None:
    resident = fresh.ready()
    done = subprocess.run(["strace", "-f", "-o", "/dev/null", "-e", "trace=none",
                           *fresh.command("--lazy", "--", *THREADS_ABOVE)], env=fresh.environment,
                          capture_output=True, text=True, timeout=120)
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("this machine lets nobody trace")
    assert done.returncode == 0 and int(done.stdout) > 1, done
    assert fresh.residents() == [resident]
