"""The asker's end of a rank link's lanes, and long contributions as they arrive over them.

Lanes (:mod:`rgpu.link.data.lanes`) are opened once the answerer has sent much over a link, and offers them. Messages:
docs/protocols/ranks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from rgpu.link.data import lanes
from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.lanes import Lane
from rgpu.link.messages import ranks as messages
from rgpu.migrate.transfer.pieces import LONGEST
from rgpu.server.collectives.numbers import Array
from rgpu.server.collectives.reductions import copy
from rgpu.session.errors import Corrupt, LinkError

ALIGNED = 64  #: bytes; of the numbers of a contribution in memory
WAIT_SECONDS = 60.0  #: with hardly anything of a message that a lane should bring, after which the link is given up


class AskerLanes:
    """Lanes of one rank link at the asking end; they are only read from, by the link's reader."""

    def __init__(self) -> None:
        """Open none yet."""
        self._key = b""
        self._lanes: list[Lane] = []
        self._closed = False

    def offered(self, body: memoryview) -> int:
        """Return how many lanes to open by an OFFER; 0: none. Raises :class:`Corrupt`."""
        offer = msgspec.msgpack.decode(body, type=messages.Offer)
        if self._key or offer.most < 0:
            raise Corrupt("a rank link was offered lanes twice, or less than none", reason="lane")
        self._key = offer.key
        return min(offer.most, lanes.wanted())

    def opened(self, connections: Sequence[SealedConnection]) -> None:
        """Use these connections, which begin. Raises :class:`LinkError`."""
        try:
            if not self._key or self._lanes:
                raise LinkError("a rank link has lanes that it was not offered, or has them twice")
            for number, connection in enumerate(connections):
                connection.send(messages.LANE, msgspec.msgpack.encode(messages.Lane(self._key, number)))
        except LinkError:
            for connection in connections:
                connection.close()
            raise
        self._lanes = [Lane(connection) for connection in connections]
        if self._closed:
            self.close()

    def message(self, body: memoryview) -> tuple[int, memoryview]:
        """Return the message that LANED stands for. Raises :class:`Corrupt`, :class:`LinkError`, :class:`TimedOut`."""
        number, length = lanes.mark(body, len(self._lanes))
        return self._lanes[number].take(length, WAIT_SECONDS)

    def close(self) -> None:
        """Close all lanes; may be called more than once."""
        self._closed = True
        for lane in self._lanes:
            lane.close()


class Arriving:
    """A value of known length that arrives in pieces, put into memory from ``room`` (bytes; None: it has none).

    ``data``: what begins there is put at a multiple of 64 bytes: numpy copies numbers that are not aligned.
    """

    def __init__(self, size: int, data: int, room: Callable[[int], Array | None]) -> None:
        """Take the memory. Raises :class:`Corrupt`."""
        if not 0 < size <= LONGEST or not 0 <= data <= size:
            raise Corrupt(f"contributions of {size} bytes are announced", reason="length")
        taken = room(size + ALIGNED)
        memory = np.empty(size + ALIGNED, np.uint8) if taken is None else taken
        begin = -(int(memory.__array_interface__["data"][0]) + data) % ALIGNED
        # Of its own memory view: a slice of the array would keep the segment's mapping, not the array that says when
        # the segment may be used again.
        self._view = memory.data[begin:begin + size]
        self._whole: Array = np.frombuffer(self._view, np.uint8)
        self._at = 0

    def take(self, body: memoryview) -> memoryview | None:
        """Add a piece, as :meth:`Pieces.take` does. Raises :class:`Corrupt`."""
        begin, self._at = self._at, self._at + len(body) - 1
        if not len(body) or self._at > self._whole.size or (body[0] and self._at < self._whole.size):
            raise Corrupt(f"{self._at} bytes of contributions, {self._whole.size} were announced", reason="length")
        copy(self._whole[begin:self._at], np.frombuffer(body, np.uint8)[1:])
        return self._view if body[0] else None
