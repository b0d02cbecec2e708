"""Workers are forked from a template: they are what executed ones are, and live without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.box import host, launch
from rgpu.server.box.walls import Mode
from rgpu.server.node.workers import boxes as module
from rgpu.server.node.workers import handles, homes
from rgpu.server.node.workers.boxes import Boxes
from rgpu.server.node.workers.handles import WorkerHandle
from rgpu.server.template import forking
from rgpu.server.template.forking import UNKNOWN, NotForked, Templates
from rgpu.session.errors import TimedOut
from tests.support.eventually import eventually

USERS = (391100, 391199)
#: Lines of /proc/PID/status in which two workers of a kind must not differ.
STATUS = ("Umask", "Uid", "Gid", "Groups", "NSpid", "SigIgn", "SigCgt", "SigBlk", "CapInh", "CapPrm", "CapEff",
          "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
missing = host.missing()
needs_root = pytest.mark.skipif("root" in missing, reason=missing.get("root", ""))


async def nobody(session: str, event: str, values: dict[str, Any]) -> None:
    pass


def start(boxes: Boxes, session: str) -> WorkerHandle:
    """Start a session's worker, as a daemon does, and leave it alone."""
    async def work() -> WorkerHandle:
        handle = await handles.start(boxes.directory, session, epoch=1, device="cpu:0", quota=1 << 20, state="empty",
                                     on_event=nobody, boxes=boxes)
        handle.leave()
        return handle

    return asyncio.run(work())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def shown(look: Callable[[], Any]) -> Any:
    """What ``look`` returns; processes that may not be read show root alone all of it."""
    try:
        return look()
    except PermissionError:
        return "not shown"


