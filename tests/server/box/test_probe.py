"""What a worker's code reaches from inside each kind of box, tried by a program in a worker's place."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.server.box import host, launch
from rgpu.server.box.walls import Mode
from rgpu.server.node.workers import handles, homes
from rgpu.server.node.workers.boxes import Boxes

PROBE = Path(__file__).with_name("probe.py")
USERS = (391000, 391099)
#: What no box of any kind lets through, but for `off`.
NEVER = {"the pool's secret", "another worker's token", "a file of another worker", "another worker's socket",
         "a file beside the pool", "the system's passwords", "TCP", "an abstract socket", "tracing",
         "memory by process_vm_readv", "memory by /proc", "environment by /proc", "a user namespace", "a mount",
         "being root"}
missing = host.missing()
needs_walls = pytest.mark.skipif("landlock" in missing or "seccomp" in missing, reason=str(missing))
needs_root = pytest.mark.skipif("root" in missing, reason=missing.get("root", ""))


async def nobody(session: str, event: str, values: dict[str, Any]) -> None:
    pass


@contextlib.contextmanager
def neighbourhood(folder: Path, boxes: Boxes) -> Iterator[dict[str, Any]]:
    """A daemon's files, another worker in the same kind of box, and a process that holds something, for the probe."""
    directory = boxes.directory
    (folder / "secret").write_bytes(secrets.token_bytes(32))
    victim = subprocess.Popen([sys.executable, "-c", "import ctypes, time; b = ctypes.create_string_buffer(b'a secret')"
                               "; print(ctypes.addressof(b), flush=True); time.sleep(600)"], stdout=subprocess.PIPE,
                              text=True)
    assert victim.stdout is not None
    address = int(victim.stdout.readline())

    async def other() -> handles.WorkerHandle:
        handle = await handles.start(directory, "other", epoch=1, device="cpu:0", quota=1 << 20, state="empty",
                                     on_event=nobody, boxes=boxes)
        handle.leave()  # as when its daemon is being restarted: nobody is connected
        return handle

    pid = -1
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        try:
            tcp.bind(("127.0.0.1", 0))
            tcp.listen(8)
            name = f"rgpu-{secrets.token_hex(8)}"
            abstract.bind("\0" + name)
            abstract.listen(8)
            handle = asyncio.run(other())
            pid, home = handle.pid, handle.home
            assert home is not None
            (home.path / "theirs").write_text("of another session")
            yield {"victim": victim.pid, "address": address, "secret": str(folder / "secret"),
                   "token": str(home.path.with_suffix(".token")), "file": str(home.path / "theirs"),
                   "socket": str(home.socket), "outside": str(folder / "outside"),
                   "tcp": list(tcp.getsockname()), "abstract": name}
        finally:
            victim.kill()
            victim.wait()
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                for left in homes.all_of(directory):
                    boxes.release(left)


def tried(folder: Path, boxes: Boxes) -> dict[str, Any]:
    """What the probe says, from inside such a box."""
    folder.chmod(0o755)  # pytest's own is nobody else's to enter: that is not what is tested
    with neighbourhood(folder, boxes) as given:
        home = homes.make(boxes.directory)
        script = home.path / "probe.py"  # a worker's code came to be what it is from inside, too
        script.write_bytes(PROBE.read_bytes())
        script.chmod(0o644)
        output = folder / "output"
        process = boxes.execute([sys.executable, str(script), json.dumps(given)], home, output)
        status = process.wait(60)
        text = output.read_text()
        assert status == 0, text
        assert (home.path / "mine").read_text() == "a worker writes in its own folder"
        boxes.release(home)
        assert not home.path.exists()
        return json.loads(text.splitlines()[-1])


def got(found: dict[str, Any]) -> set[str]:
    return {name for name, (outcome, _) in found["attempts"].items() if outcome == "got"}


def node(folder: Path) -> Path:
    """A node's directory below a folder as a pool has it."""
    directory = folder / "nodes" / "a"
    directory.mkdir(parents=True, mode=0o700)
    return directory


