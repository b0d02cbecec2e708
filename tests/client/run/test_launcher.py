"""``rgpu run`` as a process: exit codes, signals, streams, environment, and what is refused before the start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.client.run.launcher import default_name, environment
from rgpu.session.errors import Refused, UsageError
from tests.support.agent.fake_pool import FakePool, FakeWorker
from tests.support.building import libraries
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[3]

RUN = """
import json, os, sys
from pathlib import Path
from rgpu.client.run.launcher import run
from rgpu.link.loggers import configure_logging
from rgpu.session.errors import RgpuError
configure_logging(level="error")
try:
    more = json.loads(os.environ["MORE"])
    sys.exit(run(sys.argv[3:], name=sys.argv[2], pool=Path(sys.argv[1]), reraise=True, **more))
except RgpuError as error:
    print(error.message, file=sys.stderr)
    sys.exit(error.exit_code)
"""

SESSION = """
import os
from tests.support.agent.fake_shim import FakeShim
shim = FakeShim(os.environ["RGPU_AGENT"])
shim.hello()
shim.call("stream_synchronize", bytes(8), awaited=True)
shim.wait(lambda: shim.answers)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lib")
    subprocess.run(["cc", "-shared", "-o", directory / "libcuda.so.1", "-x", "c", "/dev/null"], check=True)
    return directory


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path / "pool")
    yield pool
    pool.stop()


def launch(pool: FakePool, library: Path, program: str, name: str = "prog", given: dict[str, Any] | None = None,
           **more: object) -> subprocess.Popen[str]:
    """``given``: more arguments of :func:`run`."""
    environ = dict(os.environ, RGPU_SHIM_DIR=str(library), PYTHONPATH=str(ROOT), LD_LIBRARY_PATH="/users/own",
                   MORE=json.dumps(given or {}))
    command = [sys.executable, "-c", RUN, str(pool.files.root), name, sys.executable, "-uc", textwrap.dedent(program)]
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload]


def test_streams_exit_code_and_environment(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, SESSION + """
import sys
print(sys.stdin.read().upper(), end="")
for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "NUMBA_CUDA_DRIVER", "TRITON_LIBCUDA_PATH", "LIBRARY_PATH",
             "RGPU_DRIVER_VERSION"):
    print(os.environ[name])
print("complaint", file=sys.stderr)
sys.exit(7)
""")
    out, err = process.communicate("hello\n", timeout=20)
    assert process.returncode == 7 and err == "complaint\n"
    driver = f"{library}/libcuda.so.1"
    assert out.splitlines() == ["HELLO", f"{library}:/users/own", driver, driver, str(library), str(library),
                                "13000"]
    ends = pool.said("session.end")
    assert [(end["session"], end["exit_code"]) for end in ends] == [("prog", 7)]


def test_the_session_is_made_before_the_program_and_taken_by_its_first_process(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, SESSION + "print(os.getpid())")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    (created,) = pool.said("session.create")
    assert created["program"]["pid"] == process.pid and created["program"]["command"] == sys.executable
    (end,) = pool.said("session.end")
    assert (end["session"], end["exit_code"]) == ("prog", 0)
    assert (end["statistics"]["pid"], end["statistics"]["asked_pid"]) == (int(out), process.pid)


def test_a_program_that_never_uses_cuda_gives_its_session_back(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, "raise SystemExit(3)")
    process.communicate(timeout=20)
    assert process.returncode == 3 and len(pool.said("session.create")) == 1
    (end,) = pool.said("session.end")
    assert (end["session"], end["exit_code"], end["reason"]) == ("prog", 3, "its program ended without using a GPU")


def test_a_lazy_program_that_never_uses_cuda_costs_no_session(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, "pass", given={"lazy": True})
    process.communicate(timeout=20)
    assert process.returncode == 0 and pool.log == []


def test_a_lazy_program_starts_without_a_place(pool: FakePool, library: Path) -> None:
    """It may need no device; the shim then answers for the version that it speaks."""
    pool.places = 0
    process = launch(pool, library, "import os; print(os.environ.get('RGPU_DRIVER_VERSION'))", given={"lazy": True})
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "None\n", "")


