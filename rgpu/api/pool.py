"""A pool from Python: run programs on it, look at it, move, checkpoint, restore and end sessions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack, overload

from rgpu.api import detached, rows, running, verbs
from rgpu.api.detached import DetachedRun
from rgpu.api.reaching import pool_files, reach
from rgpu.api.running import AttachedOptions, DetachedOptions, File, Run
from rgpu.api.settings import Settings
from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import NotFound, UsageError

Named = str | rows.Session | Run | DetachedRun  #: a session: by its name, its row, or the program that it belongs to


class Pool:
    """A pool of this user, found as the command line finds it.

    ``path``: its directory; ``context``: one of `rgpu context ls`; neither: as for `rgpu` without options
    (RGPU_POOL, RGPU_CONTEXT, the configuration file, the current context, the pool of this machine). ``operator``: act
    with the operator's key, on all users' sessions.

    Threads can share a pool object; processes cannot. Methods raise the subclasses of :class:`rgpu.RgpuError` with
    which the verbs of their names fail; all of them raise :class:`PoolUnavailable` when no node answers, and
    :class:`AuthenticationFailed`. The constructor raises :class:`NotFound` where there is no pool or no key,
    :class:`UsageError` and :class:`Corrupt`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, context: str | None = None,
                 operator: bool = False) -> None:
        given = {"pool": None if path is None else os.fspath(path), "context": context}
        self._files = pool_files(Settings(given))
        self._operator = operator
        self._client = self.connect()

    @property
    def path(self) -> Path:
        """The pool's directory: its addresses, and this user's key."""
        return self._files.root

    def __repr__(self) -> str:
        return f"rgpu.Pool({str(self.path)!r})"

    def connect(self) -> ControlClient:
        """Return a separate connection, which the caller closes."""
        return reach(self._files, "operator" if self._operator else "user")

    @contextlib.contextmanager
    def _of_its_own(self) -> Iterator[ControlClient]:
        """A separate client for a long request, so that other threads' requests do not wait for it."""
        with self.connect() as client:
            yield client

    def close(self) -> None:
        """Close the connections. Programs that were started run on."""
        self._client.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # -- programs -----------------------------------------------------------------------
    @overload
    def run(self, command: Sequence[str | os.PathLike[str]], *, detach: Literal[False] = False,
            **options: Unpack[AttachedOptions]) -> Run: ...

    @overload
    def run(self, command: Sequence[str | os.PathLike[str]], *, detach: Literal[True],
            **options: Unpack[DetachedOptions]) -> DetachedRun: ...

    def run(self, command: Sequence[str | os.PathLike[str]], *, detach: bool = False, name: str | None = None,
            memory: int | str | None = None, gpus: float | str | None = None, labels: Mapping[str, str] | None = None,
            host: str | None = None, compute: int | None = None, gpu_models: Collection[str] = (), priority: int = 0,
            anti_affinity: str | None = None, queue: bool = False, lazy: bool = False, recover: bool | None = None,
            checkpoint_every: float | None = None, client_grace: str | float | None = None,
            time_limit: str | float | None = None, log_limit: int | str | None = None, timeout: float | None = None,
            stdin: File = None, stdout: File = None, stderr: File = None, env: Mapping[str, str] | None = None,
            cwd: str | os.PathLike[str] | None = None) -> Run | DetachedRun:
        """Start ``command`` as `rgpu run` does, and return its handle when the program runs.

        ``detach``: the run outlives this process and its terminal, as with `rgpu run --detach`; ``log_limit``: bytes of
        its output that are kept. ``name`` to ``time_limit``: the options of `rgpu run` of these names; ``memory``:
        bytes, or "8GiB". ``timeout``: seconds within which the program must start, with ``queue`` including the
        wait for a place; None: no limit. ``stdin`` to ``cwd``: as for :class:`subprocess.Popen`; a detached run has no
        streams. When it raises, no program was started: :class:`Refused`, :class:`AlreadyExists`, :class:`UsageError`,
        :class:`NotFound` for the program, :class:`TimedOut`.
        """
        options = {"name": name, "memory": memory, "gpus": gpus, "label": dict(labels or {}), "host": host,
                   "compute": compute, "gpu_model": list(gpu_models), "priority": priority or None,
                   "anti_affinity": anti_affinity, "queue": queue, "lazy": lazy,
                   "recover": None if recover is None else "on" if recover else "off",
                   "checkpoint_every": checkpoint_every, "client_grace": client_grace, "time_limit": time_limit,
                   "log_limit": log_limit}
        if detach:
            if (stdin, stdout, stderr) != (None, None, None):
                raise UsageError("a detached run has no stdin, stdout and stderr of this process: its handle's logs() "
                                 "and follow() have what it writes")
            return detached.start(command, options, pool=self.path, timeout=timeout, env=env, cwd=cwd)
        if log_limit is not None:
            raise UsageError("log_limit is for detach=True: otherwise the output goes to stdout and stderr")
        process, said = running.start(command, options, pool=self.path, timeout=timeout, stdin=stdin, stdout=stdout,
                                      stderr=stderr, env=env, cwd=cwd)
        return Run(process, str(said["name"]), int(said["pid"]))

    # -- looking ------------------------------------------------------------------------
    def sessions(self, *, all: bool = False, all_users: bool | None = None, hosts: Collection[str] = (),
                 states: Collection[str] = (), users: Collection[str] = (), labels: Mapping[str, str] | None = None
                 ) -> list[rows.Session]:
        """Return the sessions, and the requests that wait for a place, as `rgpu ps` lists them.

        ``all``: also sessions that ended or failed. ``all_users``: those of all users (default: with ``operator``).
        Rows match any of ``hosts``, any of ``states``, any of ``users`` and all of ``labels``.
        """
        everything = all or bool({"ended", "failed"} & set(states))
        found = verbs.sessions(self._client, everything=everything,
                                all_users=self._operator if all_users is None else all_users)
        return [rows.read(rows.Session, row) for row in verbs.select(found, hosts, states, users, labels)]

    def session(self, session: Named) -> rows.Session:
        """Return one session, or one request that waits. Raises :class:`NotFound`."""
        try:
            return rows.read(rows.Session, verbs.describe(self._client, _name(session)))
        except NotFound:
            for waiting in self.sessions(states=["queued"]):
                if waiting.name == _name(session):
                    return waiting
            raise

    def nodes(self) -> list[rows.Node]:
        """Return the hosts of the pool with their devices, then the lost ones, as `rgpu nodes` lists them."""
        return [rows.read(rows.Node, row) for row in verbs.hosts(self._client)]

    def events(self, *, last: int = 0, follow: bool = True, kind: Literal["node", "session", "move", "gang", "pool"]
               | None = None) -> Iterator[rows.Event]:
        """Yield the pool's decisions from now on, without end, as `rgpu events -f` prints them.

        Decisions between the call and the first :func:`next` are included. ``last``: number of past decisions to begin
        with; ``follow`` False: only these. ``kind``: only decisions of this kind.
        """
        found, since = verbs.past(self._client, last)
        return self._events(found, since if follow else None, kind)

    def _events(self, past: list[dict[str, Any]], since: int | None, kind: str | None) -> Iterator[rows.Event]:
        for event in past:
            if kind in (None, event["kind"]):
                yield rows.read(rows.Event, event)
        if since is not None:
            with self._of_its_own() as client:
                for event in verbs.follow(client, since):
                    if kind in (None, event["kind"]):
                        yield rows.read(rows.Event, event)

    # -- acting -------------------------------------------------------------------------
    def migrate(self, session: Named, host: str, *, mode: Literal["auto", "copy", "replay"] = "auto",
                max_downtime: float | None = None, max_slowdown: float = 0.5,
                on_timeout: Literal["abort", "freeze"] = "abort", pages: Literal["auto", "stream"] = "auto",
                on_progress: Callable[[dict[str, Any]], None] | None = None) -> rows.Move:
        """Move a session to ``host`` while its program runs, and return when it is served there.

        ``max_downtime``: the longest pause in seconds (default: the setting). ``max_slowdown``: 0 to 1, for a replay.
        ``on_progress``: called with {phase, mode, round, pages_sent, bytes_sent, …}. Raises :class:`NotFound`,
        :class:`Refused` before the program is paused, :class:`MoveFailed` when the session stayed where it was,
        :class:`UnknownOutcome` when the answer was lost.
        """
        options = {"mode": mode, "max_downtime": Settings({"max_downtime": max_downtime}, contexts=False).max_downtime,
                   "max_slowdown": max_slowdown, "on_timeout": on_timeout, "pages": pages}
        with self._of_its_own() as client:
            return rows.read(rows.Move, verbs.migrate(client, _name(session), host, options, on_progress))

    def checkpoint(self, session: Named, *, wait: bool = True) -> rows.Checkpoint:
        """Write a checkpoint of a session, and return when it is published; without ``wait`` at once.

        Raises :class:`NotFound`, :class:`Refused`, :class:`StoreError`.
        """
        with self._of_its_own() as client:
            return rows.read(rows.Checkpoint, verbs.checkpoint(client, _name(session), wait=wait))

    def restore(self, checkpoint: str | rows.Checkpoint, *, host: str | None = None) -> rows.Restored:
        """Restore a session from its checkpoint and from its live program's journal.

        ``host``: where to (default: the coordinator chooses). Raises :class:`NotFound`, and :class:`Refused` when the
        journal behind the checkpoint was cut.
        """
        image = checkpoint.image if isinstance(checkpoint, rows.Checkpoint) else checkpoint
        with self._of_its_own() as client:
            return rows.read(rows.Restored, verbs.restore(client, image, host))

    def kill(self, session: Named) -> None:
        """End a session: its memory returns to the pool, its program's next call fails. Raises :class:`NotFound`."""
        verbs.kill(self._client, _name(session))


def _name(session: Named) -> str:
    return session if isinstance(session, str) else session.name
