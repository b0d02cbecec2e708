"""On a terminal: the program is in the foreground, Ctrl-C, Ctrl-Z and fg do what they do without a resident."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.agent.resident_user import ResidentUser
from tests.support.eventually import eventually
from tests.support.processes import state

ASKS = "import os, sys; print(*(os.isatty(n) for n in range(3)), os.tcgetpgrp(0) == os.getpgrp(), " \
       "os.open('/dev/tty', os.O_RDWR) > 2)"


class Terminal:
    """A shell with job control on a terminal of its own."""

    def __init__(self, user: ResidentUser, resident: bool) -> None:
        environment = {**user.environment, "PS1": "prompt> ", "RGPU_RESIDENT": "on" if resident else "off"}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.seen = b""
        self.rgpu = shlex.join(user.command())
        self.type("stty -echo; bind 'set enable-bracketed-paste off' 2>/dev/null; echo rea''dy")
        self.until("ready")

    def type(self, line: str) -> None:
        os.write(self.fd, line.encode() + b"\n")

    def press(self, key: bytes) -> None:
        os.write(self.fd, key)

    def until(self, word: str, within: float = 30.0) -> str:
        """Everything up to that word."""
        deadline = time.monotonic() + within
        while word.encode() not in self.seen:
            assert time.monotonic() < deadline, (word, self.seen)
            if select.select([self.fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.fd, 65536)
        before, _, self.seen = self.seen.partition(word.encode())
        return before.decode(errors="replace")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.fd)
        os.waitpid(self.pid, 0)


@pytest.fixture(params=[True, False], ids=["resident", "without"])
def terminal(user: ResidentUser, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    one = Terminal(user, request.param)
    one.type(f"{one.rgpu} --lazy -- sh -c 'ls /proc/$PPID/task | wc -l; echo counted'")
    assert (one.until("counted").split()[-1] == "1") == request.param
    yield one
    one.close()


def test_the_program_has_the_terminal(terminal: Terminal) -> None:
    terminal.type(f'{terminal.rgpu} -- {shlex.quote(sys.executable)} -c "{ASKS}"; echo en""ded')
    assert terminal.until("ended").split()[-5:] == ["True"] * 5


def test_control_c_ends_the_program_and_the_shell_knows(terminal: Terminal) -> None:
    terminal.type(f"{terminal.rgpu} -- sh -c 'echo u''p; exec sleep 30'; echo not; echo not")
    terminal.until("up")
    terminal.press(b"\x03")
    terminal.type("echo status $?.")
    assert "not" not in terminal.until("status 130.")  # bash gives the line up, as its command died of SIGINT


def test_control_c_reaches_the_program_once(terminal: Terminal) -> None:
    terminal.type(f"{terminal.rgpu} -- bash -c 'trap \"((n++))\" INT; echo u''p; while ((!n)); do sleep 0.1; done; "
                  "sleep 0.5; echo came $n.'")
    terminal.until("up")
    terminal.press(b"\x03")
    terminal.until("came 1.")


def test_control_z_stops_it_and_fg_goes_on(terminal: Terminal) -> None:
    terminal.type(f"{terminal.rgpu} -- sh -c 'echo u''p $$.; read word; echo re''ad $word.; exit 4'; echo status $?.")
    terminal.until("up ")
    pid = int(terminal.until(".").strip())
    terminal.press(b"\x1a")
    terminal.until("Stopped")
    terminal.until("prompt> ")
    eventually(lambda: state(pid) == "T")  # else its read, which is under way, may get what is typed to the shell
    terminal.type("jobs -r; echo none ru''ns; fg")
    terminal.until("none runs")
    time.sleep(0.5)  # bash has given the terminal away by then
    terminal.type("word")
    terminal.until("read word.")


def test_the_end_of_the_terminal_ends_the_program(terminal: Terminal) -> None:
    terminal.type(f"{terminal.rgpu} -- sh -c 'echo u''p $$.; exec sleep 60'")
    terminal.until("up ")
    pid = int(terminal.until(".").strip())
    os.close(terminal.fd)
    terminal.fd = os.open("/dev/null", os.O_RDWR)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
