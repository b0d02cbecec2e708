"""The session that this process runs in, for programs that are written for `rgpu run`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rgpu.api import rows
from rgpu.api.moves import Callback, MoveWatch
from rgpu.api.pool import Pool
from rgpu.session.errors import NotFound
from rgpu.session.run_environment import POOL, SESSION

_TOLD_SECONDS = 5.0  #: after a process's first CUDA call, until the pool reports the process of its session
_LOOK_SECONDS = 0.2
_OVER = ("ended", "failed", "queued")


class Current:
    """The session of this process. ``run``: the name of the run, which is its first session's."""

    def __init__(self, run: str, pool: Path) -> None:
        self.run = run
        self._pool = Pool(pool)
        self._known: tuple[int, str] | None = None  #: (process, its session)

    def __repr__(self) -> str:
        return f"<rgpu.current() of run {self.run}>"

    @property
    def pool(self) -> Pool:
        """The pool that the session is on."""
        return self._pool

    @property
    def name(self) -> str:
        """The session's name. Raises :class:`NotFound` in a process that has none yet.

        The first process of a run that uses CUDA has the run's session, even before its first CUDA call. Any other
        process has a session from its first CUDA call on.
        """
        if self._known is None or self._known[0] != os.getpid():
            self._known = os.getpid(), self._look()
        return self._known[1]

    def session(self) -> rows.Session:
        """Return the session as the pool sees it now. Raises as :attr:`name`."""
        return self._pool.session(self.name)

    def checkpoint(self, *, wait: bool = True) -> rows.Checkpoint:
        """Write a checkpoint of this session, as :meth:`rgpu.Pool.checkpoint` does.

        It covers all GPU calls that this thread has made so far. Raises :class:`NotFound` as :attr:`name`.
        """
        return self._pool.checkpoint(self.name, wait=wait)

    def on_move(self, *, before: Callback | None = None, after: Callback | None = None) -> MoveWatch:
        """Call ``before`` when a move of this session begins, and ``after`` when it was committed or aborted.

        Both are called in a thread of their own, one at a time, each with a :class:`rgpu.MoveNotice`, until the
        returned watch's ``close()``. A move does not wait for them: the session's calls continue meanwhile.
        Raises :class:`PoolUnavailable` where no node answers now; a pool that stops answering later is waited for.
        """
        return MoveWatch(self._pool.connect(), lambda: self.name, self.run, before, after)

    def _look(self) -> str:
        """The session's name by this process's id, which its agent reports a moment after the first CUDA call."""
        until = time.monotonic() + _TOLD_SECONDS
        while True:
            of_run = [row for row in self._pool.sessions()
                      if row.state not in _OVER and (row.name == self.run or row.name.startswith(f"{self.run}/"))]
            for row in of_run:
                if row.pid == os.getpid():
                    return row.name
            if any(row.name == self.run and not row.attached for row in of_run):
                return self.run  # belongs to the first process that uses CUDA
            if time.monotonic() > until:
                raise NotFound(f"process {os.getpid()} of run {self.run} has no session: it has not used the GPU yet",
                               session=self.run)
            time.sleep(_LOOK_SECONDS)


_made: Current | None = None


def current() -> Current | None:
    """Return the session that this process runs in; None outside `rgpu run`.

    Raises :class:`NotFound` where the pool's directory or key does not exist.
    """
    global _made
    run, pool = os.environ.get(SESSION), os.environ.get(POOL)
    if not run or not pool:
        return None
    if _made is None or _made.run != run:
        _made = Current(run, Path(pool))
    return _made
