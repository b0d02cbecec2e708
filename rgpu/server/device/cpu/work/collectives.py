"""Groups of collectives as work of the cpu device's streams.

A group is one op in all its streams: it begins when each of them has reached it, and occupies one device thread until
its operations are complete, as NCCL's kernels occupy multiprocessors of a GPU. The time does not count as the session's
use of the device, since the group waits for other ranks.
"""

from __future__ import annotations

from rgpu.server.collectives.communicators import Group
from rgpu.server.collectives.matching import Memory
from rgpu.server.collectives.numbers import Array
from rgpu.server.collectives.shared import RankLost
from rgpu.server.device.cpu.schedule import Op
from rgpu.server.device.cpu.streams import Fault, Streams
from rgpu.server.device.cpu.work.copies import Copies


class CollectiveMemory:
    """Memory of the cpu device, as :class:`rgpu.server.collectives.matching.Memory`."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def source(self, address: int, size: int) -> Array:
        """See :meth:`rgpu.server.collectives.matching.Memory.source`."""
        return self._copies.rows(address, size, size, 1, "buffer").reshape(-1)

    def target(self, address: int, size: int) -> Array:
        """See :meth:`rgpu.server.collectives.matching.Memory.target`."""
        return self._copies.rows(address, size, size, 1, "buffer").reshape(-1)


def submit(group: Group, seq: int, memory: Memory, streams: Streams) -> None:
    """Submit a group to its streams, as call ``seq``."""

    def run() -> None:
        try:
            with streams.resting():
                group.run(seq, streams.cancel.is_set)
        except RankLost as lost:
            raise Fault(lost.result, lost.detail) from None

    streams.submit_joint(Op(seq, run, what=str(group)), group.streams,
                         lambda: group.post([memory] * len(group.extents())))