def test_without_walls_most_of_it_is_reached(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    found = tried(tmp_path, Boxes.of_node(node(tmp_path), Mode.OFF))
    wanted = {"the pool's secret", "another worker's token", "a file of another worker", "a file beside the pool",
              "TCP", "an abstract socket", "tracing", "memory by process_vm_readv", "memory by /proc",
              "environment by /proc", "a signal"}
    assert wanted <= got(found), found["attempts"]
    assert "another worker's socket" not in got(found), "a worker obeys nobody who does not know its token"


def test_the_environment_is_made_from_nothing_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "RGPU_JOIN", "RGPU_STORE_CREDENTIALS", "MY_TOKEN", "RGPU_REGISTRY"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("RGPU_ENGINE_RING", "1048576")
    found = tried(tmp_path, Boxes.of_node(node(tmp_path), Mode.OFF))
    assert {"CUDA_LAUNCH_BLOCKING", "RGPU_ENGINE_RING", "PATH", "TMPDIR"} <= set(found["environment"])
    allowed = {"PATH", "LANG", "TZ", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH"}
    others = set(found["environment"]) - allowed
    assert all(name.startswith(("CUDA_", "NVIDIA_", "NCCL_", "LC_", "PYTHON", "RGPU_", "OMP_", "NUMBA_"))
               for name in others), others
    assert not {name for name in others if name.startswith("RGPU_")} & {"RGPU_JOIN", "RGPU_REGISTRY",
                                                                        "RGPU_STORE_CREDENTIALS", "RGPU_BOX_PLAN"}
    assert found["status"]["NoNewPrivs"] == "1" and found["umask"] == "0o77"
    assert int(found["oom"]) >= 500 and found["fds"][:3] == [0, 1, 2] and len(found["fds"]) <= 4, found["fds"]
    assert any(line.split()[:5] == ["Max", "core", "file", "size", "0"] for line in found["limits"].splitlines())


@needs_walls
def test_without_any_right_files_networks_and_other_processes_are_out_of_reach(tmp_path: Path) -> None:
    boxes = Boxes.of_node(node(tmp_path), Mode.AUTO)
    assert {"files", "syscalls", "capabilities"} <= set(boxes.names)
    found = tried(tmp_path, boxes)
    assert not got(found) & NEVER, found["attempts"]
    assert found["status"]["Seccomp"] == "2"
    assert int(found["status"]["CapBnd" if os.getuid() == 0 else "CapEff"], 16) == 0


@needs_walls
@needs_root
def test_with_a_user_of_its_own_nothing_else_is_even_seen(tmp_path: Path) -> None:
    boxes = Boxes.of_node(node(tmp_path), Mode.AUTO, users=USERS)
    assert {"user", "mounts", "processes", "ipc", "network"} <= set(boxes.names)
    found = tried(tmp_path, boxes)
    assert not got(found), found["attempts"]
    uids = {int(word) for word in found["status"]["Uid"].split()}
    assert len(uids) == 1 and USERS[0] <= uids.pop() <= USERS[1] and found["status"]["Pid"] == "1"
    assert "No such file" in found["attempts"]["the pool's secret"][1]


@needs_root
def test_two_workers_never_have_one_user_and_a_range_can_be_used_up(tmp_path: Path) -> None:
    boxes = Boxes.of_node(node(tmp_path), Mode.AUTO, users=(USERS[0], USERS[0] + 1))
    made = [homes.make(boxes.directory) for _ in range(3)]
    tmp_path.chmod(0o755)
    users = set()
    for home in made[:2]:
        assert boxes.execute([sys.executable, "-c", ""], home, tmp_path / "log").wait(30) == 0, \
            (tmp_path / "log").read_text()
        users.add(home.path.stat().st_uid)
    assert users == {USERS[0], USERS[0] + 1}
    with pytest.raises(Exception, match="have a worker"):
        boxes.execute([sys.executable, "-c", ""], made[2], tmp_path / "log")
    boxes.release(made[0])
    assert boxes.execute([sys.executable, "-c", ""], made[2], tmp_path / "log").wait(30) == 0
    for home in made:
        boxes.release(home)


def test_strict_refuses_to_start_without_every_wall_and_says_which(tmp_path: Path) -> None:
    why = r"user: (no users were given \(--worker-uids|the daemon \(user \d+\) has no CAP_)"
    with pytest.raises(Exception, match=why):
        Boxes.of_node(node(tmp_path), Mode.STRICT)


def test_a_wall_that_cannot_stand_ends_the_start_with_one_line(tmp_path: Path) -> None:
    plan = {"walls": [], "places": [], "joins": [str(tmp_path / "no" / "cgroup.procs")], "uid": 0, "gid": 0, "owner": 0,
            "argv": [sys.executable, "-c", "print('it went without')"]}
    done = subprocess.run([sys.executable, "-E", "-S", launch.__file__], env={launch.PLAN: json.dumps(plan)},
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == launch.FAILED and done.stdout == ""
    assert done.stderr.startswith("the worker's box cannot be made: ") and done.stderr.count("\n") == 1


def test_this_process_has_no_part_in_its_childrens_namespaces(tmp_path: Path) -> None:
    """A thread leaves the process namespace for its children alone: the daemon's others stay where they are."""
    before = os.readlink("/proc/self/ns/pid_for_children")
    if "root" not in missing:
        boxes = Boxes.of_node(node(tmp_path), Mode.AUTO, users=USERS)
        home = homes.make(boxes.directory)
        boxes.execute([sys.executable, "-c", ""], home, tmp_path / "log").wait(30)
        boxes.release(home)
    assert os.readlink("/proc/self/ns/pid_for_children") == before
    assert ctypes.CDLL(None).personality(0xFFFFFFFF) & 0x0040000 == 0
