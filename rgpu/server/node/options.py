"""The options of a node daemon."""

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
    """The options of `rgpu server`. Sizes in bytes, lease in seconds."""

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
    store: str = ""  #: where checkpoints are stored; the pool's directory if empty
    store_credentials: Path | None = None
    keep_images: int = 3  #: newest checkpoints of each session that are kept; 0: all
    checkpoint_bandwidth: int = 0  #: bytes/s for all checkpoints together; 0: no limit
    enforce_compute: str = "shared"  #: when sessions are held to their shares (:mod:`rgpu.server.node.workers.compute`)
    spares: int = 0  #: warm workers for each device; -1: as many as its memory allows
    advertise_data: str = ""  #: HOST:PORT at which others reach the data port, if not its own
    client_grace: float = AGENT_GRACE  #: s that a client's host may be silent, where its session sets none
    box: Mode = Mode.AUTO  #: the walls around workers (:mod:`rgpu.server.box.walls`)
    worker_uids: tuple[int, int] | None = None  #: user ids for workers, first and last; None: the daemon's
    worker_memory: int = 0  #: bytes of host memory that a worker may use; 0: nearly all of the host's
    worker_io: int = 0  #: bytes/s that a worker may read from, and write to, the node's disks; 0: no bound
    mps: int = 0  #: per cent of a GPU that one worker may use, all of them clients of an MPS server; 0: no MPS
    cgroup: str = ""  #: a folder of cgroup v2 to divide among workers; "": the daemon's own, where that is permitted
    web: str = ""  #: HOST:PORT of the web page; empty: none
    web_url: str = ""  #: URL for browsers, if not that address: behind a proxy
    metrics: ScrapeOptions = ScrapeOptions()  #: address of the metrics port, its TLS files and token

    @property
    def registry_address(self) -> str:
        """Address of the registry. Raises :class:`NotFound`, :class:`Corrupt`."""
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
