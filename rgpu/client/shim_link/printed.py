"""How much of what kernels printed the program has been given, on the agent's side. Pure.

The count is of bytes since the session's beginning, as the worker's is
(:mod:`rgpu.session.printed`). Agent and shim live and die together: what was
put into the shim's ring or socket counts as given.
"""

from __future__ import annotations

from typing import Any

from rgpu.session.errors import Corrupt

HEAD = 8  #: bytes of a piece's position


class TextLedger:
    """See the module docstring. ``given``: bytes."""

    def __init__(self) -> None:
        self.given = 0
        self._confirmed = 0

    def take(self, body: Any) -> bool:
        """A piece came: u64 position, bytes. True: there is something new in it, which is given now.

        A position beyond what was given would leave a hole. Raises :class:`Corrupt` for that, and for what is
        no piece.
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
        """Bytes given since the worker was told."""
        return self.given - self._confirmed

    def confirm(self) -> int:
        """The count that the worker is told now."""
        self._confirmed = self.given
        return self.given
