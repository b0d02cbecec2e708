"""The agent of one run, forked by a resident: it does the work of `rgpu run`, except that of starting the program.

==========================  =============================================================================
`rgpu run` ends             what its agent does
==========================  =============================================================================
before requesting a place   ends
while requesting a place    withdraws the request, gives the session back
while the program runs      ends as if killed itself: the program's next CUDA call returns an error
after the program's end     ends the sessions as usual
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

REQUEST_SECONDS = 10.0  #: for `rgpu run` to send its request
GONE = 137  #: exit status of an agent whose `rgpu run` was killed, as if it was killed itself


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
        """Start a thread that receives messages."""
        threading.Thread(target=self._hear, name="hears-run", daemon=True).start()

    def place(self, agent: Agent, program: str) -> int:
        """Create the session: 0, or minus the signal that was received before. Raises the pool's refusal."""
        with contextlib.suppress(frames.Gone):  # which the receiving thread detects too
            frames.send(self._sock, frames.PLACING)
        try:
            agent.place(program, lambda: signal.Signals(self._came[0]).name if self._came else "")
        except Refused:
            if not self._came:
                raise
        return -self._came[0] if self._came else 0

    def run(self, command: Sequence[str], environ: dict[str, str], agent: Agent,
            started: Callable[[int], None]) -> int:
        """Let `rgpu run` start the program, and wait for it. Return its exit code, or minus the signal."""
        self._interrupted = agent.interrupted
        try:
            frames.send(self._sock, frames.GO, frames.pack(_changes(os.environ, environ)))
        except frames.Gone:
            return -signal.SIGKILL
        with self._lock:
            self._lock.wait_for(lambda: self._program or self._status is not None or self._gone)
            if self._program is None:  # it could not be started, or `rgpu run` was killed meanwhile
                return -signal.SIGKILL if self._status is None else self._status
        agent.child_started(self._program)
        started(self._program)
        with self._lock:
            self._lock.wait_for(lambda: self._status is not None or self._gone)
            if self._status is None:
                os._exit(GONE)
            return self._status

    def die_by(self, number: int) -> None:
        """Make `rgpu run` end by that signal."""
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
    """Serve the `rgpu run` at the other end of the socket. Raises :class:`frames.Gone` where it has ended.

    ``surroundings``: the resident's.
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
    """Take over the umask, folder, stderr, environment and arguments of `rgpu run`."""
    os.setsid()  # signals to the resident's group do not reach this run
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
    """Whether the settings allow a resident; the run itself reports errors in them."""
    try:
        return bool(Settings({"pool": plain.values.get("pool")}).resident)
    except RgpuError:
        return True


def _outcome(plain: plain_run.PlainRun, front: HandedOver) -> int:
    """Run the program; the exit code."""
    try:
        plain.carry_out(front=front)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter of `rgpu run` would print it
        traceback.print_exc()
    return 1


def _changes(before: dict[str, str] | os._Environ[str], after: dict[str, str]) -> list[bytes]:
    """Variables to set, as NAME=VALUE, and to unset, as NAME."""
    return [os.fsencode(f"{name}={value}") for name, value in after.items() if before.get(name) != value] + \
        [os.fsencode(name) for name in before if name not in after]
