"""The agent of one run, forked by a resident: it becomes what `rgpu run` would be, but for the program.

==========================  =============================================================================
`rgpu run` is gone          what its agent does
==========================  =============================================================================
before a place was asked    ends
for
while a place is asked for  withdraws the request, gives the session back
while the program runs      ends as if killed itself: the program's next CUDA call returns an error
after the program's end     ends the sessions as ever
==========================  =============================================================================
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from socket import socket
from typing import TYPE_CHECKING

from rgpu.api.settings import Settings
from rgpu.cli import plain_run
from rgpu.cli.resident import frames
from rgpu.session.errors import Refused, RgpuError

if TYPE_CHECKING:
    from rgpu.client.run.agent import Agent

REQUEST_SECONDS = 10.0  #: that `rgpu run` may take to say what it wants
GONE = 137  #: exit status of an agent whose `rgpu run` was killed, as of one killed itself


class HandedOver:
    """`rgpu run` at the other end of a socket; a ``Front`` of the launcher. The run's main thread uses it."""

    def __init__(self, sock: socket, pid: int) -> None:
        self.pid = pid
        self.died_by = 0  #: the signal that `rgpu run` is to end by
        self._sock = sock
        self._lock = threading.Condition()
        self._came: list[int] = []
        self._program: int | None = None  #: its pid
        self._status: int | None = None  #: its exit code, or minus the signal
        self._gone = False
        self._interrupted: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Begin to hear what comes, in a thread."""
        threading.Thread(target=self._hear, name="hears-run", daemon=True).start()

    def place(self, agent: Agent, program: str) -> int:
        """Make the session: 0, or minus the signal that came before. Raises what the pool refuses it with."""
        with contextlib.suppress(frames.Gone):  # which the thread hears too
            frames.send(self._sock, frames.PLACING)
        try:
            agent.place(program, lambda: signal.Signals(self._came[0]).name if self._came else "")
        except Refused:
            if not self._came:
                raise
        return -self._came[0] if self._came else 0

    def run(self, command: Sequence[str], environ: dict[str, str], agent: Agent,
            started: Callable[[int], None]) -> int:
        """Have the program run; returns its exit code, or minus the signal."""
        self._interrupted = agent.interrupted
        try:
            frames.send(self._sock, frames.GO, frames.pack(_changes(os.environ, environ)))
        except frames.Gone:
            return -signal.SIGKILL
        with self._lock:
            self._lock.wait_for(lambda: self._program or self._status is not None or self._gone)
            if self._program is None:  # it could not be started, or `rgpu run` was killed just then
                return -signal.SIGKILL if self._status is None else self._status
        agent.child_started(self._program)
        started(self._program)
        with self._lock:
            self._lock.wait_for(lambda: self._status is not None or self._gone)
            if self._status is None:
                os._exit(GONE)
            return self._status

    def die_by(self, number: int) -> None:
        """Have `rgpu run` end by that signal."""
        self.died_by = number

    def _hear(self) -> None:
        with contextlib.suppress(frames.Gone):
            while True:
                kind, body = frames.receive(self._sock)
                self._take(kind, frames.value(body))
        with self._lock:
            self._gone = True
            self._came.append(signal.SIGKILL)
            self._lock.notify_all()

    def _take(self, kind: bytes, value: int) -> None:
        with self._lock:
            if kind == frames.STARTED:
                self._program = value
            elif kind == frames.ENDED:
                self._status = value
            elif kind == frames.SIGNAL:
                self._came.append(value)
                if value == signal.SIGINT:
                    self._interrupted()
            self._lock.notify_all()


def serve(sock: socket, surroundings: bytes) -> None:
    """Do what the `rgpu run` at the other end of the socket wants. Raises :class:`frames.Gone` where it is not there.

    ``surroundings``: of the resident.
    """
    pid, _ = frames.peer(sock)
    frames.send(sock, frames.ACCEPTED)
    sock.settimeout(REQUEST_SECONDS)
    body, (folder, stderr) = frames.receive_request(sock)
    sock.settimeout(None)
    umask, count, *strings = frames.unpack(body)
    words, rest = strings[:int(count)], strings[int(count):]
    if rest.pop() != surroundings:
        frames.send(sock, frames.DECLINED)
        return
    _become(int(umask), words, rest, folder, stderr)
    plain = plain_run.read(sys.argv[1:])
    if plain is None or not _wanted(plain):
        frames.send(sock, frames.DECLINED)
        return
    front = HandedOver(sock, pid)
    front.listen()
    code = _outcome(plain, front)
    frames.send(sock, *((frames.DIE, frames.number(front.died_by)) if front.died_by else
                        (frames.EXIT, frames.number(code))))


def _become(umask: int, words: list[bytes], environment: list[bytes], folder: int, stderr: int) -> None:
    """Take over from `rgpu run` what is its own."""
    os.setsid()  # a signal to the resident's group is none to this run
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(umask)
    os.fchdir(folder)
    os.dup2(stderr, 2)
    for descriptor in (folder, stderr):
        os.close(descriptor)
    os.environb.clear()
    for entry in environment:
        name, _, value = entry.partition(b"=")
        os.environb[name] = value
    time.tzset()
    tempfile.tempdir = None
    sys.argv[:] = ["rgpu", *(os.fsdecode(word) for word in words)]
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("rgpu-agent")


def _wanted(plain: plain_run.PlainRun) -> bool:
    """Whether the settings leave it to a resident; what is wrong with them is told with the run."""
    try:
        return bool(Settings({"pool": plain.values.get("pool")}).resident)
    except RgpuError:
        return True


def _outcome(plain: plain_run.PlainRun, front: HandedOver) -> int:
    """Run it; the exit code."""
    try:
        plain.carry_out(front=front)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter of `rgpu run` would tell it
        traceback.print_exc()
    return 1


def _changes(before: dict[str, str] | os._Environ[str], after: dict[str, str]) -> list[bytes]:
    """What is to be set, as NAME=VALUE, and unset, as NAME."""
    return [os.fsencode(f"{name}={value}") for name, value in after.items() if before.get(name) != value] + \
        [os.fsencode(name) for name in before if name not in after]
