"""What the pool's sessions hold, as shares of its most usual device: the mix that placement counts on.

Counted from records, and kept up to date one session at a time; both give the same numbers.
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
    """``counts[p]``: pieces of p per cent of a device that live sessions hold, by compute or memory: the larger."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(WHOLE + 1, np.int64)
        self.usual = 1  #: bytes of the most usual device
        self._sizes: Counter[int] = Counter()

    def devices(self, node: NodeRecord, sign: int) -> None:
        """A host came, or (``sign`` -1) went; :meth:`settled` when all have."""
        for device in node.devices:
            self._sizes[device.memory] += sign
            if not self._sizes[device.memory]:
                del self._sizes[device.memory]

    def settled(self) -> bool:
        """Whether the most usual size is another now, so that :meth:`recount` is due."""
        usual = max(max(self._sizes, key=lambda size: (self._sizes[size], size), default=1), 1)
        changed, self.usual = usual != self.usual, usual
        return changed

    def recount(self, sessions: Iterable[SessionRecord]) -> None:
        """All of them anew."""
        self.counts[:] = 0
        for session in sessions:
            self.add(session, 1)

    def add(self, session: SessionRecord, sign: int) -> bool:
        """Count a session, or (``sign`` -1) no longer; whether it counts at all."""
        if not session.live or session.quota <= 0 or session.run not in ("", session.name):
            return False  # the first session of a run stands for what its others share
        held = max(session.wants.compute, -(-session.quota * WHOLE // self.usual))
        self.counts[max(1, min(WHOLE, held))] += sign * session.wants.gpus
        return True


def mix_of(snapshot: Snapshot) -> Mix:
    """The mix of a snapshot's sessions."""
    shares = Shares()
    for node in snapshot.nodes:
        shares.devices(node, 1)
    shares.settled()
    shares.recount(snapshot.sessions)
    return share_mix(shares.counts)


def node_of(node: NodeRecord) -> Node:
    """A host as the index of placement has it: which of its devices may be used is decided by the filter."""
    return Node(node.host, tuple(Device(d.device, d.memory // MIB, d.healthy) for d in node.devices))


def reason_of(node: NodeRecord, device: str, fitting: int, free: int) -> str:
    """The sentence that a placement by fragmentation is recorded with."""
    return f"{device} of {node.host}: fragments the pool least of {fitting} that fit ({free >> 20} MiB free)"
