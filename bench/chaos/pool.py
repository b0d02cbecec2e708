"""The pool of a chaos: daemons that are started again as soon as they die, a store that can be filled, fault points."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import RgpuError
from tests.support.pools.pool import ROOT, LocalPool
from tests.support.pools.proxy import free_port
from tests.support.processes import living

CALM = 4.0  #: seconds that a daemon is left alone after it was there again
ROOM = 64 << 10  #: bytes that a full store still has


class ChaosPool(LocalPool):
    """``nodes`` daemons on one device. ``deaths``: how often a daemon died, and was started again."""

    def __init__(self, folder: Path, device: str, nodes: int, lease: float, store_bytes: int) -> None:
        super().__init__(folder, nodes, lease, device)
        self.hosts = [f"node-{chr(97 + index)}" for index in range(nodes)]
        #: Control and data, as where they are configured.
        self._ports = {host: (free_port(), free_port()) for host in self.hosts}
        self.fault = folder / "fault"
        self.store = folder / "store"
        self.no_store = ""  #: why the store cannot be filled here
        self.deaths = 0
        self._store_bytes = store_bytes
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._since = dict.fromkeys(self.hosts, 0.0)  #: when each daemon was started
        self._daemon = {host: threading.Lock() for host in self.hosts}
        self._store_turn, self._fault_turn = threading.Lock(), threading.Lock()
        self._local = threading.local()

    # -- begin and end ----------------------------------------------------------------------
    def __enter__(self) -> ChaosPool:
        try:
            self._mount()
            self.rgpu("keys", "init")
            for host in self.hosts:
                self.start_daemon(host)
            deadline = time.monotonic() + 120
            while not all(self.ready(host) for host in self.hosts) or not self._leader():
                if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.servers.values()):
                    raise RuntimeError(f"the daemons do not come up\n{self.logs()[-4000:]}")
                time.sleep(0.2)
            self._watcher.start()
        except BaseException:  # nobody calls __exit__ then
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._watcher.ident is not None:
            self._watcher.join(10)
        with contextlib.suppress(Exception):
            self.rgpu("down", timeout=30)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self.servers.values():
            with contextlib.suppress(OSError):
                daemon.kill()
            daemon.wait()
        if not self.no_store:
            subprocess.run(["umount", "-l", str(self.store)], capture_output=True)

    def _mount(self) -> None:
        """The store is a file system of its own in memory, where that may be had: only such a one can be full."""
        self.store.mkdir(parents=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self._store_bytes},mode=700", "rgpu-chaos",
                               str(self.store)], capture_output=True, text=True)
        self.no_store = done.stderr.strip() if done.returncode else ""

    def move_ports(self, host: str) -> None:
        """Have its next daemon listen elsewhere, as where ports are not configured."""
        self._ports[host] = (free_port(), free_port())

    def start_daemon(self, host: str) -> None:
        environment = {**self.environment, "RGPU_FAULT_FILE": str(self.fault)}
        with open(self.folder / f"{host}.log", "ab") as log:
            self.servers[host] = subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--device", self.device,
                 "--lease", str(self.lease), "--store", str(self.store), "--control-port", str(self._ports[host][0]),
                 "--data-port", str(self._ports[host][1])],
                env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._since[host] = time.monotonic()

    def _watch(self) -> None:
        """As a service manager does: a daemon that died is started again at once."""
        while not self._stop.wait(0.05):
            for host, daemon in self.servers.items():
                if daemon.poll() is not None and not self._stop.is_set():
                    self.deaths += 1
                    self.start_daemon(host)

    def processes(self) -> list[int]:
        """All that belongs to this pool: its folder stands in the environment or on the command line."""
        return living(self.folder)

    # -- asking ---------------------------------------------------------------------------------
    def ask(self, verb: str, args: dict[str, Any] | None = None, timeout: float = 20.0) -> dict[str, Any]:
        """What the command line asks. Raises :class:`RgpuError`."""
        files = PoolFiles(self.folder / "pool")
        with ControlClient(KeyPair.load(files.key_path("operator")), files.read_description().endpoints) as client:
            return dict(client.call(verb, args or {}, timeout=timeout))

    def row(self, session: str) -> dict[str, Any]:
        """The session in ``rgpu ps --all``; empty when nobody can say."""
        with contextlib.suppress(RgpuError, OSError):
            for row in self.ask("session.list", {"all": True, "all_users": True})["sessions"]:
                if row["session"] == session:
                    return dict(row)
        return {}

    def nodes_there(self) -> list[dict[str, Any]]:
        """``rgpu nodes``; empty when nobody can say."""
        with contextlib.suppress(RgpuError, OSError):
            return list(self.ask("node.list")["nodes"])
        return []

    def _leader(self) -> str:
        return next((node["host"] for node in self.nodes_there() if node.get("leader")), "")

    def ready(self, host: str) -> bool:
        """Whether its daemon, the one that runs now, has said so."""
        with contextlib.suppress(OSError, ValueError):
            said = json.loads((self.folder / "pool" / "nodes" / host / "server.json").read_bytes())
            return bool(said.get("ready")) and said.get("pid") == self.servers[host].pid
        return False

    # -- what one disturbs at a time ----------------------------------------------------------
    @contextlib.contextmanager
    def daemon(self, host: str, patience: float = 15.0) -> Iterator[int]:
        """A daemon's process, alone, after it has been there for a moment. Raises :class:`TimeoutError`."""
        until = time.monotonic() + patience
        lock = self._daemon[host]
        if not lock.acquire(timeout=patience):
            raise TimeoutError(f"the daemon of {host} is being disturbed already")
        try:
            while not (self.ready(host) and time.monotonic() - self._since[host] > CALM):
                if time.monotonic() > until or self._stop.is_set():
                    raise TimeoutError(f"the daemon of {host} is not back yet")
                time.sleep(0.1)
            yield self.servers[host].pid
        finally:
            lock.release()

    @contextlib.contextmanager
    def full_store(self, patience: float = 15.0) -> Iterator[None]:
        """No room left, until the block ends."""
        if not self._store_turn.acquire(timeout=patience):
            raise TimeoutError("the store is full already")
        filler = self.store / "filler"
        try:
            with open(filler, "wb") as file:
                free = os.statvfs(self.store)
                if (rest := free.f_bavail * free.f_frsize - ROOM) > 0:
                    os.posix_fallocate(file.fileno(), 0, rest)
            yield
        finally:
            filler.unlink(missing_ok=True)
            self._store_turn.release()

    @contextlib.contextmanager
    def armed(self, point: str, patience: float = 15.0) -> Iterator[Path]:
        """A fault point, armed until the block ends; the file that appears when it was reached."""
        if not self._fault_turn.acquire(timeout=patience):
            raise TimeoutError("another fault point is armed")
        fired = Path(f"{self.fault}.{point.partition(':')[0]}.fired")
        try:
            fired.unlink(missing_ok=True)
            new = self.fault.with_suffix(".new")
            new.write_text(point)
            os.rename(new, self.fault)
            yield fired
        finally:
            self.fault.unlink(missing_ok=True)
            fired.unlink(missing_ok=True)
            self._fault_turn.release()
