"""The elements of a protocol's table: fields, records, messages, constants.

A field is written as one line of text, ``TYPE NAME[?] [= DEFAULT] [@SINCE][: DOC]``:

=====================  =========================================================================================
type                   meaning in a packed body (little-endian, no padding)
=====================  =========================================================================================
u8 u16 u32 u64 i32     an integer
bytes16                so many bytes
u64x2                  so many integers side by side
text                   u16 length, then UTF-8
bytes(n), Record(n)    as many bytes or records as the field ``n`` before it gives
bytes(*), Record(*)    to the end of the body
=====================  =========================================================================================

``*Record`` stands for the fields of a record. In a map of msgpack a type is a Python annotation, ``?`` marks a key
that may be missing and ``@2`` one that protocol 1 does not have.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

#: integer type → (character of :mod:`struct`, type in C++)
SCALARS = {"u8": ("B", "uint8_t"), "u16": ("H", "uint16_t"), "u32": ("I", "uint32_t"), "u64": ("Q", "uint64_t"),
           "i32": ("i", "int32_t")}
_LINE = re.compile(r"(?P<type>.+?) (?P<name>\w+)(?P<optional>\?)?(?: = (?P<default>[^@:]+?))?(?: @(?P<since>\d+))?"
                   r"(?:: (?P<doc>.*))?")
_TYPE = re.compile(r"(?P<base>[A-Za-z]+\d*?(?:bytes)?\d*?)(?:(?<=bytes)(?P<width>\d+)|x(?P<times>\d+))?"
                   r"(?:\((?P<count>\w+|\*)\))?")


class Form(Enum):
    """The encoding of a message's body."""

    PACKED = "packed"  #: the fields, side by side
    MAP = "msgpack map"
    VALUE = "msgpack"  #: one value of msgpack, of the only field's type


class Way(Enum):
    """Direction of a message: the end that sends it."""

    TO = 0  #: the first end to the second
    BACK = 1  #: the second to the first


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body or record; ``width`` and ``times`` 0: one value of the type."""

    name: str
    type: str  #: as it was written
    base: str = ""  #: a scalar, ``bytes``, ``text`` or a record's name; "" in a map
    width: int = 0
    times: int = 0
    count: str = ""  #: the field that gives the number, ``*`` for all that follow
    optional: bool = False
    default: str = ""  #: a Python expression
    since: int = 1
    doc: str = ""

    @property
    def fixed(self) -> bool:
        """Whether it has the same length in every message."""
        return not self.count and (self.base in SCALARS or bool(self.width))

    @property
    def code(self) -> str:
        """Return the characters of :mod:`struct` for a fixed field."""
        return f"{self.width}s" if self.width else f"{self.times or ''}{SCALARS[self.base][0]}"


@dataclass(frozen=True, slots=True)
class Record:
    """A named sequence of fields, all of them fixed unless it is only used to be repeated in a message.

    ``array``: Python reads many at once with NumPy; ``cpp``: the header has it; ``python``: the module has it;
    ``keyed``: a map of msgpack inside another one.
    """

    name: str
    fields: tuple[Field | str, ...]
    doc: str
    array: bool = False
    cpp: bool = False
    python: bool = True
    keyed: bool = False

    @property
    def fixed(self) -> bool:
        """Whether it has the same length in every place."""
        return not self.keyed and all(isinstance(field, Field) and field.fixed for field in self.fields)

    @property
    def plain(self) -> tuple[Field, ...]:
        """Return the fields of a fixed record."""
        return tuple(field for field in self.fields if isinstance(field, Field))

    @property
    def format(self) -> str:
        """Return the format for :mod:`struct` of a fixed record."""
        return "<" + "".join(field.code for field in self.plain)

    @property
    def size(self) -> int:
        """Return the length in bytes of a fixed record."""
        return struct.calcsize(self.format)

    def offsets(self) -> Iterator[tuple[Field, int]]:
        """Yield each field of a fixed record with its offset in bytes."""
        at = 0
        for field in self.plain:
            yield field, at
            at += struct.calcsize("<" + field.code)


@dataclass(frozen=True, slots=True)
class Constant:
    """A number or magic that both ends use. ``type``: of C++, ``""`` for one that only Python has."""

    name: str
    value: int | bytes
    doc: str
    type: str = "uint32_t"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``number``: its type on the wire, 0 where names tell messages apart.

    ``descriptors``: those sent with it; ``struct``: name of the msgspec class that is made of a map.
    """

    number: int
    name: str
    way: Way
    fields: tuple[Field | str, ...]
    doc: str
    form: Form = Form.PACKED
    since: int = 1
    descriptors: str = ""
    struct: str = ""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A whole protocol. ``ends``: names of its two ends; ``intro``: text before the tables in the docs."""

    name: str
    title: str
    ends: tuple[str, str]
    version: int
    intro: str
    messages: tuple[Message, ...]
    records: tuple[Record, ...] = ()
    constants: tuple[Constant, ...] = ()

    def record(self, name: str) -> Record:
        """Return the record of that name. Raises :class:`KeyError`."""
        return {record.name: record for record in self.records}[name]

    def message(self, name: str) -> Message:
        """Return the message of that name. Raises :class:`KeyError`."""
        return {message.name: message for message in self.messages}[name]

    def fields(self, of: Message | Record) -> tuple[Field, ...]:
        """Return all fields, those of the records that it names in their places."""
        found: list[Field] = []
        for field in of.fields:
            found += self.fields(self.record(field[1:])) if isinstance(field, str) else [field]
        return tuple(found)


def _packed(line: str) -> Field:
    match = _LINE.fullmatch(line)
    parts = _TYPE.fullmatch(match["type"]) if match is not None else None
    if match is None or parts is None:
        raise ValueError(f"no field: {line!r}")
    return Field(match["name"], match["type"], parts["base"], int(parts["width"] or 0), int(parts["times"] or 0),
                 parts["count"] or "", since=int(match["since"] or 1), doc=match["doc"] or "")


def _keyed(line: str) -> Field:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"no field: {line!r}")
    return Field(match["name"], match["type"], optional=bool(match["optional"]), default=match["default"] or "",
                 since=int(match["since"] or 1), doc=match["doc"] or "")


def record(name: str, doc: str, *lines: str, array: bool = False, cpp: bool = False, python: bool = True) -> Record:
    """Make a :class:`Record`. Raises :class:`ValueError` for a line that is no field."""
    fields = tuple(line if line.startswith("*") else _packed(line) for line in lines)
    return Record(name, fields, doc, array, cpp, python)


def keyed(name: str, doc: str, *lines: str) -> Record:
    """Make a :class:`Record` that is a map of msgpack. Raises :class:`ValueError` for a line that is no field."""
    return Record(name, tuple(map(_keyed, lines)), doc, keyed=True)


def message(number: int, name: str, way: Way, doc: str, *lines: str, form: Form = Form.PACKED, since: int = 1,
            descriptors: str = "", struct: str = "") -> Message:
    """Make a :class:`Message`. Raises :class:`ValueError` for a line that is no field."""
    parse = _packed if form is Form.PACKED else _keyed
    fields = tuple(line if line.startswith("*") else parse(line) for line in lines)
    return Message(number, name, way, fields, doc, form, since, descriptors, struct)
