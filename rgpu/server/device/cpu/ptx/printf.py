"""Device-side printf: one lane's format string and argument buffer to bytes."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable

_CONVERSION = re.compile(rb"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|j|z|t|L)?([diouxXcsfFeEgGaAp%n])")
_SIZES = {b"hh": 1, b"h": 2, b"l": 8, b"ll": 8, b"j": 8, b"z": 8, b"t": 8}
_LONGEST = 1 << 16


class _Arguments:
    """The argument buffer: values in order, each aligned to its size."""

    def __init__(self, address: int):
        self.at = address

    def take(self, size: int) -> bytes:
        """The next value's bytes."""
        self.at = -(-self.at // size) * size
        data = ctypes.string_at(self.at, size)
        self.at += size
        return data

    def integer(self, size: int, signed: bool) -> int:
        """The next integer; those below 32 bits were promoted."""
        value = int.from_bytes(self.take(max(size, 4)), "little", signed=signed)
        if size < 4:
            value &= (1 << 8 * size) - 1
            if signed and value >> (8 * size - 1):
                value -= 1 << 8 * size
        return value


def read_string(address: int, readable: Callable[[int], int]) -> bytes:
    """A zero-terminated string; ``readable`` says how many bytes from an address may be read."""
    room = min(readable(address), _LONGEST)
    return ctypes.string_at(address, room).split(b"\0", 1)[0] if room > 0 else b"(bad address)"


def format_message(fmt: int, args: int, readable: Callable[[int], int]) -> bytes:
    """What ``printf(fmt, …)`` prints."""
    values = _Arguments(args)

    def one(match: re.Match[bytes]) -> bytes:
        flags, width, precision, length, kind = match.groups()
        if kind == b"%":
            return b"%"
        if width == b"*":
            width = str(values.integer(4, True)).encode()
        if precision == b"*":
            precision = str(values.integer(4, True)).encode()
        spec = b"%" + flags + (width or b"") + (b"." + precision if precision else b"")
        size = _SIZES.get(length or b"", 4)
        if kind in b"di":
            return (spec + b"d") % values.integer(size, True)
        if kind in b"ouxX":
            return (spec + (b"d" if kind == b"u" else kind)) % values.integer(size, False)
        if kind == b"c":
            return (spec + b"c") % (values.integer(4, False) & 255)
        if kind == b"p":
            return b"0x%x" % values.integer(8, False)
        if kind == b"s":
            return (spec + b"s") % read_string(values.integer(8, False), readable)
        if kind == b"n":
            return b""
        value = struct.unpack("<d", values.take(8))[0]
        if kind in b"aA":
            text = value.hex().encode()
            return text.upper() if kind == b"A" else text
        return (spec + kind) % value

    return _CONVERSION.sub(one, read_string(fmt, readable))
