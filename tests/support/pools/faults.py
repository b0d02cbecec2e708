"""Faults at a chosen step of a move: hold the move at a point, break one of those who take part, let it go on.

:mod:`tests.support.pools.fire` breaks whoever *reaches* a point; here anybody may be
broken while the move stands there: a worker that nobody talks to at that
moment, a whole node, one of the two data links. See :class:`Disturbance`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.pools.fire import OTHER, Fire, Outcome
from tests.support.pools.pool import ROOT, LocalPool, VerbError
from tests.support.pools.proxy import Proxy, free_port
from tests.support.processes import command_line, living, state

#: Of the steps of a good move, in their order; whoever reaches it waits there for HOLD seconds.
POINTS = ("connected", "round", "ahead", "ahead.made", "paused", "state", "verify", "rebuild", "verified", "sent",
          "mover.write_ready", "mover.write_commit", "mover.write_commit.done", "mover.reconcile", "daemon.activate",
          "daemon.forget", "mover.write_clear")
HOLD = 1.2
#: Longer than a lease of 2 s and than the patience of the lease keeper: others have taken over before it is thawed.
FROZEN = 8.0
#: A link may be silent for longer than an agent waits before it asks who the owner is.
STALLED = 3.5
ACTORS = ("source worker", "destination worker", "source daemon", "destination daemon", "coordinator", "source node",
          "destination node")


class WatchedPool(LocalPool):
    """Remembers what it left behind when it went down. ``proxied``: each data port stands behind a proxy."""

    def __init__(self, folder: Path, nodes: int = 3, lease: float = 2.0, proxied: bool = False) -> None:
        super().__init__(folder, nodes, lease)
        self.proxies: dict[str, Proxy] = {}
        self.left: list[str] = []
        self._proxied = proxied
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> WatchedPool:
        if not self._proxied:
            super().__enter__()
            return self
        self.begin_registry()
        self.rgpu("keys", "init")
        for host in sorted(OTHER):
            self._start_behind_proxy(host)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(VerbError):
                if len(self.living()) == len(OTHER):
                    return self
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def _start_behind_proxy(self, host: str) -> None:
        port = free_port()
        proxy = self.proxies[host] = Proxy(("127.0.0.1", port))
        with open(self.folder / f"{host}.log", "ab") as log:
            self._daemons.append(subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", str(self.lease),
                 "--data-port", str(port), "--advertise-data", f"127.0.0.1:{proxy.address[1]}"],
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for proxy in self.proxies.values():
            proxy.close()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def _kill_strays(self) -> None:
        """Called after ``rgpu down``: whatever is there a moment later was left behind."""
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left = [command_line(pid) for pid in left]
        super()._kill_strays()

    def processes(self) -> list[int]:
        """Living processes of this pool: its folder stands in their environment or on their command line."""
        return living(self.folder)


class Disturbance(Fire):
    """One program, one move, one fault in it. Use as a context manager; then :meth:`check`."""

    def __init__(self, case: str, point: str, *, proxied: bool = False, hold: float = HOLD,
                 action: str = "") -> None:
        super().__init__(case, f"{point}:{action or f'delay:{hold}'}")
        self.pool: WatchedPool = WatchedPool(self.folder, proxied=proxied)
        self.pool.environment["RGPU_FAULT_FILE"] = str(self.armed)
        self.source = self.destination = self.leader = ""
        self.pids: dict[str, int] = {}

    def look(self) -> None:
        """See who is source, coordinator and destination."""
        super().look()
        nodes = eventually(self._whole, "not all nodes are there, or nobody leads", every=0.1)
        self.pids = {row["host"]: row["pid"] for row in nodes}
        self.source = self.row["host"]
        self.leader = next(row["host"] for row in nodes if row["leader"])
        # The coordinator is a third node where that is possible.
        others = [host for host in sorted(self.pids) if host not in (self.source, self.leader)]
        self.destination = others[0]

    def _whole(self) -> list[dict[str, Any]]:
        """Rows of the nodes, once all are there and one of them leads."""
        with contextlib.suppress(VerbError):
            found = self.pool.living()
            if len(found) == len(OTHER) and any(row["leader"] for row in found):
                return found
        return []

    def depose(self) -> None:
        """Have another node lead, though the leader lives: its leases run out, as on a machine that is too busy."""
        keepers = children(self.pids[self.leader], b"lease_keeper")
        assert keepers, "nobody keeps the leader's lease"
        try:
            for keeper in keepers:
                os.kill(keeper, signal.SIGSTOP)
            eventually(self._another_leads, "no other leader was elected", every=0.1)
        finally:
            for keeper in keepers:
                os.kill(keeper, signal.SIGCONT)

    def _another_leads(self) -> bool:
        with contextlib.suppress(VerbError):
            return any(row["leader"] and row["host"] != self.leader for row in self.pool.living())
        return False

    def start_move(self) -> subprocess.Popen[str]:
        """By copy, whose points they are (auto may take a replay)."""
        return subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "migrate", "fire", self.destination, "--mode", self.mode,
             "-o", "json"],
            env=self.pool.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def victims(self, actor: str) -> list[int]:
        """The processes of an actor, as they are now."""
        if actor == "coordinator":
            return [self.pids[self.leader]]
        side, what = actor.split()
        host = self.source if side == "source" else self.destination
        found = [self.pids[host]] if what in ("daemon", "node") else []
        if what in ("worker", "node"):
            folder = str(self.pool.folder / "pool" / "nodes" / host / "workers").encode()
            found += [pid for pid in self.workers() if folder in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if what == "node":  # the keeper of its leases too
            found += children(self.pids[host], b"lease_keeper")
        return found

    def check(self, expected: str) -> Outcome:
        """Same digest, exit code 0; one worker, the one on record, has the session; nothing is left behind."""
        outcome = self.outcome
        self._one_owner()
        self.released.touch()
        outcome.digest = self.program.finish(90)
        assert outcome.digest == expected, "another digest"
        self.pool.__exit__()
        assert not self.pool.left, f"left behind: {self.pool.left}"
        return outcome

    def _one_owner(self) -> None:
        """The registry names one owner, and nobody else answers for the session: at once, or after a moment.

        A worker whose daemon was killed answers nobody new; it waits a minute for a daemon to adopt it.
        """
        deadline = time.monotonic() + 60
        while self.program.process.poll() is None:
            with contextlib.suppress(VerbError):
                row = self.pool.session("fire")
                workers = [pid for pid in self.workers() if pid == row["worker_pid"] or not self._orphan(pid)]
                self.outcome.owners = len(workers)
                if row["state"] == "running" and workers == [row["worker_pid"]]:
                    self.outcome.notes.append(f"{row['host']}@{row['epoch']}")
                    return
                assert time.monotonic() < deadline, f"workers {workers}, on record {row}"
            time.sleep(0.1)

    def _orphan(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            return any(f"/nodes/{host}/workers/" in line and state(daemon) in ("", "Z")
                       for host, daemon in self.pids.items())
        return True

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            if state(process) == "T":
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGCONT)
        self.outcome.seconds = time.monotonic() - self.began
        if error[0] is not None or not self.program.process.poll() is not None:
            self.outcome.notes.append("RED" if self.outcome.fired else "unreached")
            (self.folder / "logs.txt").write_text(self.pool.logs())
        if not self._down:
            self.pool.__exit__(*error)

    @property
    def _down(self) -> bool:
        return not self.pool.processes()


def break_actor(fire: Disturbance, actor: str, how: str) -> Callable[[], None]:
    """Kill, freeze, or have the leader's lease lapse; what is returned undoes the freeze."""
    if how == "lapse":
        fire.depose()
        return lambda: None
    found = fire.victims(actor)
    if not found:
        fire.outcome.notes.append("nobody there")
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def thaw() -> None:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return thaw


def children(parent: int, word: bytes) -> list[int]:
    """Children of a process that have a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent \
                    and word in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
