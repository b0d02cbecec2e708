"""PING, PONG and ISSUED of the data link: how much the program has published, when, and how far it is ahead.

PING and PONG begin with a u64 position, which is all that protocol 1 has (docs/protocols/data.md). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rgpu.link.messages.data import ISSUED_LAYOUT, PING_LAYOUT, PONG_LAYOUT, POSITION_LAYOUT
from rgpu.session.errors import Corrupt


@dataclass(frozen=True, slots=True)
class Ping:
    """The body of PING. ``published`` None: the other side speaks protocol 1."""

    shipped: int
    published: int | None = None
    usual: int = 0
    sent: int = 0  #: ns, of the agent's clock
    stood: bool = False

    def pack(self) -> bytes:
        """Encode the body of PING."""
        return PING_LAYOUT.pack(self.shipped, self.published or 0, self.usual, self.sent, self.stood)

    @classmethod
    def unpack(cls, body: Any) -> Ping:
        """Decode the body of PING. Raises :class:`Corrupt`."""
        if len(body) == POSITION_LAYOUT.size:
            return cls(*POSITION_LAYOUT.unpack(body))
        if len(body) < PING_LAYOUT.size:
            raise Corrupt(f"a PING of {len(body)} bytes", reason="length")
        shipped, published, usual, sent, stood = PING_LAYOUT.unpack_from(body)
        return cls(shipped, published, usual, sent, bool(stood))


@dataclass(frozen=True, slots=True)
class Issued:
    """The body of ISSUED. ``sent``, ``since``: ns of the agent's clock. ``since`` is no later than ``sent``."""

    sent: int
    since: int
    published: int

    def pack(self) -> bytes:
        """Encode the body of ISSUED."""
        return ISSUED_LAYOUT.pack(self.sent, self.since, self.published)

    @classmethod
    def unpack(cls, body: Any) -> Issued:
        """Decode the body of ISSUED. Raises :class:`Corrupt`."""
        if len(body) != ISSUED_LAYOUT.size:
            raise Corrupt(f"an ISSUED of {len(body)} bytes", reason="length")
        found = cls(*ISSUED_LAYOUT.unpack(body))
        if found.since > found.sent:
            raise Corrupt("an ISSUED of calls that are still to be published", reason="time")
        return found


class Clocks:
    """Delays of messages, relative to the quickest of the last :data:`WINDOW` seconds.

    The clocks of two hosts give only differences of delays, and drift: some 20 µs a second, so the window is short
    (RFC 6817 does the same for one-way delays).
    """

    WINDOW = 10.0

    def __init__(self) -> None:
        self._least: int | None = None  #: ns that the other clock is behind this one, at the quickest
        self._recent: int | None = None  #: the same of the window's second half
        self._turn = 0

    @property
    def known(self) -> tuple[int, int] | None:
        """The ns that the other clock is behind this one at the quickest, and until when (ns here) that holds."""
        return None if self._least is None else (self._least, self._turn)

    def late(self, here: int, there: int) -> int:
        """Return the delay in ns. ``here``: this clock when a message arrived; ``there``: the other at its sending."""
        behind = here - there
        if here >= self._turn:
            self._turn = here + int(self.WINDOW / 2 * 1e9)
            self._least, self._recent = self._recent, None
        self._recent = behind if self._recent is None else min(self._recent, behind)
        self._least = self._recent if self._least is None else min(self._least, self._recent)
        return behind - self._least


def pong(position: int, usual: int) -> bytes:
    """Encode the body of PONG: position applied, and how far behind is usual."""
    return PONG_LAYOUT.pack(position, usual)


def read_pong(body: Any) -> tuple[int, int | None]:
    """Return (position, usual distance or None). Raises :class:`Corrupt`."""
    if len(body) < POSITION_LAYOUT.size:
        raise Corrupt(f"a PONG of {len(body)} bytes", reason="length")
    if len(body) != PONG_LAYOUT.size:  # protocol 1 returns the PING unchanged
        return int(POSITION_LAYOUT.unpack_from(body)[0]), None
    position, usual = PONG_LAYOUT.unpack_from(body)
    return int(position), int(usual)
