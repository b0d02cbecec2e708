"""Count of the text printed by kernels that the program was given, on the agent's side. Pure.

The count is of bytes since the session's beginning, as the worker's is
(:mod:`rgpu.session.printed`). Agent and shim end together: text that was put
into the shim's ring or socket counts as given.
"""

from __future__ import annotations

from typing import Any

from rgpu.session.errors import Corrupt

HEAD = 8  #: bytes of a piece's position


class TextLedger:
    """Count of one session's printed text. ``given``: bytes."""

    def __init__(self) -> None:
        self.given = 0
        self._confirmed = 0

    def take(self, body: Any) -> bool:
        """Take a piece (u64 position, bytes); return True if it has new bytes, which count as given from now on.

        Raises :class:`Corrupt` for a position beyond the bytes given, which would leave a hole, and for a body
        that is no piece.
        """
        if len(body) < HEAD:
            raise Corrupt(f"a piece of printed text has {len(body)} bytes", reason="printed text")
        position = int.from_bytes(body[:HEAD], "little")
        if position > self.given:
            raise Corrupt(f"printed text from position {position} on, after {self.given} bytes", reason="printed text")
        end = position + len(body) - HEAD
        if end <= self.given:
            return False
        self.given = end
        return True

    @property
    def unconfirmed(self) -> int:
        """Bytes given since the last :meth:`confirm`."""
        return self.given - self._confirmed

    def confirm(self) -> int:
        """Return the count, which the worker is sent now."""
        self._confirmed = self.given
        return self.given
