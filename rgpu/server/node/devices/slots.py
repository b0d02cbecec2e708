"""The devices of a node, and the memory of them that is promised to sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rgpu.checkpoint.device import DeviceFacts
from rgpu.migrate.scheduling.placement import mebibytes, run_of
from rgpu.server.node.devices.health import Health
from rgpu.session.devices import parts
from rgpu.session.errors import Refused


@dataclass
class DeviceSlot:
    """A device of this node."""

    spec: str  #: cpu:0, cuda:1
    facts: DeviceFacts
    memory: int  #: bytes that sessions may use in all
    health: Health = Health()
    described: dict[str, Any] = field(default_factory=dict)  #: the facts as in the node's record, once it was made

    @property
    def healthy(self) -> bool:
        return self.health.healthy


class Occupant(Protocol):
    """A worker that holds a part of one or several devices. ``session``: its session; those of one run share a part."""

    session: str
    device: str  #: several joined by ``+``
    quota: int  #: bytes of each


class DeviceSlots:
    """``occupants``: all that hold a part now. ``kept``: bytes of a device that warm workers take."""

    def __init__(self, host: str, slots: dict[str, DeviceSlot], occupants: Callable[[], Sequence[Occupant]],
                 kept: Callable[[str], int] = lambda spec: 0) -> None:
        self.slots = slots
        self._host, self._occupants, self.kept = host, occupants, kept

    def free(self, spec: str, session: str = "") -> int:
        """Bytes of the device that are promised to no session here, not counting the run of ``session``."""
        each: dict[str, int] = {}
        for one in self._occupants():
            if spec in parts(one.device):
                each[one.session] = each.get(one.session, 0) + one.quota
        runs: dict[str, int] = {}
        for name, quota in each.items():
            if not session or name == session or run_of(name) != run_of(session):  # its own previous worker counts
                runs[run_of(name)] = max(runs.get(run_of(name), 0), quota)
        used = sum(runs.values())
        return self.slots[spec].memory - used - self.kept(spec)

    def choose(self, device: str | None, quota: int, session: str = "") -> str:
        """A healthy device with enough memory, or all that ``device`` names. Raises :class:`Refused` with a reason."""
        for spec in parts(device) if device else ():
            if spec not in self.slots:
                raise Refused(f"{self._host} has no device {spec}; it has {', '.join(self.slots)}")
        reasons = []
        for name in [device] if device else list(self.slots):
            against = [why for spec in parts(name) if (why := self._refuses(spec, quota, session))]
            if not against:
                return name
            reasons += against
        raise Refused(f"{self._host} is full: {'; '.join(reasons)}", host=self._host)

    def _refuses(self, spec: str, quota: int, session: str) -> str:
        if not self.slots[spec].healthy:
            return f"{spec} is unhealthy: {self.slots[spec].health.reason}"
        if (free := self.free(spec, session)) < quota:
            return f"{spec} has {mebibytes(free)} free of the {mebibytes(quota)} asked for"
        return ""
