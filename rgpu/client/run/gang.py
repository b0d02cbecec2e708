"""The ranks of a gang that a run was given: one list of devices for all of its processes, and the sessions behind it.

All of the run's members are made before the program starts. A process sees the whole list; the device of its first
context determines the member that it uses: the session that waits there, or, where another process has taken that, a
further one which shares its devices (NAME.RANK/2 and so on). When the first process has come, the others have to follow
within the gang's deadline; not with ``--spread``, where there are no ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rgpu.client.run.placing import ASK_TIMEOUT, PlacedSession
from rgpu.client.run.pool_requests import PoolRequests
from rgpu.client.run.run_memory import RunMemory
from rgpu.link.loggers import get_logger
from rgpu.session.errors import Corrupt, RgpuError
from rgpu.session.facts import MAX_DEVICES, MEMBER, MEMBER_DEVICE, DeviceInfo, SessionFacts

log = get_logger(__name__)


@dataclass
class GangMember:
    """One member. ``number``: among the run's. ``first``, ``ranks``: its first rank, and how many it has."""

    number: int
    session: str
    first: int
    ranks: int
    facts: SessionFacts
    host: str
    placed: PlacedSession
    memory: RunMemory
    came: bool = False
    further: int = field(default=1)  #: sessions of its processes so far

    @property
    def label(self) -> str:
        """Text for users: which ranks, and where."""
        what = f"rank {self.first}" if self.ranks == 1 else f"ranks {self.first} to {self.first + self.ranks - 1}"
        return f"{what} ({self.session} on {self.host})"


class GangRun:
    """The members of one run. ``reply``: the pool's, to the request of all; ``read``: returns a member's facts.

    Raises :class:`Corrupt` for a reply that cannot be read.
    """

    def __init__(self, requests: PoolRequests, args: dict[str, Any], reply: dict[str, Any],
                 read: Callable[[dict[str, Any]], SessionFacts], folder: Path) -> None:
        self.name = str(reply.get("gang"))
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._over = False  #: the program has ended
        self._requests = requests
        self.members: list[GangMember] = []
        given = reply.get("members")
        if not isinstance(given, list) or not given:
            raise Corrupt("the pool's answer about a gang cannot be read", reason="reply")
        for number, one in enumerate(given):
            facts = read(one)
            self.members.append(GangMember(
                number, str(one["session"]), int(one.get("rank") or 0), 1, facts, str(one.get("owner") or ""),
                PlacedSession(requests, args, one), RunMemory(folder, f"memory.{number}")))
        asked = args["options"]["gang"]
        self.spread = bool(asked.get("spread"))
        self._others = int(asked.get("of") or 0) > int(asked.get("ranks") or 0)  #: ranks of other runs
        if self.spread:
            for member in self.members:
                member.ranks = len(member.facts.devices)
        #: s; 0 for a list of devices, of which a program may use any
        self.deadline = 0.0 if self.spread else float(asked.get("deadline") or 0.0)
        self.facts = list_of(self.name, [member.facts for member in self.members])

    def line(self) -> str:
        """Return a line for the user: where the gang is."""
        hosts: dict[str, int] = {}
        for member in self.members:
            hosts[member.host] = hosts.get(member.host, 0) + member.ranks
        ranks = sum(hosts.values())
        where = ", ".join(f"{host} ({count})" if len(hosts) > 1 else host for host, count in hosts.items())
        what = "device" if self.spread else "rank"
        return f"rgpu: gang {self.name}: {ranks} {what}{'s' if ranks > 1 else ''} on {where}"

    def member_of(self, device: int) -> GangMember:
        """Return the member that has a device of the list. Raises :class:`Corrupt` for a device that is not in it."""
        if not 0 <= device < len(self.facts.devices):
            raise Corrupt(f"a process chose device {device} of a list of {len(self.facts.devices)}", reason="protocol")
        return self.members[self.facts.devices[device].attributes[MEMBER]]

    def first_of(self, device: int) -> int:
        """Return the first device of the list that the member of a device has."""
        return device - self.facts.devices[device].attributes[MEMBER_DEVICE]

    def take(self, member: GangMember, missing: Callable[[str], None]) -> PlacedSession | None:
        """Return the member's session for the first process that uses it, None for further ones.

        ``missing``: called with the reason to end the run, if other ranks do not come within the deadline.
        """
        with self._lock:
            if member.came:
                return None
            member.came = True
            if self._timer is None and self.deadline and (len(self.members) > 1 or self._others):
                self._timer = threading.Timer(self.deadline, self._look, (missing,))
                self._timer.daemon = True
                self._timer.start()
            if self._timer is not None and not self._others and all(one.came for one in self.members):
                self._timer.cancel()
            return member.placed

    def further_name(self, member: GangMember) -> str:
        """Return the name of a further session of a member's."""
        with self._lock:
            member.further += 1
            return f"{member.session}/{member.further}"

    def _look(self, missing: Callable[[str], None]) -> None:
        with self._lock:
            absent = [member.label for member in self.members if not member.came]
        said = len(self.members)
        if not absent and self._others:
            said, absent = self._elsewhere()
        if absent and not self._over:
            missing(late(absent, said, self.deadline))

    def _elsewhere(self) -> tuple[int, list[str]]:
        """Return (number of ranks in all, those of other runs whose workers report that no process came)."""
        try:
            row = self._requests.call("gang.describe", {"session": self.name}, ASK_TIMEOUT)
        except RgpuError as error:
            log.warning("whether the gang's other ranks came is not known", gang=self.name, reason=error.message)
            return 0, []
        return int(row["ranks"]), [f"rank {one['rank']} ({one['session']} on {one['host']})" for one in row["members"]
                                   if one["came"] is False]

    def give_up(self, exit_code: int | None, why: str) -> None:
        """End the members that no process used."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._over = True
            left = [member for member in self.members if not member.came]
            for member in left:
                member.came = True
        for member in left:
            member.placed.give_up(exit_code, why)

    def ended(self, number: int) -> None:
        """Note that session ``number`` ended: its memory is available to its member's other sessions again."""
        for member in self.members:
            member.memory.ended(number)


def late(absent: Sequence[str], members: int, deadline: float) -> str:
    """Return the message about ranks that no process came for."""
    return (f"{len(absent)} of {members} ranks did not come within {deadline:.0f} s of the first: no process has used "
            f"{', '.join(absent)}; the run is ended")


def list_of(name: str, members: Sequence[SessionFacts]) -> SessionFacts:
    """Return the facts of one list of all devices of the members, in their order.

    Each device names its member; PCI addresses differ by their domain, and no UUID occurs twice. The driver is the
    oldest of them. Raises :class:`Corrupt` for more devices than a list can have.
    """
    devices: list[DeviceInfo] = []
    seen: set[bytes] = set()
    for number, facts in enumerate(members):
        for at, device in enumerate(facts.devices):
            uuid = device.uuid
            while uuid in seen:  # two ranks share a device, or hosts number theirs alike
                uuid = ((int.from_bytes(uuid, "big") + 1) % (1 << 128)).to_bytes(16, "big")
            seen.add(uuid)
            _, bus, place = device.pci
            devices.append(replace(device, uuid=uuid, pci=(number, bus, place),
                                   attributes={**device.attributes, MEMBER: number, MEMBER_DEVICE: at}))
    if len(devices) > MAX_DEVICES:
        raise Corrupt(f"a list of {len(devices)} devices; {MAX_DEVICES} at most", reason="reply")
    first = members[0]
    return SessionFacts(name, 0, min(facts.driver_version for facts in members), first.quota, first.journal_limit,
                        first.recover, tuple(devices))
