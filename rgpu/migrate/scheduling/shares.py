"""Sizes of the pool's sessions, as shares of its most usual device: the mix that placement assumes.

They can be counted from all records, or updated one session at a time; both give the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rgpu.migrate.records.schema import NodeRecord, SessionRecord
from rgpu.migrate.scheduling.mix import Mix, share_mix
from rgpu.migrate.scheduling.placement import Snapshot
from rgpu.migrate.scheduling.snapshot import WHOLE, Device, Node

MIB = 1 << 20


class Shares:
    """Counts of sizes. ``counts[p]``: parts of p per cent of a device that live sessions hold, by compute or memory,
    whichever is larger."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(WHOLE + 1, np.int64)
        self.usual = 1  #: bytes of the most usual device
        self._sizes: Counter[int] = Counter()

    def devices(self, node: NodeRecord, sign: int) -> None:
        """Count a host's devices, or (``sign`` -1) remove them; call :meth:`settled` after the last host."""
        for device in node.devices:
            self._sizes[device.memory] += sign
            if not self._sizes[device.memory]:
                del self._sizes[device.memory]

    def settled(self) -> bool:
        """Whether the most usual size has changed, so that :meth:`recount` is due."""
        usual = max(max(self._sizes, key=lambda size: (self._sizes[size], size), default=1), 1)
        changed, self.usual = usual != self.usual, usual
        return changed

    def recount(self, sessions: Iterable[SessionRecord]) -> None:
        """Count all sessions anew."""
        self.counts[:] = 0
        for session in sessions:
            self.add(session, 1)

    def add(self, session: SessionRecord, sign: int) -> bool:
        """Count a session, or (``sign`` -1) remove it; return whether it counts at all."""
        if not session.live or session.quota <= 0 or session.run not in ("", session.name):
            return False  # the first session of a run counts for all of its sessions
        held = max(session.wants.compute, -(-session.quota * WHOLE // self.usual))
        self.counts[max(1, min(WHOLE, held))] += sign * session.wants.gpus
        return True


def mix_of(snapshot: Snapshot) -> Mix:
    """Return the mix of a snapshot's sessions."""
    shares = Shares()
    for node in snapshot.nodes:
        shares.devices(node, 1)
    shares.settled()
    shares.recount(snapshot.sessions)
    return share_mix(shares.counts)


def node_of(node: NodeRecord) -> Node:
    """Return a host in the form of the placement's index; the filter decides which of its devices may be used."""
    return Node(node.host, tuple(Device(d.device, d.memory // MIB, d.healthy) for d in node.devices))


def reason_of(node: NodeRecord, device: str, fitting: int, free: int) -> str:
    """Return the reason sentence of a placement by fragmentation."""
    return f"{device} of {node.host}: fragments the pool least of {fitting} that fit ({free >> 20} MiB free)"
