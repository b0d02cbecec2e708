"""Three hosts on one machine: network namespaces with addresses of their own, state directories of their own.

What they share is a folder for checkpoints and an etcd, as hosts of a pool do. The programs and their agents run
outside of them, as on a fourth machine without a GPU. A host is killed as a whole (daemon, workers, lease keeper), cut
off by taking its interface down, and joins by an invitation. Needs root and `ip netns`; :func:`unavailable` says why
not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.session.errors import RgpuError
from tests.support.pools.faults import children
from tests.support.pools.pool import ROOT, LocalPool, Program, VerbError
from tests.support.pools.storm import SMALL, TICKS
from tests.support.processes import state
from tests.support.registry.etcd_cluster import EtcdCluster

NAMES = ("host-a", "host-b", "host-c")
CONTROL, DATA = 7070, 7071


def ip(*words: str) -> None:
    """Raises :class:`subprocess.CalledProcessError`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@functools.cache
def unavailable() -> str:
    """Why this machine cannot be three hosts; empty when it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` here (Debian: iproute2)"
    name = f"rgpu-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "up", "type", "veth", "peer", "name", "down")
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}".strip()
    finally:
        with contextlib.suppress(subprocess.CalledProcessError, OSError):
            ip("netns", "del", name)
    return ""


class Network:
    """A bridge with this machine at .1 and a namespace for each host at .11, .12, .13 …"""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self._tag = f"{os.getpid() % 100000}"
        self.bridge = f"rg{self._tag}"
        self.net = f"10.{200 + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self.address = f"{self.net}.1"
        self.hosts = {name: f"{self.net}.{11 + index}" for index, name in enumerate(names)}

    def space(self, host: str) -> str:
        return f"rgpu-{self._tag}-{host}"

    def end(self, index: int) -> str:
        """The bridge's end of a host's link."""
        return f"rg{self._tag}v{index}"

    def __enter__(self) -> Network:
        ip("link", "add", self.bridge, "type", "bridge")
        try:
            ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for index, (host, address) in enumerate(self.hosts.items()):
                space, near = self.space(host), self.end(index)
                ip("netns", "add", space)
                ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", space)
                ip("link", "set", near, "master", self.bridge, "up")
                ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for index, host in enumerate(self.hosts):
            for words in (("link", "del", self.end(index)), ("netns", "del", self.space(host))):
                with contextlib.suppress(subprocess.CalledProcessError):
                    ip(*words)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self.bridge)

    def cut(self, host: str, off: bool) -> None:
        """Take the host's only interface down, or up again."""
        ip("-n", self.space(host), "link", "set", "eth0", "down" if off else "up")


class HostsPool(LocalPool):
    """A pool of three hosts that joined by invitation. The folder of the first one is also the operator's."""

    def __init__(self, folder: Path, network: Network, cluster: EtcdCluster, lease: float = 8.0,
                 devices: tuple[str, ...] = ()) -> None:
        """``devices``: of each host; the node's own default without."""
        super().__init__(folder, 3, lease, registry=cluster.address("hosts"))
        self._device_options = tuple(part for device in devices for part in ("--device", device))
        self.network = network
        self.effects, self.checkpoints = folder / "effects", folder / "images"
        self.checkpoints.mkdir()
        self.environment["RGPU_EFFECTS"] = str(self.effects)
        self.released = folder / "released"
        self._joined = 0
        self.folders = {NAMES[0]: folder / "pool"}
        self.files = PoolFiles(folder / "pool")

    def _start_daemons(self) -> None:
        self.rgpu("keys", "init")
        self.start_daemon(NAMES[0])
        self.wait_ready(NAMES[0])
        for host in NAMES[1:]:
            self.join(host)

    def join(self, host: str) -> None:
        """By an invitation, in a fresh folder."""
        token = self.rgpu("keys", "invite", "--host", host)["token"]
        self._joined += 1
        self.folders[host] = self.folder / f"{host}.{self._joined}"
        self.start_daemon(host, "--join", token)
        self.wait_ready(host)

    def start_daemon(self, host: str, *options: str) -> None:
        """In its namespace; a returning host has its folder still."""
        address = self.network.hosts[host]
        # The others are told when they join.
        registry = ["--registry", self.registry] if host == NAMES[0] and self.registry else []
        with open(self.folder / f"{host}.log", "ab") as log:
            self.servers[host] = subprocess.Popen(
                ["ip", "netns", "exec", self.network.space(host), sys.executable, "-m", "rgpu.cli.main", "server",
                 "--host", host, "--pool", str(self.folders[host]), "--lease", str(self.lease), "--listen", address,
                 "--control-port", str(CONTROL), "--data-port", str(DATA), "--store", str(self.checkpoints), *registry,
                 *self._device_options, *options],
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)

    def wait_ready(self, host: str, seconds: float = 90.0) -> None:
        """Until the pool has it."""
        deadline = time.monotonic() + seconds
        while True:
            process = self.servers[host]
            assert process.poll() is None, \
                f"the daemon of {host} ended with {process.returncode}:\n{self.log_end(host)}"
            with contextlib.suppress(VerbError, RgpuError):
                if any(row["host"] == host and row["answers"] for row in self.living()):
                    break
            assert time.monotonic() < deadline, f"{host} is not there:\n{self.log_end(host)}"
            time.sleep(0.3)

    def client(self) -> ControlClient:
        return ControlClient(KeyPair.load(self.files.key_path("operator")), self.files.read_description().endpoints)

    def ask(self, verb: str, args: dict[str, Any] | None = None, timeout: float = 20.0) -> Any:
        with self.client() as client:
            return client.call(verb, args or {}, timeout=timeout)

    def ticks(self, name: str, rest: float) -> Program:
        return self.run(sys.executable, "-W", "ignore", TICKS, self.released, str(rest), name=name, options=SMALL)

    # -- what happens to hosts -------------------------------------------------------------
    def processes(self, host: str, everything: bool) -> list[int]:
        """Its daemon; with everything that runs on it."""
        daemon = self.servers[host].pid
        found = [daemon] if state(daemon) not in ("", "Z") else []
        if everything:
            found += children(daemon, b"lease_keeper")
            folder = str(self.folders[host]).encode()
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = path.read_bytes()
                    if b"rgpu.server.worker.main" in line and folder + b"/" in line:
                        found.append(int(path.parent.name))
        return found

    def kill(self, host: str, everything: bool) -> None:
        for pid in self.processes(host, everything):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.servers[host].wait()

    def __exit__(self, *error: object) -> None:
        for program in self.programs:
            program.stop()
        for server in self.servers.values():
            if server.poll() is None:
                server.terminate()
        for server in self.servers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(15)
        self._kill_strays()
        for server in self.servers.values():
            server.kill()
            server.wait()
