"""A node's warm workers: started ahead, so that a session that begins, moves here or is restored pays no fixed costs.

For each healthy device some processes are kept ready (:mod:`.warm_pool_size` computes how many): Python and the device
loaded, context made, our own modules in it, pinned rings allocated. One that is
taken is replaced, at once where processors are idle; one that died is replaced a moment
later, and only while the device has memory for it. They are optional, and no session waits for a slow one:
without a warm worker a new one is started.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from rgpu.link.local.packets import Channel
from rgpu.server.node.workers import homes, warm_pool_size
from rgpu.server.node.workers.homes import Home, reach
from rgpu.server.template.forking import WorkerProcess
from rgpu.server.worker import warm_worker
from rgpu.server.worker.warm_worker import Assignment
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

START_SECONDS = 60.0
SOON_SECONDS = 10.0  #: that a session waits for a warm worker that is being started
SLOW = 2.0  #: likewise, as a multiple of the last one's start time
BUSY_SECONDS = 1.0  #: between two checks for idle processors
PATIENCE_SECONDS = 15.0  #: after which a worker requested by number is started on a busy host, too
STARTS = 4  #: at a time, of all devices
END_SECONDS = 3.0  #: that a worker which gives way may take to end
#: After some gave way, no warm worker beyond a device's first is started for this time: the session takes the memory.
AWAY_SECONDS = 10.0
#: Delay after one was taken, on at most :data:`FEW` processors: its session begins and needs them.
REPLACE_SECONDS = 1.0
FEW = 4
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)  #: delays after one that did not start, or died

#: (arguments behind the module's name, the worker's folder, log file) → the process
Spawn = Callable[[list[str], Home, Path], WorkerProcess]


@dataclass(slots=True)
class _WarmWorker:
    device: str
    process: WorkerProcess
    home: Home
    channel: Channel


class WarmWorkers:
    """See the module docstring. All methods run in the daemon's loop."""

    def __init__(self, directory: Path, wanted: int, *, spawn: Spawn, release: Callable[[Home], None],
                 room: Callable[[str], int], options: tuple[str, ...] = ()) -> None:
        """``wanted``: for each device, or :data:`warm_pool_size.AUTO`. ``room(device)``: bytes of it that are free.

        ``options``: of each worker.

        ``release``: removes what was made for one that ended without a session.
        """
        self._directory, self._folder, self._release = directory, directory / "spares", release
        self._wanted, self._spawn, self._room, self._options = wanted, spawn, room, options
        self._ready: dict[str, list[_WarmWorker]] = {}
        self._starting: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._begun: dict[str, int] = {}  #: number of starts under way
        self._making: dict[str, list[WorkerProcess]] = {}  #: processes of these starts, once they exist
        self._away: dict[str, float] = {}  #: until when none is started beyond the first
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}  #: sessions that wait for the next one
        self._patience: dict[str, float] = {}  #: seconds that a starting one is waited for
        self._stocking: asyncio.Task[None] | None = None
        # Starts block threads for seconds: not those of the loop's common pool.
        self._threads = ThreadPoolExecutor(STARTS, "warm-start")
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.used = 0  #: sessions that got a warm worker
        self.missed = 0  #: sessions for which none was ready

    def start(self, devices: list[str]) -> None:
        """Begin to keep warm workers for these devices."""
        if not self._wanted:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for device in devices:
            self._ready[device], self._starting[device] = [], 0
        for device in devices:
            self._fill(device)

    def ready(self, device: str) -> int:
        """The number of ready warm workers of the device."""
        return len(self._ready.get(device, ()))

    def memory(self, device: str) -> int:
        """Bytes of the device that warm workers take from sessions.

        The first of a device is not counted: the next session takes it, and would need as much by itself.
        """
        if not device.startswith("cuda"):
            return 0
        starting = 0 if self._is_away(device) else self._starting.get(device, 0)  # starting ones are ended
        return warm_pool_size.CONTEXT_MEMORY * max(0, self.ready(device) + starting - 1)

    def pids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        return [item.process.pid for items in self._ready.values() for item in items]

    async def become(self, device: str, assignment: Assignment, log_path: Path
                     ) -> tuple[WorkerProcess, Home] | None:
        """Make a warm worker the session's worker, logging to ``log_path``; None when none is available."""
        for again in (True, False):
            found = await self._take(device, assignment, log_path)
            if found is not None:
                return found
            if again and not await self._soon(device):
                break
        self.missed += bool(self._wanted)
        return None

    async def _soon(self, device: str) -> bool:
        """Wait for a warm worker that is being started: it is ready before one that would be started now.

        False: none is being started, each is waited for by another session, or it is slow.
        """
        waiters = self._waiters.setdefault(device, [])
        if self._begun.get(device, 0) <= len(waiters):
            return False
        waiter = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            async with asyncio.timeout(self._patience.get(device, SOON_SECONDS)):
                await waiter
        except TimeoutError:
            log.warning("a warm worker is slow to start: it is not waited for", device=device)
            return False
        finally:
            if waiter in waiters:
                waiters.remove(waiter)
        return True

    async def _take(self, device: str, assignment: Assignment, log_path: Path
                    ) -> tuple[WorkerProcess, Home] | None:
        while items := self._ready.get(device):
            item = items.pop(0)
            self._unwatch(item)
            self._fill(device, replace_seconds(len(os.sched_getaffinity(0))))
            try:
                async with asyncio.timeout(5.0):
                    await asyncio.to_thread(warm_worker.assign, item.channel, assignment, log_path)
            except (RgpuError, OSError, TimeoutError) as error:
                log.warning("a warm worker was of no use", device=device, pid=item.process.pid, reason=str(error))
                self._end(item)
                continue
            self.used += 1
            log.info("a warm worker takes the session", session=assignment.session, device=device,
                     pid=item.process.pid)
            return item.process, item.home
        return None

    def close(self) -> None:
        """End all warm workers."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for items in self._ready.values():
            for item in items:
                self._unwatch(item)
                self._end(item)
            items.clear()

    async def give_way(self, device: str, bytes_wanted: int) -> None:
        """End warm workers beyond the first, until ``bytes_wanted`` of the device's memory are free for a session."""
        ending: list[WorkerProcess] = []
        items = self._ready.get(device, [])
        ending += self._making.get(device, [])[0 if items else 1:]
        for process in ending:
            process.kill()
        bytes_wanted -= len(ending) * warm_pool_size.CONTEXT_MEMORY
        while bytes_wanted > 0 and len(items) > 1:
            item = items.pop()
            self._unwatch(item)
            self._end(item)
            ending.append(item.process)
            bytes_wanted -= warm_pool_size.CONTEXT_MEMORY
        self._away[device] = time.monotonic() + AWAY_SECONDS
        asyncio.get_running_loop().call_later(AWAY_SECONDS, self._fill, device)
        if ending:
            log.info("warm workers give way to a session", device=device, pids=[process.pid for process in ending])
            await asyncio.gather(*(asyncio.to_thread(_ended, process) for process in ending))

    def _is_away(self, device: str) -> bool:
        return time.monotonic() < self._away.get(device, 0.0)

    # -- keeping them -----------------------------------------------------------------
    def _fill(self, device: str, delay: float = 0.0) -> None:
        """Start the device's first warm worker after ``delay`` s, and the others when a processor is idle."""
        if self._closed:
            return
        if not self._here(device):
            self._spawn_task(self._start(device, delay))
            self._starting[device] += 1
        if self._stocking is None or self._stocking.done():
            self._stocking = self._spawn_task(self._stock())

    def _here(self, device: str) -> int:
        return self.ready(device) + self._starting[device]

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _short(self) -> str | None:
        """A device with at least one warm worker, but fewer than wanted; None: there is none."""
        host = warm_pool_size.look_at_host(len(self._ready))
        for device in self._ready:
            here = self._here(device)
            if self._is_away(device):
                continue
            if 0 < here < warm_pool_size.wanted(self._wanted, device, host, self._room(device), here) \
                    and not self._failures.get(device):
                return device
        return None

    async def _stock(self) -> None:
        """Start one after the other, while processors are idle, until every device has the wanted number."""
        waited = 0.0
        while (device := self._short()) is not None:
            before = warm_pool_size.idle_ticks()
            await asyncio.sleep(warm_pool_size.LOOK_SECONDS)
            idle = warm_pool_size.idle_processors(before, warm_pool_size.idle_ticks(), warm_pool_size.LOOK_SECONDS)
            if idle < warm_pool_size.IDLE and not (self._wanted > 0 and waited >= PATIENCE_SECONDS):
                await asyncio.sleep(BUSY_SECONDS)
                waited += BUSY_SECONDS
                continue
            waited = 0.0
            self._starting[device] += 1
            await self._start(device, 0.0)

    async def _start(self, device: str, delay: float) -> None:
        await asyncio.sleep(delay)
        self._begun[device] = self._begun.get(device, 0) + 1
        try:
            await self._start_now(device)
        finally:
            self._begun[device] -= 1
            for waiter in self._waiters.get(device, [])[:1]:
                if not waiter.done():
                    waiter.set_result(None)

    async def _start_now(self, device: str) -> None:
        try:
            if device.startswith("cuda") and self._room(device) < warm_pool_size.CONTEXT_MEMORY:
                raise OSError("the device has no room for another context")
            began = time.monotonic()
            item = await self._make(device)
            self._patience[device] = min(SOON_SECONDS, max(1.0, SLOW * (time.monotonic() - began)))
        except (RgpuError, OSError) as error:
            self._starting[device] -= 1
            if not (self._is_away(device) and self._ready[device]):
                log.warning("no warm worker", device=device, reason=str(error))
                self._again(device)
            return
        self._starting[device] -= 1
        if self._closed or (self._is_away(device) and self._ready[device]):
            self._end(item)
            return
        self._failures[device] = 0
        self._ready[device].append(item)
        asyncio.get_running_loop().add_reader(item.channel.sock.fileno(), self._gone, item)
        log.info("a warm worker is ready", device=device, pid=item.process.pid)
        self._fill(device)

    def _again(self, device: str) -> None:
        count = self._failures[device] = self._failures.get(device, 0) + 1
        self._fill(device, RETRY_SECONDS[min(count, len(RETRY_SECONDS)) - 1])

    async def _make(self, device: str) -> _WarmWorker:
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._threads)
        home = await run(homes.make, self._directory)
        try:
            process = await run(
                self._spawn, ["--device", device, "--socket", str(home.socket), "--spare", warm_worker.ROOM,
                              *self._options], home, self._folder / "spare.log")
        except BaseException:
            self._release(home)
            raise
        making = self._making.setdefault(device, [])
        making.append(process)
        try:
            channel = await run(_reach, home, process)
        except BaseException:
            process.kill()
            self._release(home)
            raise
        finally:
            making.remove(process)
        return _WarmWorker(device, process, home, channel)

    def _gone(self, item: _WarmWorker) -> None:
        """Drop a warm worker that has ended: it sends nothing while it waits, so a readable socket means its end."""
        self._unwatch(item)
        self._end(item)
        if item in self._ready[item.device]:
            self._ready[item.device].remove(item)
            log.warning("a warm worker died", device=item.device, pid=item.process.pid)
            self._again(item.device)

    def _unwatch(self, item: _WarmWorker) -> None:
        asyncio.get_running_loop().remove_reader(item.channel.sock.fileno())

    def _end(self, item: _WarmWorker) -> None:
        item.channel.close()
        item.process.kill()
        threading.Thread(target=self._release, args=(item.home,), name="release").start()


def replace_seconds(processors: int) -> float:
    """Seconds before the replacement of a taken warm worker is started."""
    return 0.0 if processors > FEW else REPLACE_SECONDS


def _ended(process: WorkerProcess) -> None:
    """Wait briefly for the end of a killed process: its device memory is free then."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("a warm worker that gave way has not ended", pid=process.pid)


def _reach(home: Home, process: WorkerProcess) -> Channel:
    """Wait until a new warm worker is ready. Raises :class:`TimedOut`, :class:`LinkError`, OSError."""
    deadline = START_SECONDS
    while True:
        if process.poll() is not None:
            raise OSError(f"it ended with status {process.returncode}; its log is spares/spare.log")
        try:
            channel = reach(home, 0.5)
        except RgpuError:
            deadline -= 0.5
            if deadline <= 0:
                raise
            continue
        channel.sock.settimeout(START_SECONDS)
        try:
            warm_worker.connect(channel)
        except BaseException:
            channel.close()
            raise
        channel.sock.settimeout(None)
        return channel
