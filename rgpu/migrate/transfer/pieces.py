"""How what is long goes over a page stream in pieces; docs/protocols/pages.md has the messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rgpu.session.errors import Corrupt

PIECE = 1 << 20
LONGEST = 1 << 32  #: bytes of what comes in pieces


def in_pieces(*parts: Any) -> Iterator[tuple[bytes, memoryview]]:
    """The bodies of the messages: a byte that is not 0 for the last, and the piece. ``parts``: one behind the other."""
    views = [memoryview(data) for data in parts if len(data)] or [memoryview(b"")]
    for number, data in enumerate(views, 1):
        for at in range(0, max(1, len(data)), PIECE):
            yield bytes([number == len(views) and at + PIECE >= len(data)]), data[at:at + PIECE]


class Pieces:
    """What came of it. ``what``: for errors."""

    def __init__(self, what: str) -> None:
        self._what, self._whole, self._size = what, bytearray(), 0

    def take(self, body: Any) -> bytearray | None:
        """All of it, once the last piece is here, the caller's to keep. Raises :class:`Corrupt`."""
        self._size += len(body)
        if not len(body) or self._size > LONGEST:
            raise Corrupt(f"a piece of {len(body)} bytes, {self._size} in all, of {self._what}", reason="length")
        self._whole += body[1:]
        if not body[0]:
            return None
        whole, self._whole, self._size = self._whole, bytearray(), 0
        return whole
