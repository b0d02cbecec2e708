"""Runs that outlive this process, from Python: `rgpu run --detach`, and a handle by the run's name.

Everything but the start uses only the run's record on this machine, not the pool, as `rgpu logs`, `wait` and `signal`
do.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rgpu.api import rows, running
from rgpu.api.settings import Settings
from rgpu.link.runs.folder import LOOK_SECONDS, Runs
from rgpu.link.runs.record import RunRecord, Standing
from rgpu.session.errors import TimedOut


class DetachedRun:
    """A detached run of this machine, by its name. The run does not depend on this handle.

    ``runs_dir``: the folder of the runs' records (default: the setting of that name). ``pid``: of the program.
    A handle refers to one run: its methods raise :class:`NotFound` when another run has taken its name or its record
    was deleted, and :class:`Corrupt` and :class:`VersionMismatch` for records that cannot be read. The constructor
    raises these, and :class:`UsageError` for an invalid name.
    """

    def __init__(self, name: str, *, runs_dir: str | os.PathLike[str] | None = None) -> None:
        self._known = _runs(runs_dir).run(name)
        record = self._known.record()
        self._known.program = record.program
        self.name, self.pid = record.name, record.program.pid
        self._over = self._known.ended()

    @staticmethod
    def all(*, runs_dir: str | os.PathLike[str] | None = None) -> list[rows.DetachedStatus]:
        """Return the status of each recorded run, the newest first, as `rgpu ps --detached --all` lists them."""
        return [_status(*one) for one in _runs(runs_dir).known()]

    def __repr__(self) -> str:
        return f"<rgpu.DetachedRun {self.name}, process {self.pid}>"

    def status(self) -> rows.DetachedStatus:
        """Return the run's state and, once it has ended, exit code and reason."""
        return _status(*self._known.look())

    def poll(self) -> int | None:
        """Return the program's exit code, 128 + n when signal n ended it; None while it runs.

        Raises :class:`UnknownOutcome` when it is not known how the program ended.
        """
        return self._known.end().exit_code if self._over() else None

    def wait(self, timeout: float | None = None) -> int:
        """Return the program's exit code as :meth:`poll` does, once it has ended.

        ``timeout``: in seconds. Raises :class:`TimedOut` (the program runs on), :class:`UnknownOutcome`.
        """
        return self._known.wait(timeout).exit_code or 0

    def signal(self, number: int) -> None:
        """Send the program and its process group a signal.

        Raises :class:`NotFound` when it has ended, :class:`Refused` where it runs on another machine.
        """
        self._known.signal(number)

    def logs(self, *, tail: int | None = None) -> bytes:
        """Return the program's stored output, stdout and stderr combined; ``tail``: its last lines only.

        Where the limit dropped output, a line gives the number of bytes that are left out.
        """
        self._known.record()
        return b"".join(self._known.output(tail).read())

    def follow(self, *, tail: int | None = None) -> Iterator[bytes]:
        """Yield the program's output so far, or its last ``tail`` lines, and then new output until it has ended.

        Pieces can end anywhere, also within a line.
        """
        self._known.record()
        return filter(None, self._known.output(tail).follow(self._known.ended()))


class AsyncDetachedRun:
    """A detached run for asyncio: the methods of :class:`rgpu.DetachedRun`, as coroutines where they block.

    ``run``: that run, or its name. The constructor raises as :class:`rgpu.DetachedRun`.
    """

    def __init__(self, run: DetachedRun | str) -> None:
        self.run = DetachedRun(run) if isinstance(run, str) else run
        self.name, self.pid = self.run.name, self.run.pid

    def status(self) -> rows.DetachedStatus:
        """Return the status as :meth:`rgpu.DetachedRun.status` does."""
        return self.run.status()

    def poll(self) -> int | None:
        """Return the exit code as :meth:`rgpu.DetachedRun.poll` does."""
        return self.run.poll()

    async def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as :meth:`rgpu.DetachedRun.wait`; no thread is blocked meanwhile. Same errors."""
        until, over = None if timeout is None else time.monotonic() + timeout, self.run._known.ended()
        while not over():
            if until is not None and time.monotonic() > until:
                raise TimedOut(f"{self.name} still runs after {timeout:g} s", run=self.name)
            await asyncio.sleep(LOOK_SECONDS)
        return self.run._known.end().exit_code or 0

    def signal(self, number: int) -> None:
        """Send a signal as :meth:`rgpu.DetachedRun.signal`."""
        self.run.signal(number)

    async def logs(self, *, tail: int | None = None) -> bytes:
        """Return the stored output as :meth:`rgpu.DetachedRun.logs` does."""
        return await asyncio.to_thread(self.run.logs, tail=tail)

    async def follow(self, *, tail: int | None = None) -> AsyncIterator[bytes]:
        """Yield the output as :meth:`rgpu.DetachedRun.follow` does."""
        output, over = self.run._known.output(tail), self.run._known.ended()
        while True:
            ended = over()
            for piece in output.read():
                yield piece
            if ended:
                return
            await asyncio.sleep(LOOK_SECONDS)


def start(command: Sequence[str | os.PathLike[str]], options: Mapping[str, Any], *, pool: Path, timeout: float | None,
          env: Mapping[str, str] | None, cwd: str | os.PathLike[str] | None) -> DetachedRun:
    """Start a detached run, as :meth:`rgpu.Pool.run` does, and return its handle once its program runs."""
    process, said = running.start(command, {"detach": True, **options}, pool=pool, timeout=timeout,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=None, env=env, cwd=cwd)
    process.wait()
    return DetachedRun(str(said["name"]), runs_dir=str(said["runs"]))


def _runs(folder: str | os.PathLike[str] | None) -> Runs:
    return Runs(Path(Settings({"runs_dir": None if folder is None else os.fspath(folder)}, contexts=False).runs_dir))


def _status(record: RunRecord, now: Standing) -> rows.DetachedStatus:
    return rows.DetachedStatus(
        name=record.name, state=now.state, command=record.command, pid=record.program.pid, exit_code=record.exit_code,
        reason=now.reason, begun=record.begun, ended=record.ended or None, host=record.host, pool=record.pool,
        folder=record.folder, time_limit=record.time_limit or None)
