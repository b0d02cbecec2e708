"""The parent's side of the lease keeper: start it, tell it what to keep, start it again if it dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from rgpu.migrate.membership.lease_keeper import HELD, SLOTS, DeadlinePage, granted_until
from rgpu.migrate.registry.clock import boot_time_ns

#: Slots by what they are for.
NODE_SLOT, LEADER_SLOT = 0, 1
SIGN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease that the keeper renews, seen through the shared page."""

    page: DeadlinePage
    slot: int
    lease: int

    def deadline(self) -> int:
        """CLOCK_BOOTTIME in ns after which the holder stops acting; 0 once the lease was lost."""
        return self.page.deadline(self.slot) if self.page.lease(self.slot) == self.lease else 0

    def in_time(self) -> bool:
        """Tell whether the deadline has not passed."""
        return boot_time_ns() < self.deadline()

    def held(self) -> bool:
        """Whether the registry answered the last keep-alive with yes."""
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
        self.page.sign_of_life()
        self._start()
        self._thread = threading.Thread(target=self._signs, daemon=True, name="lease-signs")
        self._thread.start()

    @property
    def pid(self) -> int:
        """The keeper process's id."""
        return self._process.pid if self._process else 0

    def wait_started(self, seconds: float = 30.0) -> None:
        """Until the keeper can renew: a short lease that is granted before may run out while it starts."""
        until = time.monotonic() + seconds
        while not self.page.keeper_up() and not self._stop.wait(0.005) and time.monotonic() < until:
            pass

    def keep(self, slot: int, lease: int, ttl: float, granted_ns: int) -> KeptLease:
        """Renew ``lease`` from now on. ``granted_ns``: CLOCK_BOOTTIME before it was asked for."""
        if not 0 <= slot < SLOTS:
            raise ValueError(f"slot {slot}")
        with self._lock:
            self._kept[slot] = (lease, ttl)
            self.page.write(slot, granted_until(granted_ns, ttl), lease, HELD)
            self._say(f"keep {slot} {lease} {ttl}\n")
        return KeptLease(self.page, slot, lease)

    def drop(self, slot: int) -> None:
        """Renew it no longer; the caller revokes it."""
        with self._lock:
            self._kept.pop(slot, None)
            self.page.write(slot, 0, 0, 0)
            self._say(f"drop {slot}\n")

    def close(self) -> None:
        """End the keeper; leases that were not revoked run out."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
                try:
                    self._process.wait(2)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
        self.page.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rgpu.migrate.membership.lease_keeper", self._registry, str(self.page.fd),
             str(self._patience)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(self.page.fd,), start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has died: it is started again, and told everything anew

    def _signs(self) -> None:
        """Signs of life, and a new keeper in place of a dead one."""
        while not self._stop.wait(SIGN_SECONDS):
            self.page.sign_of_life()
            with self._lock:
                if self._process is None or self._process.poll() is None:
                    continue
                self._start()
                for slot, (lease, ttl) in self._kept.items():
                    self._say(f"keep {slot} {lease} {ttl}\n")
