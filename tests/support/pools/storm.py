"""A storm: sessions of a pool are moved, checkpointed, killed, frozen and cut off at random, and so is its etcd.

Seeded: the same seed chooses the same faults, if not at the same instants of the
programs. Whatever was broken is whole again when the storm ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import RgpuError
from tests.support.pools.faults import children
from tests.support.pools.pool import ROOT, LocalPool, Program
from tests.support.pools.proxy import Proxy, free_port
from tests.support.processes import state
from tests.support.registry.etcd_cluster import EtcdCluster, Member

TICKS = ROOT / "tests" / "scenarios" / "programs" / "ticks.py"
SMALL = ("--memory", "64MiB")
#: Between two faults by which a whole node is lost, seconds; in so many no more than two workers are killed. A session
#: whose worker ends a third time in one place is given up, which is the rule (OWNERSHIP 9) and not what is looked for.
CALM_BETWEEN = 20.0


class StormPool(LocalPool):
    """Daemons started one by one, data ports behind proxies, effects written down.

    ``cluster``: an etcd, each member behind a proxy of its own, which can be cut off from all clients.
    """

    def __init__(self, folder: Path, cluster: EtcdCluster, lease: float = 5.0) -> None:
        self.cluster = cluster
        self.doors = [Proxy(("127.0.0.1", member.client)) for member in cluster.members]
        endpoints = ",".join(f"127.0.0.1:{door.address[1]}" for door in self.doors)
        super().__init__(folder, 3, lease, registry=f"etcd://{endpoints}/storm?timeout=2")
        self.proxies: dict[str, Proxy] = {}
        self.effects = folder / "effects"
        self.environment["RGPU_EFFECTS"] = str(self.effects)
        self.released = folder / "released"

    def start_daemon(self, host: str) -> None:
        """The first time and each further one: on the port that its proxy knows."""
        if host not in self.proxies:
            self.proxies[host] = Proxy(("127.0.0.1", free_port()))
        proxy = self.proxies[host]
        with open(self.folder / f"{host}.log", "ab") as log:
            self.servers[host] = subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--lease", str(self.lease),
                 "--registry", self.registry, "--data-port", str(proxy.target[1]),
                 "--advertise-data", f"127.0.0.1:{proxy.address[1]}"],
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for proxy in (*self.proxies.values(), *self.doors):
            proxy.close()

    def ticks(self, name: str) -> Program:
        return self.run(sys.executable, "-W", "ignore", TICKS, self.released, "0.02", name=name, options=SMALL)

    def client(self) -> ControlClient:
        files = PoolFiles(self.folder / "pool")
        return ControlClient(KeyPair.load(files.key_path("operator")), files.read_description().endpoints)

    def workers(self, host: str) -> list[int]:
        """Living workers in the folder of a host."""
        folder, found = str(self.folder / "pool" / "nodes" / host / "workers").encode(), []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if folder in path.read_bytes() and state(int(path.parent.name)) not in ("", "Z"):
                    found.append(int(path.parent.name))
        return found


class Storm:
    """Injects faults at random until :meth:`calm`. ``counts``: what happened, by name."""

    def __init__(self, pool: StormPool, sessions: list[str], seed: int) -> None:
        self.pool, self.sessions = pool, sessions
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._heals: list[tuple[float, Callable[[], None]]] = []  #: (when, what undoes a fault)
        self._asking: list[threading.Thread] = []
        self._broken_member: Member | None = None
        self._node_lost = -CALM_BETWEEN  #: when a node was, last
        self._workers_killed: list[float] = []  #: when, in the last CALM_BETWEEN
        self._faults: dict[str, tuple[int, Callable[[], None]]] = {
            "move": (8, self._move), "checkpoint": (5, self._checkpoint), "kill worker": (3, self._kill_worker),
            "freeze worker": (2, self._freeze_worker), "kill daemon": (2, self._kill_daemon),
            "freeze daemon": (2, self._freeze_daemon), "kill node": (1, self._kill_node), "cut link": (3, self._cut),
            "kill member": (2, lambda: self._member("kill")), "freeze member": (2, lambda: self._member("freeze")),
            "cut off member": (2, lambda: self._member("cut"))}

    def rage(self, seconds: float, pause: tuple[float, float] = (0.3, 1.5)) -> None:
        """One fault after the other, for so long; at least one of each kind that the seed chooses first."""
        until = time.monotonic() + seconds
        names, weights = zip(*((name, weight) for name, (weight, _) in self._faults.items()), strict=True)
        while time.monotonic() < until:
            self._heal(time.monotonic())
            name = self._chance.choices(names, weights)[0]
            with contextlib.suppress(ProcessLookupError):
                self._faults[name][1]()
            self._wait(min(until, time.monotonic() + self._chance.uniform(*pause)))

    def calm(self) -> None:
        """Undo everything that still stands, and wait for what was asked."""
        self._heal(float("inf"))
        for thread in self._asking:
            thread.join(120)
        self.pool.cluster.wait_ready()

    def _wait(self, until: float) -> None:
        while (now := time.monotonic()) < until:
            self._heal(now)
            time.sleep(0.05)

    def _heal(self, now: float) -> None:
        due, self._heals = ([heal for heal in self._heals if heal[0] <= now],
                            [heal for heal in self._heals if heal[0] > now])
        for _, undo in due:
            with contextlib.suppress(ProcessLookupError):
                undo()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        self._heals.append((time.monotonic() + seconds, undo))

    # -- what is asked of the pool ------------------------------------------------------
    def _ask(self, what: str, verb: str, args: dict[str, Any]) -> None:
        """In the background: in a storm an answer may take long, and many are refusals."""
        def ask() -> None:
            try:
                with self.pool.client() as client:
                    client.call(verb, args, timeout=60)
                self.counts[f"{what} done"] += 1
            except RgpuError as error:
                self.counts[f"{what} {error.code}"] += 1

        self._asking = [thread for thread in self._asking if thread.is_alive()]
        if len(self._asking) < 6:
            thread = threading.Thread(target=ask, daemon=True)
            self._asking.append(thread)
            thread.start()

    def _move(self) -> None:
        host, session = self._chance.choice(sorted(self.pool.servers)), self._chance.choice(self.sessions)
        mode = self._chance.choice(("copy", "auto", "replay"))
        self._ask("move", "session.migrate", {"session": session, "host": host, "options": {"mode": mode}})

    def _checkpoint(self) -> None:
        self._ask("checkpoint", "session.checkpoint", {"session": self._chance.choice(self.sessions)})

    # -- workers and daemons --------------------------------------------------------------
    def _some_worker(self) -> int | None:
        host = self._chance.choice(sorted(self.pool.servers))
        found = self.pool.workers(host)
        return self._chance.choice(found) if found else None

    def _kill_worker(self) -> None:
        if (pid := self._some_worker()) is not None and self._may_kill():
            os.kill(pid, signal.SIGKILL)
            self.counts["workers killed"] += 1

    def _freeze_worker(self) -> None:
        seconds = self._chance.choice((0.5, 3.0, 8.0))
        if (pid := self._some_worker()) is not None:
            self._freeze([pid], seconds, "workers frozen")

    def _freeze(self, pids: list[int], seconds: float, what: str) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.counts[what] += 1

        def thaw() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        self._later(seconds, thaw)

    def _daemon(self) -> tuple[str, subprocess.Popen[bytes]] | None:
        """One that is alive and not frozen."""
        host = self._chance.choice(sorted(self.pool.servers))
        process = self.pool.servers[host]
        return (host, process) if process.poll() is None and state(process.pid) != "T" else None

    def _kill_daemon(self, with_workers: bool = False) -> None:
        """With its workers and its lease keeper it is a whole host that dies."""
        back, found = self._chance.uniform(0.2, 4.0), self._daemon()
        if found is None or not self._may_lose():
            return
        host, process = found
        pids = [process.pid]
        if with_workers:
            pids += [*self.pool.workers(host), *children(process.pid, b"lease_keeper")]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self.counts["nodes killed" if with_workers else "daemons killed"] += 1
        self._later(back, lambda: self.pool.start_daemon(host))

    def _kill_node(self) -> None:
        self._kill_daemon(with_workers=True)

    def _freeze_daemon(self) -> None:
        seconds, found = self._chance.choice((1.0, 6.0, 9.0)), self._daemon()
        if found is not None:
            self._freeze([found[1].pid], seconds if self._may_lose() else 1.0, "daemons frozen")

    def _may_lose(self) -> bool:
        if time.monotonic() - self._node_lost < CALM_BETWEEN:
            return False
        self._node_lost = time.monotonic()
        return True

    def _may_kill(self) -> bool:
        now = time.monotonic()
        self._workers_killed = [when for when in self._workers_killed if now - when < CALM_BETWEEN][-2:]
        if len(self._workers_killed) == 2:
            return False
        self._workers_killed.append(now)
        return True

    def _cut(self) -> None:
        proxy, seconds = self._chance.choice(list(self.pool.proxies.values())), self._chance.uniform(0.3, 3.0)
        mode = self._chance.choice(("drop", "stall", "cut", "flip", "delay"))
        if proxy.mode == "pass":
            proxy.set(mode)
            self.counts["links cut"] += 1
            self._later(seconds, lambda: proxy.set("pass"))

    # -- etcd -------------------------------------------------------------------------------
    def _member(self, how: str) -> None:
        """One at a time: two of three are a majority still."""
        cluster, seconds = self.pool.cluster, self._chance.uniform(1.0, 4.0)
        index = self._chance.randrange(len(cluster.members))
        member, door = cluster.members[index], self.pool.doors[index]
        if self._broken_member is not None:
            return
        self._broken_member = member
        if how == "kill":
            member.kill()
        elif how == "freeze":
            member.pause()
        else:
            door.set("drop" if seconds > 2.5 else "stall")
        self.counts[f"members {dict(kill='killed', freeze='frozen', cut='cut off')[how]}"] += 1

        def undo() -> None:
            if how == "kill":
                cluster.start(member)
            elif how == "freeze":
                member.resume()
            else:
                door.set("pass")
            self._broken_member = None

        self._later(seconds, undo)
