"""The worker's end of an attachment's lanes (:mod:`rgpu.link.data.lanes`)."""

from __future__ import annotations

import hmac
import secrets
import threading
from typing import Any

import msgspec

from rgpu.link.data import lanes
from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.lanes import Lane
from rgpu.link.messages.data import LANE, LANE_KEY, LANED_BACK, MARK_LAYOUT
from rgpu.server.fast_path import FastPath
from rgpu.session.errors import Corrupt, Fenced, LinkError

HELLO_SECONDS = 5.0  #: limit for the first message of a lane
COME_SECONDS = 10.0  #: limit for the arrival of lanes that the agent reports as opened
GIVE_SECONDS = 60.0  #: limit for a lane to send what it holds, or to deliver a marked message; then the link is closed


class LinkLanes:
    """See the module docstring. ``fast``: places received bytes where the device reads them."""

    def __init__(self, fast: FastPath | None, most: int | None = None) -> None:
        """Open no lane yet. ``most``: lanes that may be opened; by default as this side is configured."""
        self._fast = fast
        self._most = lanes.wanted() if most is None else most
        self._key = secrets.token_bytes(LANE_KEY)
        self._lanes: dict[int, Lane] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._turn = 0
        self.out: list[Lane] = []  #: lanes that carry long answers

    def offer(self) -> dict[str, Any]:
        """Return the fields of ATTACHED about lanes."""
        return {"lanes": {"key": self._key, "most": self._most}} if self._most else {}

    def add(self, connection: SealedConnection) -> None:
        """Add a lane that the agent has opened. Raises :class:`Fenced`, :class:`Corrupt`, :class:`LinkError`."""
        kind, body = connection.recv(HELLO_SECONDS)
        try:
            said = msgspec.msgpack.decode(body)
            key, number = said["key"], said["number"]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise Corrupt("a lane's first message cannot be read", reason="lane") from error
        if kind != LANE or not isinstance(key, bytes) or not isinstance(number, int):
            raise Corrupt("a lane begins with another message", reason="lane")
        self.admit(connection, key, number)

    def knows(self, key: bytes) -> bool:
        """Whether a lane with this key is one of these."""
        return hmac.compare_digest(key, self._key)

    def admit(self, connection: SealedConnection, key: bytes, number: int) -> None:
        """Add a lane whose first message was read. Raises :class:`Fenced`."""
        if not self.knows(key):
            raise Fenced("the lane is of another attachment")
        room, drop = (None, _nothing) if self._fast is None else (self._fast.room, self._fast.give)
        with self._changed:
            if self._closed or number in self._lanes or not 0 <= number < self._most:
                raise Fenced(f"lane {number} is not wanted here")
            self._lanes[number] = Lane(connection, room=room, drop=drop)
            self._changed.notify_all()

    def use(self, body: Any) -> None:
        """Use the lanes that the agent has opened: ``body`` is their number.

        Raises :class:`Corrupt`, :class:`LinkError` if they do not arrive.
        """
        count = int.from_bytes(body, "little")
        if len(body) != 1 or not 0 < count <= self._most:
            raise Corrupt(f"the agent says that it has {count} lanes", reason="lane")
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or set(range(count)) <= self._lanes.keys(),
                                          COME_SECONDS) or self._closed:
                raise LinkError(f"of {count} lanes {len(self._lanes)} came")
            self.out = [self._lanes[number] for number in range(count)]

    def message(self, body: Any, seconds: float | None = None) -> tuple[int, memoryview]:
        """Return the message that a mark stands for. Raises :class:`Corrupt`, :class:`LinkError`, :class:`TimedOut`."""
        number, length = lanes.mark(body, len(self.out))
        return self.out[number].take(length, GIVE_SECONDS if seconds is None else seconds)

    def turn(self) -> tuple[int, Lane]:
        """Return (number, lane) for the next long message; wait until the lane is ready. Raises :class:`LinkError`."""
        number = self._turn = (self._turn + 1) % len(self.out)
        lane = self.out[number]
        lane.wait_ready(GIVE_SECONDS)
        return number, lane

    def close(self) -> None:
        """Close all lanes; may be called more than once."""
        with self._changed:
            self._closed = True
            found, self._lanes = list(self._lanes.values()), {}
            self._changed.notify_all()
        for lane in found:
            lane.close()


def mark_back(number: int, length: int) -> bytes:
    """Return the mark on the link for a message of ``length`` bytes on lane ``number``."""
    return bytes([LANED_BACK]) + MARK_LAYOUT.pack(number, length)


def _nothing(body: memoryview) -> None:
    """Do nothing: a lane's own buffers are freed by the collector."""


