"""Fields of a compact binary form, read from untrusted bytes."""

from __future__ import annotations

from struct import Struct
from typing import Any

from rgpu.session.errors import Corrupt

U16 = Struct("<H")
U32 = Struct("<I")


def pack_name(text: str) -> bytes:
    """Return ``text`` in UTF-8 behind its length (u16). Raises ``struct.error`` beyond 65,535 bytes."""
    data = text.encode()
    return U16.pack(len(data)) + data


class FieldReader:
    """Reads fields from untrusted bytes, in order; each method raises :class:`Corrupt` with the offset."""

    def __init__(self, data: Any, what: str) -> None:
        """Read ``data`` (anything that ``bytes`` takes) from its start; ``what`` names it in errors."""
        self.data = bytes(data)
        self.at = 0
        self._what = what

    def corrupt(self, reason: str) -> Corrupt:
        """Make the error with ``reason`` and the present offset."""
        return Corrupt(f"{self._what} at offset {self.at}: {reason}", offset=self.at, reason=reason)

    def take(self, layout: Struct) -> tuple[Any, ...]:
        """Return the next fields, laid out as ``layout``."""
        if len(self.data) - self.at < layout.size:
            raise self.corrupt("cut off")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def count(self, least: int) -> int:
        """Return a count (u32) of entries of at least ``least`` bytes each, which the remaining bytes can hold."""
        (count,) = self.take(U32)
        if count > (len(self.data) - self.at) // least:
            raise self.corrupt(f"{count} entries do not fit into what is left")
        return int(count)

    def name(self) -> str:
        """Return a text written by :func:`pack_name`."""
        (size,) = self.take(U16)
        if len(self.data) - self.at < size:
            raise self.corrupt("a name is cut off")
        try:
            text = self.data[self.at:self.at + size].decode()
        except UnicodeDecodeError:
            raise self.corrupt("a name that is not UTF-8") from None
        self.at += size
        return text

    def end(self) -> None:
        """Check that nothing is left."""
        if self.at != len(self.data):
            raise self.corrupt(f"{len(self.data) - self.at} bytes left over")