def looks(pid: int) -> dict[str, Any]:
    """What the kernel tells of a worker, without what differs between any two."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    own = (proc / "stat").read_text().rpartition(")")[2].split()
    home = homes_of(proc)
    return {name: status[name].split() for name in STATUS if name in status} | {
        "limits": shown((proc / "limits").read_text), "oom": shown((proc / "oom_score_adj").read_text),
        "personality": shown((proc / "personality").read_text),
        "namespaces as here": shown(lambda: {
            path.name: os.readlink(path) == os.readlink(f"/proc/self/ns/{path.name}")
            for path in (proc / "ns").iterdir()}),
        "leads its session": int(own[3]) == pid, "terminal": own[4], "input": shown(lambda: os.readlink(proc / "fd/0")),
        "descriptors": shown(lambda: sorted(
            os.readlink(path).partition(":")[0] for path in (proc / "fd").iterdir()
            if int(path.name) > 2 and not os.readlink(path).startswith("/"))),
        "folders": shown(lambda: [line.split(" - ")[0].split()[3:6]
                                  for line in (proc / "mountinfo").read_text().splitlines() if home not in line]),
        "arguments": [word for word in (proc / "cmdline").read_bytes().split(b"\0") if word and b"/" not in word]}


def homes_of(proc: Path) -> str:
    words = (proc / "cmdline").read_bytes().split(b"\0")
    return words[words.index(b"--home") + 1].decode()


@pytest.fixture
def boxes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Boxes]:
    """A node's boxes, of the kind that the test's parameter names."""
    directory = tmp_path / "pool" / "nodes" / "a"
    directory.mkdir(parents=True)
    users = USERS if getattr(request, "param", "") == "own users" else None
    if users is not None:
        for folder in (tmp_path, *list(tmp_path.parents)[:3]):  # so that other users get there
            folder.chmod(folder.stat().st_mode | 0o111)
    made = Boxes.of_node(directory, Mode.OFF if getattr(request, "param", "") == "off" else Mode.AUTO, users=users)
    yield made
    for handle in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle.pid, signal.SIGKILL)
    started.clear()


started: list[WorkerHandle] = []


def worker(boxes: Boxes, session: str) -> int:
    started.append(start(boxes, session))
    return started[-1].pid


@pytest.mark.parametrize("boxes", ["off", "auto", pytest.param("own users", marks=needs_root)], indirect=True)
def test_a_forked_worker_is_as_an_executed_one(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    forked = worker(boxes, "one")
    assert parent(forked) == boxes.templates.pid
    with monkeypatch.context() as patched:
        patched.setattr(forking, "KINDS", frozenset())
        executed = worker(boxes, "two")
    assert parent(executed) == os.getpid()
    ours, theirs = looks(forked), looks(executed)
    ours["arguments"][ours["arguments"].index(b"one")] = b"two"
    for same in (ours, theirs):  # own users differ
        same["Uid"], same["NSpid"] = [uid == str(os.getuid()) for uid in same["Uid"]], same["NSpid"][1:]
    assert ours == theirs


def test_workers_live_on_when_the_template_is_killed(boxes: Boxes) -> None:
    first, template = worker(boxes, "one"), boxes.templates.pid
    os.kill(template, signal.SIGKILL)
    eventually(lambda: not boxes.templates.pid)
    second = worker(boxes, "two")
    assert boxes.templates.pid not in (0, template) and parent(second) == boxes.templates.pid
    assert parent(first) not in (0, template) and asyncio.run(still_answers(boxes, started[0]))


async def still_answers(boxes: Boxes, handle: WorkerHandle) -> bool:
    adopted = await handles.adopt(boxes.directory, nobody, boxes)
    try:
        return handle.session in [one.session for one in adopted]
    finally:
        for one in adopted:
            one.leave()


def test_a_template_that_hangs_forks_nothing_later(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(boxes, "one")
    template = boxes.templates.pid
    os.kill(template, signal.SIGSTOP)
    monkeypatch.setattr(forking, "ANSWER_SECONDS", 0.5)
    with pytest.raises(TimedOut, match="the worker of two did not start: .* did not answer in 0 s"):
        start(boxes, "two")
    monkeypatch.undo()
    eventually(lambda: not Path(f"/proc/{template}").exists())
    assert len(homes.all_of(boxes.directory)) == 1
    assert parent(worker(boxes, "three")) == boxes.templates.pid


def test_the_template_ends_with_its_daemon(boxes: Boxes) -> None:
    pid, template = worker(boxes, "one"), boxes.templates.pid
    boxes.templates = Templates()
    eventually(lambda: not Path(f"/proc/{template}").exists())
    assert Path(f"/proc/{pid}").exists() and parent(pid) not in (0, template)


def test_a_worker_is_executed_where_no_template_starts(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(module, "log", SimpleNamespace(
        warning=lambda event, **values: logged.append(f"{event}: {values['reason']}")))
    real = forking.ROOM
    monkeypatch.setattr(forking, "ROOM", "--no-such-option")
    pid = worker(boxes, "one")
    assert parent(pid) == os.getpid() and not boxes.templates.pid
    assert len(logged) == 1 and "a worker is executed" in logged[0] and "ended before it served" in logged[0]
    monkeypatch.setattr(forking, "ROOM", real)
    assert parent(worker(boxes, "two")) == boxes.templates.pid, "it is tried again with the next"


def test_another_environment_is_another_template(boxes: Boxes) -> None:
    worker(boxes, "one")
    template = boxes.templates.pid
    worker(boxes, "two")
    assert boxes.templates.pid == template
    boxes.environ = {**os.environ, "OMP_NUM_THREADS": "3"}
    worker(boxes, "three")
    assert boxes.templates.pid != template


class Direct:
    """A template without a node, whose workers end at once: their box or their arguments are wrong."""

    def __init__(self, folder: Path) -> None:
        self.templates, self.log, self.kind = Templates(), folder / "log", "cpu"

    def fork(self, plan: dict[str, Any], *arguments: str) -> forking.Forked:
        with open(self.log, "ab") as output:
            return self.templates.fork(self.kind, os.environ, plan, arguments, {"PATH": os.defpath}, output.fileno())


@pytest.fixture
def direct(tmp_path: Path) -> Direct:
    return Direct(tmp_path)


OPEN: dict[str, Any] = {"walls": [], "places": [], "joins": [], "uid": os.getuid(), "gid": os.getgid(),
                        "owner": os.getuid()}


def test_ends_and_their_status_are_seen(direct: Direct) -> None:
    wrong = direct.fork(OPEN, "--no-such-option")
    assert wrong.wait(20) == 2 and wrong.poll() == 2 and "--device, --socket" in direct.log.read_text()
    walled = direct.fork({**OPEN, "joins": ["/no/such/group"]})
    assert walled.wait(20) == launch.FAILED and "/no/such/group" in direct.log.read_text()
    stopped = direct.fork({**OPEN, "joins": [fifo(direct.log.with_name("fifo"))]})
    assert stopped.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.1)
    stopped.kill()
    assert stopped.wait(20) == -signal.SIGKILL
    stopped.kill()  # no other process, whatever has its number now
    orphan = direct.fork({**OPEN, "joins": [fifo(direct.log.with_name("other"))]})
    os.kill(direct.templates.pid, signal.SIGKILL)
    eventually(lambda: not direct.templates.pid)
    assert orphan.poll() is None
    orphan.kill()
    assert orphan.wait(20) == UNKNOWN


def fifo(path: Path) -> str:
    """A file that a process waits for while it goes into its box."""
    os.mkfifo(path)
    return str(path)


def test_a_refusal_ends_nothing(direct: Direct) -> None:
    direct.fork(OPEN, "--no-such-option").wait(20)
    template = direct.templates.pid
    with pytest.raises(NotForked, match="KeyError: 'walls'"):
        direct.fork({})
    with pytest.raises(NotForked, match="the limit is"):
        direct.fork(OPEN, "x" * 200_000)
    assert direct.fork(OPEN, "--no-such-option").wait(20) == 2
    assert template, "a message that is too long is refused by a new template, too"


FORKS_APART = """
import ctypes, json, os, sys
from rgpu.server.template.forking import NotForked, Templates
ctypes.CDLL(None).prctl(24, 21)  # PR_CAPBSET_DROP of CAP_SYS_ADMIN: what is executed from here on lacks it
try:
    Templates().fork("cpu", os.environ, json.loads(sys.argv[1]), [], {}, 2)
except NotForked as error:
    print(error)
"""


def test_a_process_namespace_that_cannot_be_made_is_reported() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS_APART, json.dumps({**OPEN, "walls": ["processes"]})],
                          capture_output=True, text=True, timeout=60, check=True)
    assert "no process namespace could be made" in done.stdout and "unshare of processes" in done.stderr


@pytest.mark.parametrize("kind", sorted(forking.KINDS))
def test_it_has_one_thread_and_no_driver(direct: Direct, kind: str) -> None:
    """A fork copies one thread; a driver's state does not survive one."""
    direct.kind = kind
    direct.fork(OPEN, "--no-such-option").wait(20)
    proc = Path(f"/proc/{direct.templates.pid}")
    assert len(list((proc / "task").iterdir())) == 1
    maps = shown((proc / "maps").read_text)
    assert (maps == "not shown") == (os.getuid() != 0) and "libcuda" not in maps and "libnvidia" not in maps
    assert sys.executable.encode() in (proc / "cmdline").read_bytes()
