"""What the agent tells monitors, what it learns of refused calls, and versions at session.create and ATTACH."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.client.run.agent import Agent, Options
from rgpu.client.shim_link.usage_page import Usage
from rgpu.link import versions
from rgpu.link.messages.shim import OBSERVE, OBSERVED, REFUSED, UNSUPPORTED, USAGE
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.observed import Observation
from tests.support.agent.fake_pool import FakePool
from tests.support.agent.fake_shim import FakeShim
from tests.support.eventually import eventually

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    pool = FakePool(tmp_path / "pool")
    yield pool
    pool.stop()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def agent(pool: FakePool, complaints: list[str]) -> Iterator[Agent]:
    agent = Agent(Options("heat", memory=1 << 20), pool.user, pool.endpoints, complain=complaints.append)
    agent.start()
    yield agent
    agent.close()


def observe(path: str, protocol: int = 1) -> tuple[int, bytes]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        sock.sendall(struct.pack("<III", 4, OBSERVE, protocol))
        data = b""
        while part := sock.recv(1 << 16):
            data += part
    length, kind = struct.unpack_from("<II", data)
    assert len(data) == 8 + length
    return kind, data[8:]


def usage_page(*used: int, magic: bytes = b"RGPUUSE1", size: int = 4096, seals: int = SEALS) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("usage", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    page = mmap.mmap(fd, size)
    page[:8] = magic
    struct.pack_into(f"<{len(used)}Q", page, 64, *used)
    return fd, page


def send_usage(shim: FakeShim, fd: int) -> None:
    shim.sock.sendmsg([struct.pack("<II", 0, USAGE)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def test_looking_makes_no_session(pool: FakePool, agent: Agent) -> None:
    kind, body = observe(str(agent.socket_path))
    seen = Observation.decode(body)
    assert kind == OBSERVED and not seen.live and seen.release == "570.1" and seen.used == (0,)
    assert (seen.facts.devices[0].name, seen.facts.quota, seen.processes) == ("candidate", 1 << 20, ())
    assert pool.log == []


def test_a_full_pool_and_a_strange_library(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    pool.places = 0
    kind, body = observe(str(agent.socket_path))
    assert kind == REFUSED and struct.unpack_from("<i", body)[0] == 100
    assert complaints == []  # a monitor's question is no trouble of the user's
    assert observe(str(agent.socket_path), protocol=9)[0] == REFUSED


def test_a_session_is_seen_with_what_its_shim_counts(pool: FakePool, agent: Agent) -> None:
    pool.created_more = {"driver_release": "580.65.06"}
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    fd, page = usage_page(6 << 20)
    send_usage(shim, fd)
    seen = Observation.decode(observe(str(agent.socket_path))[1])
    assert seen.live and seen.facts.name == "heat" and seen.release == "580.65.06" and seen.used == (6 << 20,)
    assert [(p.pid, p.device, p.used) for p in seen.processes] == [(os.getpid(), 0, 6 << 20)]
    struct.pack_into("<Q", page, 64, 1 << 60)  # more than its quota: what the shim says is not believed
    assert Observation.decode(observe(str(agent.socket_path))[1]).used == (1 << 30,)
    # Another process of the run, without a session of its own, sees this one.
    code = ("import sys; from tests.client.shim_link.test_observe import observe; "
            "from rgpu.session.observed import Observation as O; print(O.decode(observe(sys.argv[1])[1]).facts.name)")
    other = subprocess.run([sys.executable, "-c", code, str(agent.socket_path)], capture_output=True, text=True,
                           cwd=Path(__file__).parents[3], check=True)
    assert other.stdout == "heat\n"
    shim.goodbye()
    eventually(lambda: not Observation.decode(observe(str(agent.socket_path))[1]).live)


def test_waits_reach_the_node_the_longest_first(pool: FakePool, agent: Agent) -> None:
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    fd, page = usage_page(6 << 20)
    for number in (*range(1, 13), 99, 187):  # no wire call has the last two numbers
        struct.pack_into("<2Q", page, 1088 + 16 * number, number, number * 1_000_000_000)
    send_usage(shim, fd)
    worker = pool.sessions["heat"]
    eventually(lambda: "waits" in worker.stats and worker.stats["waits"])
    longest = [(BY_ID[number].name, [number, number]) for number in range(12, 4, -1)]
    assert list(worker.stats["waits"].items()) == longest
    shim.goodbye()


@pytest.mark.parametrize("bad", [{"magic": b"RGPUUSE2"}, {"size": 8192}, {"seals": fcntl.F_SEAL_SEAL}])
def test_a_bad_page_is_refused(bad: dict) -> None:  # type: ignore[type-arg]
    fd, page = usage_page(1, **bad)
    with pytest.raises(Corrupt):
        Usage(fd)
    with pytest.raises(OSError):
        os.fstat(fd)
    page.close()


def test_refused_calls_reach_the_node_once_each(pool: FakePool, agent: Agent) -> None:
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    for name in (b"cuGraphLaunch", b"cuIpcGetMemHandle", b"cuGraphLaunch"):
        shim._send(UNSUPPORTED, name)
    worker = pool.sessions["heat"]
    eventually(lambda: worker.stats.get("unsupported_calls") == ["cuGraphLaunch", "cuIpcGetMemHandle"])
    for number in range(400):  # a program cannot make the list as long as it likes
        shim._send(UNSUPPORTED, b"cuX%d" % number)
    eventually(lambda: len(worker.stats["unsupported_calls"]) == 256)
    shim.goodbye()


@pytest.mark.parametrize("name", [b"", b"cu Launch", b"x" * 101, b"cu\nLaunch"])
def test_a_name_that_is_none_ends_the_session(pool: FakePool, agent: Agent, name: bytes) -> None:
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    shim._send(UNSUPPORTED, name)
    shim.wait(lambda: shim.eof)


def test_a_pool_of_another_version_is_refused(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    pool.created_more = {"versions": {"package": "9.9.9", "control": 9, "data": 1}}
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    assert "9.9.9" in shim.refused and versions.ours()["package"] in shim.refused
    assert len(complaints) == 1 and "9.9.9" in complaints[0]
    assert pool.sessions  # it had been made …
    eventually(lambda: pool.said("session.end"))  # … and is given back


@pytest.mark.parametrize("answer", [
    {"versions": {"package": "9.9.9", "control": 1, "data": 9}},
    {"refused": VersionMismatch("the client is rgpu 0.1.0, this side is rgpu 9.9.9").as_dict()}])
def test_a_worker_of_another_version_ends_the_session(pool: FakePool, agent: Agent, complaints: list[str],
                                                      answer: dict) -> None:  # type: ignore[type-arg]
    """No later try could do better, so there is none, and the user hears why."""
    pool.attached_more = answer
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    shim.wait(lambda: shim.eof)
    eventually(lambda: complaints)
    assert "9.9.9" in complaints[0] and versions.ours()["package"] in complaints[0]
