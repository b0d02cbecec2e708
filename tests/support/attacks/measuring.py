"""How long others wait meanwhile: each question is asked over connections of its own, as a client that just came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rgpu.link.control import ControlClient
from rgpu.link.data.frames import client_preamble, connect
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.session.errors import LinkError
from tests.support.pools.pool import LocalPool


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


@dataclass
class Asker:
    """A user of the pool who has a session there. Times are s."""

    pool: LocalPool
    key: str = "user"
    waited: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    again: int = 0  #: data links that broke while they were opened, and were tried again

    @property
    def files(self) -> PoolFiles:
        return PoolFiles(self.pool.folder / "pool")

    def client(self, **options: Any) -> ControlClient:
        """A connection of this user to the pool."""
        return ControlClient(KeyPair.load(self.files.key_path(self.key)), self.endpoints(), **options)

    def endpoints(self) -> list[Endpoint]:
        return self.files.read_description().endpoints

    def create(self, name: str, memory: int = 1 << 20) -> dict[str, Any]:
        """A session without a program."""
        with self.client() as client:
            return dict(client.call("session.create", {
                "name": name, "memory": memory, "recover": False, "parent": "", "options": {},
                "program": {"pid": 1, "command": "none", "host": "elsewhere"}}, timeout=60))

    def ping(self) -> float:
        """Ask a node whether it is there, over a new connection."""
        began = time.monotonic()
        with self.client() as client:
            client.call("pool.ping", {}, timeout=30)
        return time.monotonic() - began

    def attach(self, session: str) -> float:
        """Ask who has the session, renew its ticket, and open a data link: all anew."""
        began = time.monotonic()
        with self.client() as client:
            owner = client.call("session.owner", {"session": session, "epoch": 0}, timeout=30)
            granted = client.call("session.renew_ticket", {"session": session}, timeout=30)
        host, port = owner["address"]
        while True:  # as an agent does: what breaks while it is opened is tried again
            sock = connect((host, int(port)))
            try:
                client_preamble(sock, "lane", granted["ticket"], granted["secret"], session)
                break
            except LinkError:
                self.again += 1
                time.sleep(0.02)
            finally:
                sock.close()
        return time.monotonic() - began

    def measure(self, what: Any, seconds: float, pause: float = 0.05) -> None:
        """Do ``what`` over and over; errors are kept, in words."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                self.waited.append(what())
            except Exception as error:  # noqa: BLE001 - counted by the test
                self.failed.append(repr(error))
            time.sleep(pause)


def daemon_pid(pool: LocalPool, host: str) -> int:
    """Of the daemon of that node."""
    return int(server_state(pool, host)["pid"])


def server_state(pool: LocalPool, host: str) -> dict[str, Any]:
    """What that node's daemon wrote of itself."""
    return dict(json.loads((pool.folder / "pool" / "nodes" / host / "server.json").read_bytes()))


def memory_of(pid: int) -> int:
    """Bytes resident in memory at most since the process began."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no process {pid}")


def descriptors_of(pid: int) -> int:
    """Descriptors that the process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
