"""The scheduler's form of the pool at one revision: immutable, whole numbers only.

Units: memory in MiB, compute in per cent of one device, host CPU in thousandths of a core,
times in seconds of the caller's clock (one clock for all).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rgpu.session.errors import UsageError

WHOLE = 100  #: per cent of one device
MAX_GPUS = 64
MAX_MEMORY_MIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one session: ``gpus`` devices of one host, with the same amounts of each.

    Raises :class:`UsageError` for values out of range.
    """

    gpus: int = 1  #: devices; 0: host resources only
    compute: int = WHOLE  #: per cent of each device
    memory_mib: int = 0  #: of each device
    models: frozenset[str] = frozenset()  #: acceptable GPU models; empty: any
    cpu_milli: int = 0
    host_memory_mib: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.gpus <= MAX_GPUS:
            raise UsageError(f"gpus must be 0 to {MAX_GPUS}, not {self.gpus}")
        if not 0 <= self.compute <= WHOLE:
            raise UsageError(f"compute must be 0 to {WHOLE} per cent of a device, not {self.compute}")
        for name in ("memory_mib", "cpu_milli", "host_memory_mib"):
            if not 0 <= getattr(self, name) <= MAX_MEMORY_MIB:
                raise UsageError(f"{name} must be 0 to {MAX_MEMORY_MIB}, not {getattr(self, name)}")

    @property
    def gpu_share(self) -> float:
        """Compute, in devices."""
        return self.gpus * self.compute / WHOLE

    def __str__(self) -> str:
        of = f" ({'|'.join(sorted(self.models))})" if self.models else ""
        if self.gpus == 0:
            return f"no GPU, {self.cpu_milli / 1000:g} cores, {self.host_memory_mib} MiB of the host"
        if self.compute == 0:
            return f"{self.memory_mib} MiB of {'one GPU' if self.gpus == 1 else f'each of {self.gpus} GPUs'}{of}"
        memory = f", {self.memory_mib} MiB each" if self.memory_mib else ""
        return f"{self.gpus} x {self.compute} % of a GPU{of}{memory}"


def demand(gpus: str, memory_mib: int = 0, compute: int | None = None, models: str = "") -> Demand:
    """Return the demand of the options ``--gpus N|0.25 --memory MiB --compute PERCENT --gpu-model A|B``.

    A fraction is that share of one device, rounded up to 1 %; ``--compute`` overrides it.
    Raises :class:`UsageError` for invalid values.
    """
    try:
        wanted = float(gpus)
    except ValueError:
        raise UsageError(f"--gpus takes a whole number or a fraction of one GPU, not {gpus!r}") from None
    if not 0 < wanted <= MAX_GPUS:
        raise UsageError(f"--gpus takes more than 0 and at most {MAX_GPUS}, not {gpus}")
    named = frozenset(part.strip() for part in models.split("|") if part.strip())
    if wanted < 1:
        share = -int(-round(wanted * WHOLE, 6) // 1)
        return Demand(1, share if compute is None else compute, memory_mib, named)
    if wanted != int(wanted):
        raise UsageError(f"--gpus {gpus}: more than one GPU comes in whole ones")
    return Demand(int(wanted), WHOLE if compute is None else compute, memory_mib, named)


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a session for a place. ``anti_affinity``: its group; "" for none."""

    name: str
    demand: Demand
    priority: int = 0
    arrived: float = 0.0
    queue: bool = True  #: wait when it does not fit now
    anti_affinity: str = ""  #: no two sessions of one group share a host


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a snapshot; memory in MiB."""

    name: str
    memory_mib: int
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a snapshot; CPU in thousandths, memory in MiB."""

    host: str
    devices: tuple[Device, ...]
    model: str = ""
    cpu_milli: int = 0
    host_memory_mib: int = 0
    ready: bool = True  #: takes sessions: neither cordoned, draining nor lost


@dataclass(frozen=True, slots=True)
class Placed:
    """Session with its place, or (``reserved``) a place promised to a session."""

    name: str
    demand: Demand
    host: str
    devices: tuple[int, ...]
    priority: int = 0
    started: float = 0.0
    moved: float = float("-inf")  #: time of its last move
    pinned: str = ""  #: why it cannot be moved; "" when it can be
    anti_affinity: str = ""
    reserved: bool = False
    used_mib: int | None = None  #: memory that a move would copy; None: its promised memory
    share: float | None = None  #: devices that it holds, where its compute does not determine that

    @property
    def weight(self) -> float:
        """Devices that it holds."""
        return self.demand.gpu_share if self.share is None else self.share


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at ``revision``; ages and cool-downs are relative to ``now``."""

    nodes: tuple[Node, ...]
    placed: tuple[Placed, ...] = ()
    queue: tuple[Request, ...] = ()
    now: float = 0.0
    revision: int = 0
    recent: tuple[Demand, ...] = field(default=())  #: recent requests: the mix for fragmentation
