"""The daemon's side of its workers: start, requests, taking over, detection of deaths.

A worker belongs to no terminal and no daemon: it is started in a session of
its own and found again through its Unix socket, so that a daemon can be
restarted under it (DESIGN, "What each failure does").
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from rgpu.link.local.channel import connect
from rgpu.link.local.packets import Channel
from rgpu.server import ended_mark, position_page
from rgpu.server.node.workers import homes
from rgpu.server.node.workers.boxes import Boxes, basic
from rgpu.server.node.workers.homes import Home, reach
from rgpu.server.node.workers.warm_workers import WarmWorkers
from rgpu.server.template.forking import WorkerProcess
from rgpu.server.worker.entered_box import SOCKET
from rgpu.server.worker.warm_worker import Assignment
from rgpu.session.errors import LinkError, RgpuError, TimedOut, from_dict

log = structlog.get_logger(__name__)

START_SECONDS = 60.0

#: (session, event, values)
OnEvent = Callable[[str, str, dict[str, Any]], Awaitable[None]]


class WorkerHandle:
    """One worker as the daemon sees it. ``closed`` is set when its process or channel has ended."""

    def __init__(self, session: str, channel: Channel, on_event: OnEvent, log_path: Path, position: Path,
                 home: Home | None = None, boxes: Boxes | None = None) -> None:
        """``position``: the file where the worker keeps its position. ``boxes`` remove its ``home`` at its end."""
        self.session = session
        self._position, self._home, self._boxes = position, home, boxes
        self.channel = channel
        self.pid = channel.peer()[0]
        self.log_path = log_path
        self.closed = asyncio.Event()
        self.view: dict[str, Any] = {}  #: the worker's last report
        self.device = ""
        self.quota = 0
        self.warm = False  #: the session got a warm worker
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._died)
        # A thread of its own: the loop's pool is small, and a reader runs as long as its worker.
        threading.Thread(target=self._read, name=f"worker-{session}", daemon=True).start()
        self._pump = self._loop.create_task(self._dispatch())

    async def request(self, do: str, *, fds: tuple[int, ...] = (), timeout: float = 30.0,
                      **values: Any) -> dict[str, Any]:
        """Ask the worker to do something. Raises what it raised, :class:`LinkError`, :class:`TimedOut`."""
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self.channel.send({"id": number, "do": do, **values}, fds)
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise TimedOut(f"the worker of {self.session} did not finish {do!r} within {timeout:.0f} s") from None
        finally:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        """Pass the channel's messages to the loop; runs in a thread."""
        try:
            while True:
                message, fds = self.channel.receive()
                for fd in fds:
                    os.close(fd)
                self._loop.call_soon_threadsafe(self._take, message)
        except (RgpuError, RuntimeError):
            try:
                self._loop.call_soon_threadsafe(self._gone)
            except RuntimeError:
                pass  # the loop has ended: so has the daemon

    def _take(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is None:
            event = str(message.pop("event", ""))
            self._as_seen_here(message)
            if "worker_pid" in message:
                self.view = message
            self._events.put_nowait((event, message))
            return
        future = self._waiting.get(number)
        if future is not None and not future.done():
            if "error" in message:
                future.set_exception(from_dict(message["error"]))
            else:
                future.set_result(self._as_seen_here(message.get("ok") or {}))

    def _as_seen_here(self, said: dict[str, Any]) -> dict[str, Any]:
        """Replace the worker's pid: in a process namespace of its own it sees another number."""
        for name in ("worker_pid", "pid"):
            if name in said:
                said[name] = self.pid
        return said

    async def _dispatch(self) -> None:
        event = ""
        while event != "died":
            event, values = await self._events.get()
            try:
                await self._on_event(self.session, event, values)
            except RgpuError as error:
                log.warning("worker event", session=self.session, event_name=event, reason=error.message)
            except Exception:  # later events are still handled: one of them may be the worker's death
                log.exception("worker event", session=self.session, event_name=event)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.channel.close()
        self._gone()

    def _gone(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkError(f"the worker of {self.session} has ended"))
        self._events.put_nowait(("died", {"pid": self.pid, **self._circumstances()}))
        if self._boxes is not None and self._home is not None:
            # No daemon thread: a node that stops waits until the remains of its workers are removed.
            threading.Thread(target=self._boxes.release, args=(self._home, self.log_path.parent),
                             name="release").start()

    def _circumstances(self) -> dict[str, Any]:
        """The known circumstances of the worker's end. A death is reported also where reading them fails."""
        found: dict[str, Any] = {}
        for part in (self._last_place, self._why):
            try:
                found.update(part())
            except Exception:
                log.exception("how a worker ended cannot be told", session=self.session, pid=self.pid)
        return found

    def _why(self) -> dict[str, str]:
        """The reason of the worker's end, where the kernel reports one."""
        if self._boxes is None or self._home is None or not self._boxes.killed_for_memory(self._home):
            return {}
        log.error("a worker had all the memory that it may have and was ended", session=self.session, pid=self.pid,
                  limit=self._boxes.memory)
        return {"why": f"the worker had all the memory that it may have ({self._boxes.memory >> 20} MiB)"}

    def _last_place(self) -> dict[str, int | None]:
        """The last position of its work by the position page; without a valid page, by its last report."""
        found = position_page.read(self._position)
        self._position.unlink(missing_ok=True)
        if found is None:
            said = self.view.get("position")
            found = position_page.Reached(said) if isinstance(said, int) else None
        if found is None:
            return {"position": None}
        return {"position": found.applied, "begun": found.begun, "complete": found.complete}

    @property
    def home(self) -> Home | None:
        """The worker's own folder; None for a worker of the previous version."""
        return self._home

    async def give_deadline(self, fd: int) -> None:
        """Hand over the page of the deadline until which this node may begin anything."""
        await self.request("deadline", fds=(fd,))

    async def refresh(self) -> dict[str, Any]:
        """Request the worker's state; return the last known one if it does not answer."""
        try:
            self.view = await self.request("describe", timeout=2.0)
        except RgpuError:
            pass
        return self.view

    def leave(self) -> None:
        """Disconnect from the worker without ending it (the daemon stops; another one will take it over)."""
        self.closed.set()
        self._pump.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self.channel.close()

    def give_up(self) -> None:
        """Count a killed worker that hangs in the driver as ended; its process ends when the driver returns."""
        self._gone()

    def kill(self) -> None:
        """End the process, at once or as soon as its box has done what comes before."""
        if self._boxes is None or self._boxes.before_kill is None:
            self._kill()
        else:
            threading.Thread(target=self._kill, args=(self._boxes.before_kill,), name="kill").start()

    def _kill(self, before: Callable[[int], None] | None = None) -> None:
        if before is not None:
            before(self.pid)
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except (ProcessLookupError, OSError):
            pass


async def start(directory: Path, session: str, *, epoch: int, device: str, quota: int, state: str,
                on_event: OnEvent, log_level: str = "info", module_cache_size: int = 0,
                warm: WarmWorkers | None = None, boxes: Boxes | None = None, apart: bool = False) -> WorkerHandle:
    """Start a worker process, or take a warm one, and connect to it. ``boxes``: None: those of :func:`basic`.

    ``apart``: outside MPS; warm workers may be inside.

    Raises :class:`TimedOut` with the end of its log.
    """
    boxes = boxes or basic(directory)
    folder = worker_folder(directory, session)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ended_mark.clear(folder)  # marks of an earlier program of that name
    link, log_path = folder / str(epoch), folder / "worker.log"
    found = None
    if warm is not None and not apart:
        found = await warm.become(device, Assignment(session, epoch, quota, state, str(link / SOCKET)), log_path)
    ready = found is not None
    if found is None:
        home = homes.make(directory)
        arguments = ["--session", session, "--epoch", str(epoch), "--device", device, "--quota", str(quota), "--socket",
                     str(link / SOCKET), "--state", state,
                     *common_options(directory, log_level, module_cache_size, boxes.memory)]
        try:
            found = await _spawn(boxes, arguments, home, log_path, apart), home
        except (OSError, RgpuError) as error:
            boxes.release(home)
            if isinstance(error, RgpuError):
                raise
            raise TimedOut(f"the worker of {session} did not start: {error}") from error
    process, home = found
    try:
        # An ending worker listens in its own home: it is never reached in place of the new one.
        homes.link(home, folder, epoch)
        channel = await _connect(home, process)
    except RgpuError as error:
        process.kill()
        boxes.release(home)
        link.unlink(missing_ok=True)  # a folder with a link counts as that of a worker, and would be kept
        raise TimedOut(f"the worker of {session} did not start: {error.message}; its log ends: "
                       f"{_tail(log_path)}") from error
    except BaseException:  # the daemon stops meanwhile: no other code has this process on record
        process.kill()
        boxes.release(home)
        link.unlink(missing_ok=True)
        raise
    handle = WorkerHandle(session, channel, on_event, log_path, position_page.beside(home.socket), home, boxes)
    handle.device, handle.quota, handle.warm = device, quota, ready
    return handle


async def _spawn(boxes: Boxes, arguments: list[str], home: Home, log_path: Path, apart: bool) -> WorkerProcess:
    """Start the process in a thread: the first worker of a node waits for its template. Raises OSError."""
    task = asyncio.ensure_future(asyncio.to_thread(boxes.spawn, arguments, home, log_path, apart=apart))

    def end(done: asyncio.Future[WorkerProcess]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().kill()
            boxes.release(home)

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:  # the daemon stops meanwhile: no other code has this process on record
        task.add_done_callback(end)
        raise


def common_options(directory: Path, log_level: str, module_cache_size: int, memory: int = 0) -> tuple[str, ...]:
    """Arguments of every worker of a node. ``memory``: bound on host memory in bytes; 0: none."""
    return ("--host", directory.name, "--log-level", log_level, "--module-cache", str(directory / "modules"),
            "--module-cache-size", str(module_cache_size), "--host-memory", str(memory))


async def _connect(home: Home, process: WorkerProcess) -> Channel:
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while True:
        try:
            return await asyncio.to_thread(reach, home, 0.0)
        except TimedOut:
            if process.poll() is not None:
                raise LinkError(f"it ended with status {process.returncode}") from None
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.01)


async def adopt(directory: Path, on_event: OnEvent, boxes: Boxes | None = None) -> list[WorkerHandle]:
    """Connect to every worker that an earlier daemon of this node left running, and remove the remains of others."""
    boxes = boxes or basic(directory)
    found = []
    for path in sorted((directory / "workers").glob("*/*")):
        if path.is_symlink():
            home: Home | None = Home(path.resolve())
        elif path.suffix == ".sock":  # the socket of a worker of the previous version
            home = None
        else:
            continue
        handle = await _adopt(path, home, on_event, boxes)
        if handle is not None:
            found.append(handle)
    await _clear(directory, {handle.home for handle in found}, boxes)
    return found


async def _adopt(path: Path, home: Home | None, on_event: OnEvent, boxes: Boxes) -> WorkerHandle | None:
    """Connect to a worker that was left running; None where none listens, or it does not answer and is killed."""
    socket = path if home is None else home.socket
    position = position_page.beside(socket)
    try:
        channel = await (asyncio.to_thread(connect, path, 0.2) if home is None else asyncio.to_thread(reach, home, 0.2))
    except TimedOut:
        if home is None:
            path.unlink(missing_ok=True)
        position.unlink(missing_ok=True)
        return None
    handle = WorkerHandle("", channel, on_event, path.parent / "worker.log", position, home, boxes)
    try:
        view = await handle.request("describe", timeout=5.0)
    except RgpuError as error:
        log.warning("a worker does not answer and is ended", socket=str(socket), reason=error.message)
        handle.kill()
        return None
    handle.session, handle.view = view["session"], view
    return handle


async def _clear(directory: Path, held: set[Home | None], boxes: Boxes) -> None:
    """End warm workers of a daemon that has ended, and remove what dead workers left."""
    for home in homes.all_of(directory):
        if home in held:
            continue
        with contextlib.suppress(TimedOut, ProcessLookupError):
            channel = await asyncio.to_thread(connect, home.socket, 0.0)
            os.kill(channel.peer()[0], signal.SIGKILL)
            channel.close()
        await asyncio.to_thread(boxes.release, home)
    await asyncio.to_thread(boxes.sweep)
    for folder in (directory / "workers").glob("*"):
        homes.prune(folder)


def worker_folder(directory: Path, session: str) -> Path:
    """Folder of a session's worker."""
    return directory / "workers" / session.replace("/", "@")


def _tail(path: Path, size: int = 600) -> str:
    try:
        return path.read_bytes()[-size:].decode(errors="replace").strip()
    except OSError:
        return ""
