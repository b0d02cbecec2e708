"""The parent's side of the lease keeper: start it, send it commands, start it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from rgpu.migrate.membership.lease_keeper import HELD, SLOTS, DeadlinePage, granted_until
from rgpu.migrate.registry.clock import NANOSECOND, boot_time_ns

#: Slots of the page by purpose.
NODE_SLOT, LEADER_SLOT = 0, 1
SIGN_SECONDS = 1.0  #: between two signs of life; less where the keeper's patience is short
LOOK_SECONDS = 5.0  #: between two reads of a deadline: its clock runs while the host is suspended, timers do not


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease that the keeper renews, as read from the shared page."""

    page: DeadlinePage
    slot: int
    lease: int

    def deadline(self) -> int:
        """CLOCK_BOOTTIME in ns after which the holder stops acting; 0 once the lease was lost."""
        return self.page.deadline(self.slot) if self.page.lease(self.slot) == self.lease else 0

    def in_time(self) -> bool:
        """Whether the deadline has not passed."""
        return boot_time_ns() < self.deadline()

    def held(self) -> bool:
        """Whether the last keep-alive was acknowledged."""
        return self.page.lease(self.slot) == self.lease and self.page.state(self.slot) == HELD


class LeaseKeeper:
    """One keeper process for this daemon. ``registry``: its address; ``patience``: see the keeper."""

    def __init__(self, registry: str, patience: float = 10.0) -> None:
        self.page = DeadlinePage.create()
        self._registry = registry
        self._patience = patience
        self._kept: dict[int, tuple[int, float]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self.page.sign_of_life()
        self._start()
        self._thread = threading.Thread(target=self._signs, daemon=True, name="lease-signs")
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the keeper."""
        return self._process.pid if self._process else 0

    def wait_started(self, seconds: float = 30.0) -> None:
        """Wait until the keeper can renew: a short lease that is granted before may expire while it starts."""
        until = time.monotonic() + seconds
        while not self.page.keeper_up() and not self._stop.wait(0.005) and time.monotonic() < until:
            pass

    def keep(self, slot: int, lease: int, ttl: float, granted_ns: int) -> KeptLease:
        """Renew ``lease`` from now on. ``granted_ns``: CLOCK_BOOTTIME before the lease was requested."""
        if not 0 <= slot < SLOTS:
            raise ValueError(f"slot {slot}")
        with self._lock:
            self._kept[slot] = (lease, ttl)
            self.page.write(slot, granted_until(granted_ns, ttl), lease, HELD)
            self._say(f"keep {slot} {lease} {ttl}\n")
        return KeptLease(self.page, slot, lease)

    def drop(self, slot: int) -> None:
        """Renew the slot's lease no longer; the caller revokes it."""
        with self._lock:
            self._kept.pop(slot, None)
            self.page.write(slot, 0, 0, 0)
            self._say(f"drop {slot}\n")

    async def over(self, kept: KeptLease) -> None:
        """Return once the lease's deadline has passed, or the keeper has marked it lost."""
        waiter = asyncio.get_running_loop(), asyncio.Event()
        self._waiters.add(waiter)
        try:
            while kept.in_time():
                left = (kept.deadline() - boot_time_ns()) / NANOSECOND
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(LOOK_SECONDS, max(0.001, left))):
                        await waiter[1].wait()
                waiter[1].clear()
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """End the keeper; leases that were not revoked expire."""
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
                try:
                    self._process.wait(2)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                if self._process.stdout is not None:
                    self._process.stdout.close()
        self.page.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rgpu.migrate.membership.lease_keeper", self._registry, str(self.page.fd),
             str(self._patience)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(self.page.fd,), start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # the keeper has died: the next one is sent all commands again

    def _signs(self) -> None:
        """Write signs of life, replace a dead keeper, and pass on its notices."""
        interval = min(SIGN_SECONDS, self._patience / 10)
        while not self._stop.is_set():
            self.page.sign_of_life()
            process = self._process
            assert process is not None and process.stdout is not None
            poll = select.poll()
            for fd in (process.stdout.fileno(), self._wake):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(interval * 1000)}
            if process.stdout.fileno() in ready:
                if os.read(process.stdout.fileno(), 4096):
                    self._pass_on()
                elif not self._stop.is_set():
                    self._start_again(process)

    def _pass_on(self) -> None:
        for loop, event in list(self._waiters):
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(event.set)

    def _start_again(self, dead: subprocess.Popen[bytes]) -> None:
        """Start another keeper after one closed its output, so has died, and send it all commands again."""
        with self._lock:
            dead.wait()
            for pipe in (dead.stdin, dead.stdout):
                with contextlib.suppress(OSError):  # flushing commands that it did not read
                    assert pipe is not None
                    pipe.close()
            self._start()
            for slot, (lease, ttl) in self._kept.items():
                self._say(f"keep {slot} {lease} {ttl}\n")
