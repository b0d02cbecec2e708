"""Long values in pieces over a page stream; docs/protocols/pages.md describes the messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rgpu.session.errors import Corrupt

PIECE = 1 << 20
LONGEST = 1 << 32  #: most bytes of a value in pieces


def in_pieces(*parts: Any, most: int = PIECE) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the bodies of the messages: a byte that is not 0 for the last, and the piece of ``parts`` joined, of
    ``most`` bytes.
    """
    views = [memoryview(data) for data in parts if len(data)] or [memoryview(b"")]
    for number, data in enumerate(views, 1):
        for at in range(0, max(1, len(data)), most):
            yield bytes([number == len(views) and at + most >= len(data)]), data[at:at + most]


class Pieces:
    """Pieces received of one value; ``what`` names it in errors."""

    def __init__(self, what: str) -> None:
        self._what, self._whole, self._size = what, bytearray(), 0

    def take(self, body: Any) -> bytearray | None:
        """Add a piece; return the whole value after the last one, else None. Raises :class:`Corrupt`."""
        self._size += len(body)
        if not len(body) or self._size > LONGEST:
            raise Corrupt(f"a piece of {len(body)} bytes, {self._size} in all, of {self._what}", reason="length")
        self._whole += body[1:]
        if not body[0]:
            return None
        whole, self._whole, self._size = self._whole, bytearray(), 0
        return whole
