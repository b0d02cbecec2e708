"""Encoding of arguments and replies; the generated decoders register their layouts here.

The encoding is that of :mod:`rgpu.session.calls.wire`: the fixed-size fields
packed without padding, then each blob as u32 length + bytes. A reader takes
exactly that: bytes missing or left over are :class:`Corrupt`.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Any

from rgpu.session.calls.wire import Call
from rgpu.session.errors import Corrupt

_U32 = Struct("<I")

#: Largest argument block of a record, in bytes.
MAX_ARGS = 1 << 20


class Layout:
    """Encoder and decoder of one tuple type."""

    __slots__ = ("blobs", "fields", "fixed", "make", "type", "unpack")

    def __init__(self, cls: Any, fixed: str, blobs: int) -> None:
        self.type = cls
        self.make = cls._make
        self.fixed = Struct(fixed)
        self.unpack = self.fixed.unpack
        self.blobs = blobs
        self.fields: tuple[str, ...] = cls._fields

    def decode(self, data: Any) -> Any:
        """Decode one tuple. Raises :class:`Corrupt` unless ``data`` is exactly one."""
        if not self.blobs:
            try:
                return self.make(self.unpack(data))
            except StructError:
                raise self._corrupt(data, 0, f"{self.fixed.size} bytes expected") from None
        at = self.fixed.size
        if len(data) < at:
            raise self._corrupt(data, 0, f"{at} bytes expected at least")
        values = list(self.fixed.unpack_from(data))
        for _ in range(self.blobs):
            if len(data) - at < 4:
                raise self._corrupt(data, at, "the length of a blob is cut off")
            (size,) = _U32.unpack_from(data, at)
            at += 4
            if len(data) - at < size:
                raise self._corrupt(data, at, f"a blob of {size} bytes is cut off")
            values.append(bytes(data[at:at + size]))
            at += size
        if at != len(data):
            raise self._corrupt(data, at, f"{len(data) - at} bytes left over")
        return self.make(values)

    def encode(self, values: dict[str, Any]) -> bytes:
        """Encode ``values``. Raises TypeError for a missing or unknown field, ValueError for a value too large."""
        if values.keys() != set(self.fields):
            raise TypeError(f"{self.type.__name__} takes {', '.join(self.fields)}; got {', '.join(values)}")
        count = len(self.fields) - self.blobs
        try:
            parts = [self.fixed.pack(*(values[name] for name in self.fields[:count]))]
        except StructError as error:
            raise ValueError(f"{self.type.__name__}: {error}") from None
        for name in self.fields[count:]:
            blob = bytes(values[name])
            parts += (_U32.pack(len(blob)), blob)
        return b"".join(parts)

    def _corrupt(self, data: Any, offset: int, reason: str) -> Corrupt:
        return Corrupt(f"{self.type.__name__}: {len(data)} bytes: {reason}", offset=offset, reason=reason)


_ARGS: dict[int, Layout] = {}
_REPLIES: dict[int, Layout | None] = {}
_IDS: dict[str, int] = {}


def register(call_id: int, name: str, args: Layout, reply: Layout | None) -> None:
    """Register the layouts of a wire call; the generated module does so once for each."""
    _ARGS[call_id] = args
    _REPLIES[call_id] = reply
    _IDS[name] = call_id


def _id(call: Call | str | int) -> int:
    if isinstance(call, int):
        return call
    return _IDS[call] if isinstance(call, str) else call.id


def decode(call_id: int, args: Any) -> Any:
    """Decode the arguments of a call as its named tuple. Raises :class:`Corrupt`."""
    try:
        layout = _ARGS[call_id]
    except KeyError:
        raise Corrupt(f"there is no call {call_id}", offset=0, reason="unknown call", call=call_id) from None
    return layout.decode(args)


def encode_args(call: Call | str | int, /, **values: Any) -> bytes:
    """Encode the arguments of a call (by name, id or :class:`Call`). Raises as :meth:`Layout.encode` does."""
    return _ARGS[_id(call)].encode(values)


def decode_reply(call: Call | str | int, data: Any) -> Any:
    """Decode the reply of a call as its named tuple, None for a call that has none. Raises :class:`Corrupt`."""
    layout = _REPLIES[_id(call)]
    if layout is None:
        if len(data):
            raise Corrupt(f"an answer of {len(data)} bytes to a call without one", offset=0, reason="unexpected reply")
        return None
    return layout.decode(data)


def encode_reply(call: Call | str | int, /, **values: Any) -> bytes:
    """Encode the reply of a call; ``b""`` for a call that has none. Raises as :meth:`Layout.encode` does."""
    layout = _REPLIES[_id(call)]
    if layout is None:
        if values:
            raise TypeError(f"this call has no reply; got {', '.join(values)}")
        return b""
    return layout.encode(values)
