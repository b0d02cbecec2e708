"""The agent's end of an attachment's lanes (:mod:`rgpu.link.data.lanes`): opened once long messages are sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from rgpu.client.run.pool_requests import Grant
from rgpu.client.session.attachment import Owner
from rgpu.link.data import lanes
from rgpu.link.data.frames import TRICKLE, SealedConnection, client_preamble, connect
from rgpu.link.data.lanes import Lane
from rgpu.link.loggers import get_logger
from rgpu.link.messages.data import LANE, MARK_LAYOUT
from rgpu.session.errors import LinkError, RgpuError

log = get_logger(__name__)

OPEN_SECONDS = 4.0  #: for opening one lane
WAIT_SECONDS = 10.0  #: with no more than a trickle of a marked message, after which its link is given up


class LinkLanes:
    """Lanes of one attachment. All methods but :meth:`open` run in the agent's loop."""

    def __init__(self, offer: Any, most: int | None = None) -> None:
        """``offer``: the field of ATTACHED; ``most``: limit of lanes on this side."""
        values = offer if isinstance(offer, dict) else {}
        key, theirs = values.get("key"), values.get("most")
        ours = lanes.wanted() if most is None else most
        self._key = key if isinstance(key, bytes) else b""
        #: how many are worth opening; 0: none
        self.wanted = max(0, min(ours, theirs)) if self._key and isinstance(theirs, int) else 0
        self.lanes: list[Lane] = []
        self.fresh: list[Lane] = []  #: opened, and not announced to the worker yet
        self._closed = False
        self._turn = 0
        self.given = 0  #: messages given to lanes
        self._under: set[int] = set()  #: numbers of messages whose memory may still be read
        #: of the message that is next: (lane, length, time limit for more bytes, bytes that the lane received before)
        self._awaited: tuple[int, int, float, int] | None = None

    # -- opening ----------------------------------------------------------------------
    def claim(self) -> int:
        """Return how many lanes to open now; 0 after the first time."""
        count, self.wanted = self.wanted, 0
        return count

    def open(self, count: int, owner: Owner, epoch: int, grant: Grant, session: str) -> list[SealedConnection]:
        """Connect ``count`` lanes, on a helper thread; return none where one fails."""
        found: list[SealedConnection] = []
        try:
            for number in range(count):
                sock = connect(owner.address, OPEN_SECONDS)
                try:
                    connection = client_preamble(sock, "lane", *grant.at(owner, session), session,
                                                 timeout=OPEN_SECONDS)
                except BaseException:
                    sock.close()
                    raise
                found.append(connection)
                if connection.epoch != epoch:
                    raise LinkError(f"{owner.host} holds epoch {connection.epoch} of {session}, not {epoch}")
                connection.send(LANE, msgspec.msgpack.encode({"key": self._key, "number": number}))
            return found
        except RgpuError as error:
            log.info("no lanes beside the link", session=session, host=owner.host, reason=error.message)
            for connection in found:
                connection.close()
            return []

    def opened(self, connections: list[SealedConnection], came: Callable[[], None]) -> None:
        """Take the connections. ``came``: called from other threads when data was received or sent."""
        if connections:
            log.info("long messages go over lanes", session=connections[0].session, lanes=len(connections))
        self.fresh = [Lane(connection, came=came, sent=came) for connection in connections]
        if self._closed:
            self.close()

    def use(self) -> int:
        """Use the opened lanes from now on; return how many they are."""
        self.lanes, self.fresh = self.fresh, []
        return len(self.lanes)

    # -- sending ----------------------------------------------------------------------
    @property
    def ready(self) -> bool:
        """Whether the next long message may be sent."""
        return not self.lanes or self.lanes[self._turn].ready

    def send(self, kind: int, parts: tuple[Any, ...], length: int) -> bytes:
        """Send over the lane whose turn it is; return the mark for the link. The parts are read until it is settled."""
        number, under = self._turn, self._under
        self._turn = (number + 1) % len(self.lanes)
        self.given = given = self.given + 1
        under.add(given)
        try:
            self.lanes[number].send(kind, *parts, done=lambda: under.discard(given))
        except LinkError:
            under.discard(given)
            raise
        return MARK_LAYOUT.pack(number, length)

    def settled(self, given: int) -> bool:
        """Whether none of the first so many messages is read any more: their memory may be used again."""
        return min(self._under.copy(), default=given + 1) > given

    # -- receiving --------------------------------------------------------------------
    def marked(self, body: Any) -> None:
        """Note that the link's next message is received on a lane. Raises :class:`Corrupt`."""
        number, length = lanes.mark(body, len(self.lanes))
        self._await(number, length)

    def _await(self, number: int, length: int) -> None:
        self._awaited = (number, length, time.monotonic() + WAIT_SECONDS, self.lanes[number].came)

    @property
    def awaited(self) -> int:
        """Length of the lane's message that is next (type and body); 0: the next one is on the link itself."""
        return self._awaited[1] if self._awaited is not None else 0

    def next(self) -> tuple[int, memoryview] | None:
        """Return that message; None: it was not received yet. Raises :class:`LinkError`, :class:`Corrupt`."""
        assert self._awaited is not None
        number, length, until, came = self._awaited
        message = self.lanes[number].next(length)
        if message is not None:
            self._awaited = None
        elif time.monotonic() > until:
            if self.lanes[number].came - came < TRICKLE:
                raise LinkError(f"a message that lane {number} should bring does not come")
            self._await(number, length)
        return message

    def close(self) -> None:
        """Close the lanes, also those that are opened later. May be called more than once."""
        self._closed, self._awaited = True, None
        for lane in (*self.lanes, *self.fresh):
            lane.close()
        self.lanes, self.fresh = [], []
