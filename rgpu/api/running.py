"""Programs that Python starts on a pool: `rgpu run` in a process of its own, and a handle for it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypedDict

from rgpu.api.report import LONGEST
from rgpu.session.errors import Corrupt, NotFound, Refused, RgpuError, TimedOut, UsageError, from_dict

File = int | IO[bytes] | IO[str] | None


class RunOptions(TypedDict, total=False):
    """Options of :meth:`rgpu.Pool.run` that hold for every run."""

    name: str | None
    memory: int | str | None
    gpus: float | str | None
    labels: Mapping[str, str] | None
    host: str | None
    compute: int | None
    gpu_models: Collection[str]
    priority: int
    anti_affinity: str | None
    queue: bool
    lazy: bool
    recover: bool | None
    checkpoint_every: float | None
    client_grace: str | float | None
    time_limit: str | float | None
    timeout: float | None
    env: Mapping[str, str] | None
    cwd: str | os.PathLike[str] | None


class AttachedOptions(RunOptions, total=False):
    """Options of an attached run: its standard streams, as for subprocess.Popen."""

    stdin: File
    stdout: File
    stderr: File


class DetachedOptions(RunOptions, total=False):
    """Options of a detached run. ``log_limit``: bytes of its output that are kept, or "64MiB"."""

    log_limit: int | str | None

#: `rgpu` of this package, also where it is not on the other interpreter's path. Nothing is imported from the
#: program's working directory.
_COMMAND = "import sys; sys.path.append({path!r}); from rgpu.cli.main import main; main()"
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  #: exit codes, as shells return them
_GIVE_UP_SECONDS = 15.0


class Run:
    """A program under `rgpu run`. As a context manager it is waited for at the end of the block.

    ``name``: of its first session. ``pid``: of the program's process. ``stdin``, ``stdout``, ``stderr``: its pipes,
    where they were asked for with ``subprocess.PIPE``, else None.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._process = process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        try:
            self._program = os.pidfd_open(pid)
        except ProcessLookupError:
            self._program = -1  # it has ended already
        self._close = weakref.finalize(self, os.close, self._program) if self._program >= 0 else None

    def __repr__(self) -> str:
        status = self.poll()
        return f"<rgpu.Run {self.name}, {'running' if status is None else f'exit code {status}'}>"

    @property
    def agent_pid(self) -> int:
        """The process of `rgpu run`, which ends after its program."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the program's exit code, 128 + n when signal n ended it; None while it runs."""
        status = self._process.poll()
        return None if status is None else self._over(status)

    def wait(self, timeout: float | None = None) -> int:
        """Return the program's exit code as :meth:`poll` does, once its session has ended too.

        ``timeout``: in seconds. Raises :class:`TimedOut`; the program runs on.
        """
        try:
            return self._over(self._process.wait(timeout))
        except subprocess.TimeoutExpired:
            raise TimedOut(f"{self.name} still runs after {timeout:g} s", session=self.name) from None

    def signal(self, number: int) -> None:
        """Send the program (not the agent beside it) a signal. Raises :class:`NotFound` when it has ended."""
        if self._close is not None and self._close.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._program, number)
                return
        raise NotFound(f"the program of {self.name} has ended: there is nothing to signal", session=self.name)

    def _over(self, status: int) -> int:
        if self._close is not None:
            self._close()
        return status if status >= 0 else 128 - status

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options as command-line arguments of `rgpu run`; those that are None, False or empty are left out.

    A map gives its option once for each ``KEY=VALUE``, a list once for each of its items.
    """
    found: list[str] = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, Mapping):
            value = [f"{key}={item}" for key, item in value.items()]
        if value is True:
            found.append(option)
        elif isinstance(value, list | tuple):
            found += [part for item in value for part in (option, str(item))]
        elif value is not None and value is not False:
            found += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return found


def start(command: Sequence[str | os.PathLike[str]], options: Mapping[str, Any], *, pool: Path, timeout: float | None,
          stdin: File, stdout: File, stderr: File, env: Mapping[str, str] | None, cwd: str | os.PathLike[str] | None
          ) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a program, as :meth:`rgpu.Pool.run` does.

    Returns the process of `rgpu run` and its report of the start: name, pid and, for a detached run, runs.
    """
    if isinstance(command, str | bytes) or not command:
        raise UsageError('nothing to run: give the program and its arguments as a list, ["python", "train.py"]')
    program = [os.fspath(part) for part in command]
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as word:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND.format(path=str(Path(__file__).parents[2])), "run", "--pool",
                 str(pool), "--report-fd", str(writer), *arguments(options), "--", *program],
                stdin=stdin, stdout=stdout, stderr=stderr, env=None if env is None else dict(env), cwd=cwd,
                pass_fds=(writer,))
        finally:
            os.close(writer)
        try:
            said = _word(word, timeout)
        except BaseException:  # also Ctrl-C: the program would run without a handle
            _give_up(process)
            raise
    if "started" in said:
        return process, dict(said["started"])
    status = process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    raise from_dict(said["refused"]) if "refused" in said else _silent(program[0], status)


def _word(pipe: Any, timeout: float | None) -> dict[str, Any]:
    """Read the report of `rgpu run`; empty if it ended without one. Raises :class:`TimedOut`, :class:`Corrupt`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    line, poller = b"", select.poll()
    poller.register(pipe, select.POLLIN)
    while not line.endswith(b"\n"):
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poller.poll(left):
            raise TimedOut(f"the program was not started within {timeout:g} s, and is not any more")
        part = pipe.read(65536)
        if not part:
            return {}
        line += part
        if len(line) > LONGEST:
            raise Corrupt("what `rgpu run` says of itself is too long", reason="report")
    return dict(json.loads(line))


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """End `rgpu run`, which withdraws its request."""
    process.terminate()
    try:
        process.wait(_GIVE_UP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _silent(program: str, status: int) -> RgpuError:
    """The error of a `rgpu run` that ended before the program ran, by its exit status."""
    if status == _NOT_FOUND:
        return NotFound(f"{program}: not found", path=program)
    if status == _NOT_EXECUTABLE:
        return Refused(f"{program}: cannot be executed", path=program)
    if status == UsageError.exit_code:
        return UsageError("`rgpu run` was given an option that it does not take: its stderr says which")
    if status < 0:
        return Refused(f"{program} was not started: {signal.Signals(-status).name} came before")
    return RgpuError(f"{program} was not started: `rgpu run` ended with status {status}")