def test_without_a_place_nothing_is_started(pool: FakePool, library: Path) -> None:
    pool.places = 0
    process = launch(pool, library, "print('ran')")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (Refused.exit_code, "", "no place for prog: a is full\n")
    assert pool.said("session.end") == []


def test_a_session_that_ended_before_its_program_used_it_is_not_made_again(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, "input()" + SESSION.replace("shim.hello()", "shim.hello(); print(shim.refused)")
                     .replace("shim.call", "raise SystemExit(5)\nshim.call"))
    eventually(lambda: pool.sessions.get("prog"))
    pool.gone.add("prog")
    out, err = process.communicate("\n", timeout=20)
    assert process.returncode == 5 and "killed by its user" in out
    assert "rgpu: no session: prog was ended before its program used it: killed by its user\n" in err
    assert len(pool.said("session.create")) == 1


def test_a_program_waits_for_its_place_before_it_starts(pool: FakePool, library: Path) -> None:
    pool.line = ["a is full", "a is full"]
    process = launch(pool, library, "print('ran')", given={"extra": {"queue": True}})
    assert process.stderr is not None
    assert process.stderr.readline() == "rgpu: prog waits at position 1 of 1: a is full\n"
    pool.line = []
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "ran\n", "") and len(pool.said("session.end")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_stops_waiting_starts_nothing_and_leaves_nothing(pool: FakePool, library: Path, number: int) -> None:
    pool.line = ["a is full"]
    process = launch(pool, library, "print('ran')", given={"extra": {"queue": True}})
    assert process.stderr is not None and process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (-number, "", "")
    (said,) = pool.said("session.withdraw")
    assert said["session"] == "prog" and signal.Signals(number).name in said["reason"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_program_and_its_end_is_ours(pool: FakePool, library: Path, number: int) -> None:
    process = launch(pool, library, SESSION + "import time\nprint('up')\ntime.sleep(30)")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number
    assert pool.said("session.end")[0]["exit_code"] == 128 + number


def test_a_program_that_handles_signals_goes_on(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, SESSION + """
import signal, time
got = []
signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
print("up")
while not got:
    time.sleep(0.01)
print("got", *got)
""")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR2)
    out, _ = process.communicate(timeout=20)
    assert out == f"got {int(signal.SIGUSR2)}\n" and process.returncode == 0


def test_control_c_is_not_doubled(pool: FakePool, library: Path) -> None:
    process = launch(pool, library, SESSION + """
import signal, time
count = 0
def handle(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, handle)
print("up")
until = time.monotonic() + 20
while not count and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.5)  # a second one would have come by then
print(count)
""", start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the whole group
    out, _ = process.communicate(timeout=20)
    assert out == "1\n" and process.returncode == 0


def test_when_the_agent_is_killed_the_program_is_told(pool: FakePool, library: Path, tmp_path: Path) -> None:
    mark = tmp_path / "told"
    process = launch(pool, library, SESSION + f"""
print("up")
shim.wait(lambda: shim.eof)
open({str(mark)!r}, "w").write("802")
""")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    started = time.monotonic()
    process.kill()
    eventually(lambda: mark.exists() and mark.read_text() == "802")
    assert time.monotonic() - started < 5
    process.communicate(timeout=20)


@pytest.mark.parametrize(("command", "code"), [("/no/such/program", 127), ("/etc/hostname", 126)])
def test_a_program_that_cannot_be_started(pool: FakePool, library: Path, command: str, code: int) -> None:
    environ = dict(os.environ, RGPU_SHIM_DIR=str(library), PYTHONPATH=str(ROOT), MORE="{}")
    done = subprocess.run([sys.executable, "-c", RUN, str(pool.files.root), "x", command], env=environ,
                          capture_output=True, text=True, timeout=20)
    assert done.returncode == code and command in done.stderr and len(done.stderr.splitlines()) == 1
    assert pool.log == [] or os.access(command, os.X_OK)  # what the kernel alone knows is known after the placement


def test_what_is_refused_before_the_program_starts(pool: FakePool, library: Path, tmp_path: Path) -> None:
    pool.sessions["taken"] = FakeWorker(pool, 1)
    process = launch(pool, library, "print('ran')", name="taken")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 4 and out == "" and "--name" in err and len(err.splitlines()) == 1
    process = launch(pool, tmp_path, "print('ran')")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 3 and out == "" and "libcuda.so.1" in err


def test_a_pool_that_is_not_running(library: Path, tmp_path: Path) -> None:
    pool = FakePool(tmp_path / "pool")
    pool.stop()
    process = launch(pool, library, "print('ran')")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 6 and out == "" and "rgpu up" in err and len(err.splitlines()) == 1


def test_names_and_environment() -> None:
    assert default_name(["/usr/bin/python3.11", "train model.py"]).startswith("train-model-")
    assert re.fullmatch("heat-[0-9a-f]{8}", default_name(["./heat"]))
    assert re.fullmatch("session-[0-9a-f]{8}", default_name(["_"]))
    base = {"LD_PRELOAD": "libx.so", "HOME": "/h"}
    result = environment(base, Path("/lib"), Path("/run/a.sock"))
    assert result["LD_PRELOAD"] == "/lib/libcuda.so.1:libx.so" and result["LD_LIBRARY_PATH"] == "/lib"
    assert result["RGPU_AGENT"] == "/run/a.sock" and result["HOME"] == "/h" and base == {"LD_PRELOAD": "libx.so",
                                                                                          "HOME": "/h"}
    assert result["NCCL_P2P_LEVEL"] == "SYS" and "NCCL_CUMEM_ENABLE" not in result
    several = environment(base, Path("/lib"), Path("/run/a.sock"), several=True)
    assert several["NCCL_CUMEM_ENABLE"] == "0"
    assert "libnccl" not in several["LD_PRELOAD"], "between devices of one process the program's own works"
    wide = environment(base, Path("/lib"), Path("/run/a.sock"), several=True, members=3)
    assert wide["LD_PRELOAD"] == "/lib/router/libcuda.so.1:libx.so" and wide["RGPU_LIST"] == "3"
    assert wide["LD_LIBRARY_PATH"] == "/lib/router:/lib" and wide["NUMBA_CUDA_DRIVER"] == "/lib/router/libcuda.so.1"
    ranks = environment(wide, Path("/lib"), Path("/run/a.sock"), several=True, ranks=True, members=3)
    assert ranks["LD_PRELOAD"] == "/lib/libcuda.so.1:libx.so", "one driver library, also in a run within a run"
    assert "RGPU_LIST" not in environment(wide, Path("/lib"), Path("/run/a.sock"))
    kept = {"NCCL_CUMEM_ENABLE": "1", "NCCL_P2P_LEVEL": "NVL"}
    several = environment(kept, Path("/lib"), Path("/run/a.sock"), several=True)
    assert {key: several[key] for key in kept} == kept


def test_ranks_of_a_gang_have_nccl_as_calls_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    ours = tmp_path / "nccl" / "libnccl.so.2"
    ours.parent.mkdir()
    ours.touch()

    def loaded(**base: str) -> bool:
        return str(ours) in environment(base, tmp_path, Path("/run/a.sock"), ranks="ranks" in base)["LD_PRELOAD"]

    assert loaded(ranks="") and not loaded() and loaded(RGPU_NCCL="calls")
    assert not loaded(ranks="", RGPU_NCCL="own")


@pytest.mark.parametrize("name", ["rgpu-0.1.0", "with spaces", "with:colon"])
def test_the_library_is_loaded_from_any_path(tmp_path: Path, name: str) -> None:
    """Whole, first, and without a word of the loader's on the program's stderr."""
    library, run = tmp_path / name / "lib", tmp_path / "run"
    library.mkdir(parents=True)
    run.mkdir()
    shutil.copy(libraries() / "libcuda.so.1", library)
    for _ in range(2):  # a program's child that is a launcher again
        given = environment({"PATH": os.environ["PATH"]}, library, run / "agent.sock")
    done = subprocess.run(["cat", "/proc/self/maps"], env=given, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and f"{library}/libcuda.so.1" in done.stdout
    found = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    assert subprocess.run(found, env={**given, "LD_PRELOAD": ""}).returncode == 0


def test_where_no_path_can_be_given_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="TMPDIR"):
        environment({}, tmp_path / "a b", tmp_path / "c d" / "agent.sock")
