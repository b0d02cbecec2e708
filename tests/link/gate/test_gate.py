"""The accepting thread of a port: what holds it up, what ends a connection, and that nothing ends the port."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.link.gate.budget import Budget, Stage
from rgpu.link.gate.gate import Gate, Visitor
from tests.support.eventually import eventually

ROOT = Path(__file__).resolve().parents[3]


class Echo(Visitor):
    """Proven by the word; then it is answered once."""

    def ready(self, sock: socket.socket, events: int) -> bool:
        data = sock.recv(100)
        if data == b"fail":
            raise RuntimeError("a mistake of ours")
        self.stage = Stage.SPEAKS
        if data == b"word":
            sock.send(b"hello")
            self.gate.proven(self)
        return bool(data)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate("test", ("127.0.0.1", 0), Budget(waiting=8, of_address=4, known=2, seconds=1.0), Echo)
    gate.start()
    yield gate
    gate.close()


def visit(gate: Gate, says: bytes = b"") -> socket.socket:
    sock = socket.create_connection(gate.bound, 5)
    sock.send(says)
    return sock


def test_silent_ones_make_room_for_one_that_speaks(gate: Gate) -> None:
    silent = [visit(gate) for _ in range(20)]
    assert visit(gate, b"word").recv(10) == b"hello"
    eventually(lambda: gate.waiting <= 4)
    for sock in silent[:10]:
        assert sock.recv(1) == b""  # the oldest were let go at once


def test_silence_is_borne_for_so_long_and_no_longer(gate: Gate) -> None:
    silent, began = visit(gate, b"w"), time.monotonic()
    assert silent.recv(1) == b"" and 0.5 < time.monotonic() - began < 5
    eventually(lambda: gate.waiting == 0)


def test_an_error_ends_that_connection_alone(gate: Gate) -> None:
    assert visit(gate, b"fail").recv(1) == b""
    assert visit(gate, b"word").recv(10) == b"hello"


def test_proven_ones_are_bounded_too(gate: Gate) -> None:
    known = [visit(gate, b"word") for _ in range(3)]
    assert [sock.recv(10) for sock in known] == [b"hello"] * 3
    assert known[0].recv(1) == b"" and gate.known == 2


def test_a_listening_socket_that_broke_is_opened_again(gate: Gate) -> None:
    assert visit(gate, b"word").recv(10) == b"hello"
    gate._listener.shutdown(socket.SHUT_RDWR)  # accept(2) now fails with EINVAL, for ever
    eventually(lambda: _answers(gate))


def _answers(gate: Gate) -> bool:
    try:
        with visit(gate, b"word") as sock:
            sock.settimeout(1)
            return sock.recv(10) == b"hello"
    except OSError:
        return False


STARVED = """
import os, resource, socket, sys, time
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from rgpu.link.gate.budget import Budget
from rgpu.link.gate.gate import Gate
from tests.link.gate.test_gate import Echo
gate = Gate("test", ("127.0.0.1", 0), Budget(8, 8, 8), Echo)
gate.start()
print(gate.bound[1], flush=True)
taken = []
sys.stdin.readline()
while True:
    try:
        taken.append(os.dup(0))
    except OSError:
        break
print("starved", flush=True)
sys.stdin.readline()
for fd in taken:
    os.close(fd)
print("fed", flush=True)
sys.stdin.readline()
"""


def test_a_process_without_descriptors_goes_on_when_it_has_some_again() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with subprocess.Popen([sys.executable, "-c", STARVED], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, preexec_fn=few, env={**os.environ, "PYTHONPATH": str(ROOT)}) as child:
        assert child.stdin and child.stdout
        port = int(child.stdout.readline())
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "starved\n"
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.send(b"word")
            sock.settimeout(1.0)
            with pytest.raises(TimeoutError):
                sock.recv(10)
            cpu = _cpu(child.pid)
            time.sleep(1.0)
            assert _cpu(child.pid) - cpu < 0.5  # it waits, it does not spin
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "fed\n"
            sock.settimeout(5.0)
            assert sock.recv(10) == b"hello"
        child.stdin.close()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
