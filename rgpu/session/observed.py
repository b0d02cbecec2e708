"""Data of a session for monitors: the OBSERVED blob (docs/developers/links/shim-link.md, "Observing").

Read by the NVML library (``rgpu/client/nvml/agent.cpp``), which makes no session.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError

from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.facts import MAX_DEVICES, SessionFacts

VERSION = 1
LIVE = 1  #: flag: the session exists; without it, the facts are those that a new session would get
MAX_PROCESSES = 1024
MAX_TEXT = 79  #: bytes of a driver's release: NVML's buffers have 80

#: version, flags, length of the facts, length of the release, devices, processes
_HEAD = Struct("<IIIIII")
_USED = Struct("<Q")
#: pid, device, bytes used
_PROCESS = Struct("<IIQ")


@dataclass(frozen=True, slots=True)
class Process:
    """A program that uses a device."""

    pid: int
    device: int  #: index into the facts' devices
    used: int  #: bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """One answer to OBSERVE. ``used``: bytes, for each device of the facts."""

    facts: SessionFacts
    live: bool = False
    release: str = ""  #: release of the node's driver, as 580.65.06; empty where unknown
    used: tuple[int, ...] = ()
    processes: tuple[Process, ...] = ()

    def encode(self) -> bytes:
        """Encode the body of OBSERVED. Raises ValueError for a value that does not fit its field."""
        facts, release = self.facts.encode(), self.release.encode("ascii", "replace")[:MAX_TEXT]
        if len(self.used) != len(self.facts.devices) or len(self.processes) > MAX_PROCESSES:
            raise ValueError(f"{len(self.used)} figures for {len(self.facts.devices)} devices, "
                             f"{len(self.processes)} processes")
        try:
            return b"".join((
                _HEAD.pack(VERSION, LIVE * self.live, len(facts), len(release), len(self.used), len(self.processes)),
                facts, release, *(_USED.pack(used) for used in self.used),
                *(_PROCESS.pack(process.pid, process.device, process.used) for process in self.processes)))
        except StructError as error:
            raise ValueError(f"observation: {error}") from None

    @staticmethod
    def decode(data: bytes) -> Observation:
        """Invert :meth:`encode`. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
        if len(data) < _HEAD.size:
            raise Corrupt("an observation is cut off", offset=0, reason="length")
        version, flags, facts, release, devices, processes = _HEAD.unpack_from(data)
        if version != VERSION:
            raise VersionMismatch(f"an observation of version {version}; this program reads {VERSION}", version=version)
        sizes = _HEAD.size + facts + release + devices * _USED.size + processes * _PROCESS.size
        if flags & ~LIVE or devices > MAX_DEVICES or processes > MAX_PROCESSES or release > MAX_TEXT \
                or sizes != len(data):
            raise Corrupt(f"an observation of {len(data)} bytes does not match its header", offset=0, reason="counts")
        known = SessionFacts.decode(data[_HEAD.size:_HEAD.size + facts])
        at = _HEAD.size + facts + release
        rest = at + devices * _USED.size
        found = tuple(Process(*_PROCESS.unpack_from(data, rest + i * _PROCESS.size)) for i in range(processes))
        if devices != len(known.devices) or any(process.device >= devices for process in found):
            raise Corrupt("an observation names devices that its facts do not have", offset=at, reason="device")
        return Observation(known, bool(flags & LIVE), data[at - release:at].decode("ascii", "replace"),
                           tuple(_USED.unpack_from(data, at + i * _USED.size)[0] for i in range(devices)), found)
