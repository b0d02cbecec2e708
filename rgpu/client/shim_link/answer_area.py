"""The worker's memory for long answers to the program: offered to the shim, mapped by it, then used.

The worker copies an answer from the device into its area and names the place;
the program's thread copies it out. It may use a piece of the area again when
the record ``completed`` of that call was applied, which the shim publishes
only after it has copied: so no message is needed for it.

The order of two areas has to be kept. Messages that name an area go through the
answer ring, its descriptor over the Unix socket. So the worker is told to use
its area only when the shim has mapped it, and another worker's area is given to
the shim only when every message that names the previous one was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rgpu.client.data_link.host_link import Area
from rgpu.client.shim_link import local
from rgpu.client.shim_link.answer_ring import AnswerRing
from rgpu.link.loggers import get_logger
from rgpu.link.messages.data import AREA_LAYOUT, AREA_READY
from rgpu.link.messages.shim import AREA, AREA_OFFER_LAYOUT
from rgpu.session.errors import Corrupt

if TYPE_CHECKING:
    from rgpu.client.data_link.connection import DataLink

log = get_logger(__name__)


class AnswerAreas:
    """Answer areas of one session; used by the shipper's loop."""

    def __init__(self, peer: local.LocalPeer, ring: AnswerRing | None, wanted: bool) -> None:
        """``wanted``: the shim can read answers from an area."""
        self._peer, self._ring = peer, ring if wanted else None
        self._current: Area | None = None  #: the shim has it, or is being given it
        self._mapped = False  #: the shim reported it
        self._next: Area | None = None  #: the attached worker's, if it is another
        self._say = False  #: AREA_READY is to be sent
        self._in_use = False  #: AREA_READY was sent on this connection
        self._named_up_to = 0  #: position in the ring behind the last message that names the current area
        self.bytes = 0  #: of answers that were named

    @property
    def pending(self) -> bool:
        """Whether :meth:`step` may have something to do."""
        return self._say or self._next is not None

    def attached(self, area: Area | None) -> None:
        """Note another connection, whose worker has this area; None: it has none."""
        if self._next is not None:
            self._next.close()
        self._next, self._say, self._in_use = None, False, False
        if area is None:
            return
        if self._ring is None:
            area.close()
        elif self._current is not None and self._current.number == area.number:
            area.close()
            self._say = self._mapped
        else:
            self._next = area

    def mapped(self, number: int) -> None:
        """Note that the shim has mapped an area. Raises :class:`Corrupt` for one that it was not given."""
        if self._current is None or number != self._current.number or self._mapped:
            raise Corrupt(f"the shim says it has mapped area {number}, which it was not given", reason="area")
        self._mapped = True
        self._say = self._next is None

    def step(self, link: DataLink) -> None:
        """Offer the next area and send AREA_READY, when due. Raises :class:`LinkError`, :class:`Corrupt`."""
        if self._next is not None and self._ring is not None and self._ring.was_read(self._named_up_to) \
                and (self._mapped or self._current is None):
            if self._current is not None:
                self._current.close()
            self._current, self._next, self._mapped = self._next, None, False
            offer = AREA_OFFER_LAYOUT.pack(self._current.number, 0, self._current.size)
            self._peer.send(AREA, offer, fd=self._current.fd)
        if self._say and link.ready and self._current is not None:
            link.send(AREA_READY, AREA_LAYOUT.pack(self._current.number))
            self._say, self._in_use = False, True
            log.info("long answers come through shared memory", bytes=self._current.size)

    @property
    def in_use(self) -> tuple[int, int]:
        """Number and bytes of the area that the attached worker uses; 0 and 0: it uses none."""
        return (self._current.number, self._current.size) if self._in_use and self._current is not None else (0, 0)

    def view(self, number: int, offset: int, length: int) -> memoryview:
        """Return the bytes that the worker names. Raises :class:`Corrupt`."""
        area = self._current
        if area is None or not self._in_use or number != area.number or offset > area.size \
                or length > area.size - offset:
            raise Corrupt(f"an answer of {length} bytes at {offset} of area {number}, which is not there",
                          reason="area")
        return area.view[offset:offset + length]

    def named(self, length: int, position: int) -> None:
        """Note a message that names ``length`` bytes of the area and ends at ``position`` of the ring."""
        self.bytes += length
        self._named_up_to = position

    def close(self) -> None:
        """Unmap both areas."""
        for area in (self._current, self._next):
            if area is not None:
                area.close()
        self._current = self._next = None
