"""kill -9 of a worker, a daemon, the coordinator, and a cut link, at points spread over all kinds of calls.

224 seeded points: who × what is under way × when in it. Whole in `make sweep`
(a table of points and recovery times in bench/results/), 14 of them in `make
test`. *Silence* is the longest time that the program printed nothing after the
fault: detection, recovery and replay together, and the work itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.faults import WatchedPool
from tests.support.pools.pool import ROOT, Program, VerbError
from tests.support.pools.sweep import SWEEP, sample

ACTORS = ("worker", "daemon", "coordinator", "link")
PHASES = ("launch", "copy_in", "copy_out", "load", "wait", "graph", "checkpoint")
TIMES = 8
CASES = [f"{actor}/{phase}/{number}" for actor in ACTORS for phase in PHASES for number in range(TIMES)]
ROUNDS = 8
PROGRAM = ROOT / "tests" / "scenarios" / "programs" / "phases.py"
LINE = re.compile(r"^at (\w+) (\d+)$")
DOWN = 0.5  #: seconds that a link stays cut


@dataclass
class InjectedFault:
    """What a case did and what it cost, seconds."""

    case: str
    line: str = ""
    silence: float = 0.0
    total: float = 0.0
    epoch: int = 0


def run(pool: WatchedPool, name: str) -> Program:
    return pool.run(sys.executable, "-W", "ignore", PROGRAM, ROUNDS, released(pool, name), name=name)


def released(pool: WatchedPool, name: str) -> Path:
    """The file that lets a program into its last round."""
    return Path(pool.folder / f"{name}.released")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedPool]:
    """Three nodes behind proxies; daemons that are killed are started again by the cases."""
    pool = WatchedPool(tmp_path_factory.mktemp("kill"), proxied=True)
    if SWEEP:  # as where there are more processors; other scenarios, and the sample, do without
        pool.environment["RGPU_IMAGE_PROCESSES"] = "1"
    with pool:
        yield pool


@pytest.fixture(scope="module")
def expected(killed: WatchedPool) -> str:
    released(killed, "undisturbed").touch()
    return run(killed, "undisturbed").finish()


def wait_line(program: Program, phase: str, number: int) -> str:
    """Until the program says that it is at the phase."""
    wanted = f"at {phase} {number}"
    eventually(lambda: wanted in program.lines or program.process.poll() is not None, lambda: program.lines[-3:], 120,
               every=0.001)
    assert wanted in program.lines, program.errors[-20:]
    return wanted


def host_of_leader(pool: WatchedPool) -> str:
    return next((row["host"] for row in pool.living() if row["leader"]), "")


def revive(pool: WatchedPool, host: str) -> None:
    """Start a node's daemon again, on the ports that its proxy knows."""
    proxy = pool.proxies[host]
    with open(pool.folder / f"{host}.log", "ab") as log:
        pool._daemons.append(subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", str(pool.lease),
             "--data-port", str(proxy.target[1]), "--advertise-data", f"127.0.0.1:{proxy.address[1]}"],
            env=pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log))


def settle(pool: WatchedPool) -> None:
    """All three nodes are there again."""
    def there() -> bool:
        with contextlib.suppress(VerbError):
            rows = pool.living()
            return len(rows) == 3 and all(row["state"] == "ready" for row in rows) and any(
                row["leader"] for row in rows)
        return False

    eventually(there, lambda: pool.logs()[-5000:], 60, every=0.2)


def strike(pool: WatchedPool, actor: str, row: dict[str, object]) -> str:
    """Break the actor; the host whose daemon has to be started again, if one was killed."""
    host = str(row["host"])
    if actor == "worker":
        os.kill(int(str(row["worker_pid"])), signal.SIGKILL)
        return ""
    if actor == "link":
        pool.proxies[host].set("drop")
        time.sleep(DOWN)
        pool.proxies[host].set("pass")
        return ""
    target = host if actor == "daemon" else host_of_leader(pool) or host
    os.kill(int(pool.node(target)["pid"]), signal.SIGKILL)
    return target


def watch(program: Program, fault: InjectedFault, since: float) -> None:
    """Until the program ends: the longest silence after ``since``."""
    seen, last = len(program.lines), since
    while program.process.poll() is None and time.monotonic() - since < 150:
        if len(program.lines) > seen:
            seen, now = len(program.lines), time.monotonic()
            fault.silence, last = max(fault.silence, now - last), now
        time.sleep(0.002)
    fault.silence = max(fault.silence, time.monotonic() - last)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", sample(CASES, 9, seed=5))
def test_a_fault_at_any_moment(case: str, killed: WatchedPool, expected: str) -> None:
    actor, phase, number = case.split("/")
    chance = random.Random(case)
    settle(killed)
    name = case.replace("/", "-")
    fault, revived = InjectedFault(case), ""
    program = run(killed, name)
    at, when = chance.randrange(2, ROUNDS - 3), chance.random() * 0.15
    wait_line(program, "launch", 1)
    row = killed.wait_state(name, "running")
    asked: subprocess.Popen[str] | None = None
    fault.line = wait_line(program, chance.choice(PHASES[:-1]) if phase == "checkpoint" else phase, at)
    if phase == "checkpoint":
        asked = subprocess.Popen([sys.executable, "-m", "rgpu.cli.main", "checkpoint", name], env=killed.environment,
                                 cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        when += chance.choice((0.4, 1.0,
                               1.6))  # it starts as a process of its own, and so does what writes the checkpoint
    time.sleep(when)
    assert program.process.poll() is None, "the program was over before the fault"
    began = time.monotonic()
    revived = strike(killed, actor, row)
    released(killed, name).touch()
    if revived:
        revive(killed, revived)
    watch(program, fault, began)
    assert program.finish(60) == expected, f"another digest after a fault at {fault.line}"
    fault.total = time.monotonic() - began
    with contextlib.suppress(VerbError):
        fault.epoch = int(killed.session(name)["epoch"])
    if actor == "worker":
        assert fault.epoch > row["epoch"], "nothing was recovered"
    if asked is not None:
        _, said = asked.communicate(timeout=60)
        assert "Traceback" not in said, said
    table(fault)


def table(fault: InjectedFault) -> None:
    """A row of the sweep's table; the file keeps one for each case."""
    text = f"{fault.case:24s} {fault.line:16s} epoch {fault.epoch} silence {fault.silence:6.2f} s "\
           f"end {fault.total:6.2f} s"
    print(text)
    if SWEEP:
        folder = Path(os.environ.get("RGPU_SWEEP_OUT", ROOT / "bench" / "results"))
        with open(folder / f"{time.strftime('%Y-%m-%d')}-kill-sweep.txt", "a") as file:
            file.write(text + "\n")


def test_there_are_enough_points() -> None:
    assert len(CASES) == len(set(CASES)) >= 200
    assert {f"phase_{phase}" for phase in PHASES[:-1]} <= set(re.findall(r"def (phase_\w+)", PROGRAM.read_text()))
