"""The Python API for asyncio: the methods of :class:`rgpu.Pool` as coroutines.

Each request runs in a thread of asyncio's default executor. Cancelling an await abandons the answer, not the operation:
a move continues, as it does when `rgpu migrate` is interrupted. A program that was being started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack, overload

from rgpu.api import rows, verbs
from rgpu.api.detached import AsyncDetachedRun, DetachedRun
from rgpu.api.pool import Named, Pool
from rgpu.api.running import AttachedOptions, DetachedOptions, Run
from rgpu.session.errors import NotFound, PoolUnavailable, TimedOut

_WAIT_SECONDS = 2.0  #: of one request for events in a thread, for which a closing event loop waits


class AsyncRun:
    """A program under `rgpu run`, as :class:`rgpu.Run`. As a context manager it is waited for in the end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.name, self.pid = run.name, run.pid

    def poll(self) -> int | None:
        """Return the exit code as :meth:`rgpu.Run.poll` does."""
        return self.run.poll()

    def signal(self, number: int) -> None:
        """Send the program a signal, as :meth:`rgpu.Run.signal`."""
        self.run.signal(number)

    async def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as :meth:`rgpu.Run.wait`; no thread is blocked meanwhile. Raises :class:`TimedOut`."""
        if (code := self.run.poll()) is not None:
            return code
        fd, ended, loop = os.pidfd_open(self.run.agent_pid), asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(fd, ended.set)
        try:
            async with asyncio.timeout(timeout):
                await ended.wait()
        except TimeoutError:
            raise TimedOut(f"{self.name} still runs after {timeout:g} s", session=self.name) from None
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return self.run.wait()

    async def __aenter__(self) -> AsyncRun:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        for pipe in (self.run.stdin, self.run.stdout, self.run.stderr):
            if pipe is not None:
                pipe.close()
        await self.wait()


Meant = Named | AsyncRun | AsyncDetachedRun  #: a session, as :data:`rgpu.api.pool.Named`


class AsyncPool:
    """A pool for asyncio, around a :class:`rgpu.Pool`: same arguments, same errors."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, context: str | None = None,
                 operator: bool = False) -> None:
        self.pool = Pool(path, context=context, operator=operator)

    async def close(self) -> None:
        """Close the connections. Programs that were started run on."""
        await asyncio.to_thread(self.pool.close)

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    @overload
    async def run(self, command: Sequence[str | os.PathLike[str]], *, detach: Literal[False] = False,
                  **options: Unpack[AttachedOptions]) -> AsyncRun: ...

    @overload
    async def run(self, command: Sequence[str | os.PathLike[str]], *, detach: Literal[True],
                  **options: Unpack[DetachedOptions]) -> AsyncDetachedRun: ...

    async def run(self, command: Sequence[str | os.PathLike[str]], *, detach: bool = False, **options: Any
                  ) -> AsyncRun | AsyncDetachedRun:
        """Start a program as :meth:`rgpu.Pool.run` does, with its options.

        A program whose start is cancelled is ended once it runs.
        """
        starting = _Starting(functools.partial(self.pool.run, command, detach=detach, **options))  # type: ignore[arg-type]
        try:
            run = await asyncio.to_thread(starting)
        except asyncio.CancelledError:
            starting.give_up()
            raise
        return AsyncDetachedRun(run) if isinstance(run, DetachedRun) else AsyncRun(run)

    async def sessions(self, *, all: bool = False, all_users: bool | None = None, hosts: Collection[str] = (),
                       states: Collection[str] = (), users: Collection[str] = (),
                       labels: Mapping[str, str] | None = None) -> list[rows.Session]:
        """Return the sessions as :meth:`rgpu.Pool.sessions` does."""
        return await asyncio.to_thread(self.pool.sessions, all=all, all_users=all_users, hosts=hosts, states=states,
                                       users=users, labels=labels)

    async def session(self, session: Meant) -> rows.Session:
        """Return one session as :meth:`rgpu.Pool.session` does."""
        return await asyncio.to_thread(self.pool.session, _named(session))

    async def nodes(self) -> list[rows.Node]:
        """Return the hosts as :meth:`rgpu.Pool.nodes` does."""
        return await asyncio.to_thread(self.pool.nodes)

    async def events(self, *, last: int = 0, follow: bool = True,
                     kind: Literal["node", "session", "move", "gang", "pool"] | None = None
                     ) -> AsyncIterator[rows.Event]:
        """Yield decisions as :meth:`rgpu.Pool.events` does, but from the first iteration on, not from the call on."""
        client = await asyncio.to_thread(self.pool.connect)
        try:
            found, since = await asyncio.to_thread(verbs.past, client, last)
            loop = asyncio.get_running_loop()
            heard = loop.time()
            while True:
                for event in found:
                    if kind in (None, event["kind"]):
                        yield rows.read(rows.Event, event)
                if not follow:
                    return
                try:
                    answer = await asyncio.to_thread(client.call, "pool.events",
                                                     {"since": since, "wait": _WAIT_SECONDS})
                except PoolUnavailable:
                    if loop.time() - heard > verbs.SILENCE_SECONDS:
                        raise
                    await asyncio.sleep(0.5)
                    found = []
                    continue
                found, since, heard = list(answer["events"]), int(answer["revision"]), loop.time()
        finally:
            client.close()

    async def migrate(self, session: Meant, host: str, *, mode: Literal["auto", "copy", "replay"] = "auto",
                      max_downtime: float | None = None, max_slowdown: float = 0.5,
                      on_timeout: Literal["abort", "freeze"] = "abort", pages: Literal["auto", "stream"] = "auto",
                      on_progress: Callable[[dict[str, Any]], None] | None = None) -> rows.Move:
        """Move a session as :meth:`rgpu.Pool.migrate` does. ``on_progress`` is called in the event loop."""
        loop = asyncio.get_running_loop()
        progress = None if on_progress is None else lambda word: _post(loop, on_progress, word)
        return await asyncio.to_thread(
            self.pool.migrate, _named(session), host, mode=mode, max_downtime=max_downtime, max_slowdown=max_slowdown,
            on_timeout=on_timeout, pages=pages, on_progress=progress)

    async def checkpoint(self, session: Meant, *, wait: bool = True) -> rows.Checkpoint:
        """Write a checkpoint as :meth:`rgpu.Pool.checkpoint` does."""
        return await asyncio.to_thread(self.pool.checkpoint, _named(session), wait=wait)

    async def restore(self, checkpoint: str | rows.Checkpoint, *, host: str | None = None) -> rows.Restored:
        """Bring a session back as :meth:`rgpu.Pool.restore` does."""
        return await asyncio.to_thread(self.pool.restore, checkpoint, host=host)

    async def kill(self, session: Meant) -> None:
        """End a session as :meth:`rgpu.Pool.kill` does."""
        await asyncio.to_thread(self.pool.kill, _named(session))


def _named(session: Meant) -> Named:
    return session.run if isinstance(session, AsyncRun | AsyncDetachedRun) else session


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[dict[str, Any]], None], word: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended: there is no receiver
        loop.call_soon_threadsafe(function, word)


class _Starting:
    """The start of a program in a thread. Once given up, the program is ended there, also after the event loop."""

    def __init__(self, start: Callable[[], Run | DetachedRun]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._run: Run | DetachedRun | None = None
        self._given_up = False

    def __call__(self) -> Run | DetachedRun:
        run = self._start()
        with self._lock:
            self._run = run
            self._end()
        return run

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            self._end()

    def _end(self) -> None:
        if self._given_up and self._run is not None:
            with contextlib.suppress(NotFound):
                self._run.signal(signal.SIGTERM)
