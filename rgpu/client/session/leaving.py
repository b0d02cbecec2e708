"""Segments of the journal on their way back to the shim: given back once nothing reads them any more.

Used by the loop's thread only.
"""

from __future__ import annotations

from collections import deque

from rgpu.client.data_link.agent_lanes import LinkLanes
from rgpu.client.journal.kept import Journal
from rgpu.client.shim_link.local import LocalPeer


class Leaving:
    """The segments that the journal no longer needs, in their order."""

    def __init__(self, journal: Journal, peer: LocalPeer) -> None:
        self._journal, self._peer = journal, peer
        self._segments: deque[tuple[LinkLanes | None, int, int]] = deque()  #: (lanes, messages given to them, index)

    def __bool__(self) -> bool:
        return bool(self._segments)

    def release(self, lanes: LinkLanes | None) -> None:
        """Give the shim back the segments that nothing needs any more; ``lanes``: those of the open link, or None."""
        for index in self._journal.released():
            self._segments.append((lanes, lanes.given if lanes is not None else 0, index))
        while self._segments:
            lanes, given, index = self._segments[0]
            if lanes is not None and not lanes.settled(given):
                break  # a spilled payload that is still being sealed from there must not be overwritten
            self._segments.popleft()
            self._peer.release(index)
