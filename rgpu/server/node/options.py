"""What a node daemon is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rgpu.link.keys import PoolFiles
from rgpu.migrate.leader.silence import AGENT_GRACE
from rgpu.server.box.walls import Mode
from rgpu.server.module_cache import DEFAULT_SIZE
from rgpu.server.node.ports.scrape_guard import ScrapeOptions
from rgpu.session.errors import UsageError


@dataclass(frozen=True)
class Options:
    """What `rgpu server` was told. Sizes in bytes, lease in seconds."""

    files: PoolFiles
    host: str
    devices: tuple[str, ...]
    device_memory: int
    listen: str
    control_port: int
    data_port: int
    lease: float
    coordinator: bool
    log_level: str
    module_cache_size: int = DEFAULT_SIZE  #: bytes of module binaries kept on disk; 0: none
    registry: str = ""  #: etcd://…, embedded:PATH; "": the one that pool.json names
    store: str = ""  #: where checkpoints are; the pool's directory if empty
    store_credentials: Path | None = None
    keep_images: int = 3  #: newest checkpoints of each session that stay; 0: all
    checkpoint_bandwidth: int = 0  #: bytes/s for all checkpoints together; 0: no limit
    enforce_compute: str = "shared"  #: when sessions are held to their shares (:mod:`rgpu.server.node.workers.compute`)
    spares: int = 0  #: workers that stand ready for each device; -1: as many as its memory allows
    advertise_data: str = ""  #: HOST:PORT under which the data port is reached, if not its own
    client_grace: float = AGENT_GRACE  #: s that a client's host may be silent, where its session does not say
    box: Mode = Mode.AUTO  #: which walls stand around workers (:mod:`rgpu.server.box.walls`)
    worker_uids: tuple[int, int] | None = None  #: users for workers, first and last; None: the daemon's
    worker_memory: int = 0  #: bytes of host memory that a worker may have; 0: nearly all that the host has
    worker_io: int = 0  #: bytes a second that a worker may read, and write, of the node's disks; 0: no bound
    cgroup: str = ""  #: a folder of cgroup v2 that may be divided among workers; "": the daemon's own, where it may
    web: str = ""  #: HOST:PORT of the web page; empty: none
    web_url: str = ""  #: where browsers find it, if not there: behind a proxy
    metrics: ScrapeOptions = ScrapeOptions()  #: where Prometheus may scrape, and what it must show

    @property
    def registry_address(self) -> str:
        """Where the registry is. Raises :class:`NotFound`, :class:`Corrupt`."""
        return self.registry or self.files.registry_address()

    @property
    def advertised(self) -> tuple[str, int] | None:
        """Where others reach the data port, if that is not its own address. Raises :class:`UsageError`."""
        if not self.advertise_data:
            return None
        host, _, port = self.advertise_data.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"{self.advertise_data!r} is no HOST:PORT")
        return host, int(port)
