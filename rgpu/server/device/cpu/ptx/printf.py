"""Device-side printf: one lane's format string and argument buffer to bytes.

The program chose both addresses: each byte is checked to be readable before it is read.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable

_CONVERSION = re.compile(rb"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|j|z|t|L)?([diouxXcsfFeEgGaAp%n])")
_SIZES = {b"hh": 1, b"h": 2, b"l": 8, b"ll": 8, b"j": 8, b"z": 8, b"t": 8}
_LONGEST = 1 << 16  #: bytes of a string, of a field and of a number's digits
_ADDRESSES = 1 << 64

Readable = Callable[[int], int]  #: how many bytes from an address on may be read


class BadAddressError(Exception):
    """A string or argument to print is not entirely in the program's memory; ``address``: the first byte outside."""

    def __init__(self, address: int):
        super().__init__(f"{address:#x} cannot be read")
        self.address = address % _ADDRESSES


class _Arguments:
    """The argument buffer: values in order, each aligned to its size."""

    def __init__(self, address: int, readable: Readable):
        self.at = address
        self.readable = readable

    def take(self, size: int) -> bytes:
        """Return the next value's bytes."""
        self.at = -(-self.at // size) * size
        if self.at >= _ADDRESSES or self.readable(self.at) < size:
            raise BadAddressError(self.at)
        data = ctypes.string_at(self.at, size)
        self.at += size
        return data

    def integer(self, size: int, signed: bool) -> int:
        """Return the next integer; integers below 32 bits were promoted."""
        value = int.from_bytes(self.take(max(size, 4)), "little", signed=signed)
        if size < 4:
            value &= (1 << 8 * size) - 1
            if signed and value >> (8 * size - 1):
                value -= 1 << 8 * size
        return value


def read_string(address: int, readable: Readable) -> bytes:
    """Return a zero-terminated string, cut at 64 KiB. Raises BadAddressError where memory ends before it does."""
    room = readable(address)
    if room <= 0:
        raise BadAddressError(address)
    text, end, _ = ctypes.string_at(address, min(room, _LONGEST)).partition(b"\0")
    if not end and room < _LONGEST:
        raise BadAddressError(address + room)
    return text


def _field(value: bytes | None, values: _Arguments) -> int | None:
    """Return a width or a precision, given in the format or as an argument."""
    if value is None:
        return None
    number = values.integer(4, True) if value == b"*" else int(value)
    return max(-_LONGEST, min(number, _LONGEST))


def format_message(fmt: int, args: int, readable: Readable) -> bytes:
    """Return what ``printf(fmt, …)`` prints. Raises BadAddressError."""
    values = _Arguments(args, readable)

    def one(match: re.Match[bytes]) -> bytes:
        flags, width, precision, length, kind = match.groups()
        if kind == b"%":
            return b"%"
        wide, exact = _field(width, values), _field(precision, values)
        spec = b"%" + flags + (b"" if wide is None else b"%d" % wide)
        if exact is not None and exact >= 0:  # a negative one counts as none
            spec += b".%d" % exact
        try:
            return _converted(spec, kind, _SIZES.get(length or b"", 4), values)
        except (ValueError, OverflowError):  # more digits than can be made
            return match.group()

    return _CONVERSION.sub(one, read_string(fmt, readable))


def _converted(spec: bytes, kind: bytes, size: int, values: _Arguments) -> bytes:
    """Return one conversion's text; ``size``: bytes of its integer."""
    if kind in b"di":
        return (spec + b"d") % values.integer(size, True)
    if kind in b"ouxX":
        return (spec + (b"d" if kind == b"u" else kind)) % values.integer(size, False)
    if kind == b"c":
        return (spec + b"c") % (values.integer(4, False) & 255)
    if kind == b"p":
        return b"0x%x" % values.integer(8, False)
    if kind == b"s":
        address = values.integer(8, False)
        return (spec + b"s") % (read_string(address, values.readable) if address else b"(null)")
    if kind == b"n":
        return b""
    value = struct.unpack("<d", values.take(8))[0]
    if kind in b"aA":
        text: bytes = value.hex().encode()
        return text.upper() if kind == b"A" else text
    return (spec + kind) % value
