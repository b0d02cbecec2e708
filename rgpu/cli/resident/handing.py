"""A plain ``rgpu run`` handed over to a resident: this process starts the program and waits for it, as without one.

Its work before the agent's answer delays each start, so it imports almost nothing; the rest is imported while the
agent requests a place from the pool.
"""

from __future__ import annotations

import _socket
import os
import sys

from rgpu.cli.resident import frames, surroundings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, NoReturn

    from rgpu.cli.plain_run import PlainRun

ACCEPT_SECONDS = 1.0  #: for an agent to be forked, after which the run continues without one
OFF = ("off", "false", "no", "0")  #: as rgpu.api.settings.parse_flag reads them
NOT_FOUND, NOT_EXECUTABLE = 127, 126  #: as the launcher's


def hand_over(plain: PlainRun) -> bool:
    """Exit as the program does, where a resident's agent takes the run; else return whether a resident may be started.

    Nothing of the run has been done when this returns.
    """
    if os.environ.get("RGPU_RESIDENT", "").lower() in OFF or any(map(os.environ.get, surroundings.OWN_AGENT)):
        return False
    try:
        os.fstat(2)
        text = surroundings.describe(plain.values.get("pool"))
        sock = _connect(surroundings.socket_path(text))
    except (OSError, ValueError):
        return False
    if sock is None:
        return True
    try:
        Foreground(sock, plain.program).follow(text)
    except frames.Gone:  # before a place was requested
        return True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    return True


def _connect(path: str) -> _socket.socket | None:
    """A connection to an agent; None where no resident listens. Raises :class:`OSError` for another user's folder."""
    if not surroundings.usable(os.path.dirname(path)):
        return None
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    sock.settimeout(ACCEPT_SECONDS)
    try:
        sock.connect(path)
        if frames.peer(sock)[1] == os.geteuid() and frames.receive(sock)[0] == frames.ACCEPTED:
            sock.settimeout(None)
            return sock
    except (OSError, frames.Gone):  # no process listens, or answers in time
        pass
    sock.close()
    return None


class Foreground:
    """The `rgpu run` in the foreground, beside its agent."""

    def __init__(self, sock: _socket.socket, program: tuple[str, ...]) -> None:
        self._sock, self._program = sock, program
        self._early: list[int] = []  #: signals that were received before the program ran
        self._child: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, Any] = {}

    def follow(self, text: bytes) -> None:
        """Carry out the agent's messages, and exit as it requests. Returns where it declines.

        Raises :class:`frames.Gone` where the connection ends before a place was requested.
        """
        self._request(text)
        import subprocess  # noqa: F401 - while the agent waits for the pool

        from rgpu.client.run import signals

        placing = False
        while True:
            try:
                kind, body = frames.receive(self._sock)
            except frames.Gone:
                if placing:
                    self._lost()
                raise
            if kind == frames.PLACING:
                placing = True
                self._handlers = signals.install(self._hold, self._hold_interrupt)
            elif kind == frames.GO:
                self._run(body)
            elif kind in (frames.EXIT, frames.DIE):
                self._end(frames.value(body), by_signal=kind == frames.DIE)
            else:
                return

    def _request(self, text: bytes) -> None:
        """Send the request."""
        umask = os.umask(0o077)
        os.umask(umask)
        words = [os.fsencode(word) for word in sys.argv[1:]]
        environment = [name + b"=" + value for name, value in os.environb.items()]
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            frames.send(self._sock, frames.REQUEST, frames.pack(
                [b"%d" % umask, b"%d" % len(words), *words, *environment, text]), (folder, 2))
        finally:
            os.close(folder)

    # -- signals --------------------------------------------------------------------------
    def _hold(self, number: int, frame: Any) -> None:
        """Handle an early signal: the agent withdraws its request, or the program gets the signal once it runs."""
        self._early.append(number)
        self._tell(frames.SIGNAL, number)

    def _hold_interrupt(self) -> None:
        import signal

        self._hold(signal.SIGINT, None)

    def _forward(self, number: int, frame: Any) -> None:
        if self._child is None:
            self._early.append(number)
        elif self._child.returncode is None:
            self._child.send_signal(number)

    def _interrupted(self) -> None:
        import signal

        self._tell(frames.SIGNAL, signal.SIGINT)

    def _tell(self, kind: bytes, number: int) -> None:
        """Notify the agent. If it has ended, only the program's CUDA calls fail."""
        try:
            frames.send(self._sock, kind, frames.number(number))
        except frames.Gone:
            pass

    # -- the program ----------------------------------------------------------------------
    def _run(self, changes: bytes) -> NoReturn:
        """Run the program in the environment that the agent sends, and exit as it does."""
        from rgpu.client.run import signals

        signals.put_back(self._handlers)
        self._handlers = signals.install(self._forward, self._interrupted)
        status = self._start(changes)
        if self._child is not None:
            status = self._wait(self._child)
        signals.put_back(self._handlers)
        self._handlers = {}
        self._tell(frames.ENDED, status)
        try:
            kind, body = frames.receive(self._sock)
            self._end(frames.value(body), by_signal=kind == frames.DIE)
        except frames.Gone:
            print("rgpu: the agent of this run ended before its program did", file=sys.stderr, flush=True)
            self._end(abs(status), by_signal=status < 0)

    def _start(self, changes: bytes) -> int:
        """Start the program; 0, or the exit code where that is not possible."""
        import subprocess

        environ = dict(os.environb)
        for entry in frames.unpack(changes):
            name, equals, value = entry.partition(b"=")
            if equals:
                environ[name] = value
            else:
                environ.pop(name, None)
        try:
            self._child = subprocess.Popen(self._program, env=environ)
        except FileNotFoundError:
            print(f"rgpu: {self._program[0]}: not found", file=sys.stderr)
            return NOT_FOUND
        except OSError as error:
            print(f"rgpu: {self._program[0]}: {error.strerror}", file=sys.stderr)
            return NOT_EXECUTABLE
        self._tell(frames.STARTED, self._child.pid)
        for number in self._early:
            self._child.send_signal(number)
        return 0

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        try:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its pid is not reused until it was waited for
        except ChildProcessError:
            pass
        return child.wait()

    # -- the end --------------------------------------------------------------------------
    def _end(self, value: int, by_signal: bool) -> NoReturn:
        from rgpu.client.run import signals

        signals.put_back(self._handlers)
        if by_signal:
            signals.die_by(value)
            value += 128  # the signal is blocked here
        os._exit(value)

    def _lost(self) -> NoReturn:
        print("rgpu: the agent of this run ended before it had a place in the pool: run it again, or without a "
              "resident by RGPU_RESIDENT=off", file=sys.stderr, flush=True)
        self._end(1, by_signal=False)
