"""The module table: what a load answers, enough for every later question (docs/developers/modules.md).

u32 functions, each: u16 length + name, u32 parameters, each (u32 offset, u32
size), 16 × i32 attributes; u32 globals, each: u16 length + name, u64 address,
u64 size.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Any

from rgpu.session.errors import Corrupt

ATTRIBUTES = 16  #: CUfunction_attribute 0…15

_U16 = Struct("<H")
_U32 = Struct("<I")
_PAIR = Struct("<II")
_ATTRIBUTES = Struct(f"<{ATTRIBUTES}i")
_PLACE = Struct("<QQ")
#: Shortest encodings, so that a count is believable before anything is allocated for it.
_LEAST_FUNCTION = _U16.size + _U32.size + _ATTRIBUTES.size
_LEAST_GLOBAL = _U16.size + _PLACE.size


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    name: str
    parameters: tuple[tuple[int, int], ...]  #: (offset, size) in bytes
    attributes: tuple[int, ...]  #: CUfunction_attribute 0…15, −1 where unknown


@dataclass(frozen=True, slots=True)
class GlobalVariable:
    name: str
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class ModuleTable:
    """What a load returns to the client: enough to answer every later question."""

    functions: tuple[FunctionInfo, ...]
    globals: tuple[GlobalVariable, ...]


def encode(table: ModuleTable) -> bytes:
    """The table's bytes. Raises ValueError for a value that does not fit its field."""
    try:
        parts = [_U32.pack(len(table.functions))]
        for function in table.functions:
            parts += (_name(function.name), _U32.pack(len(function.parameters)))
            parts += (_PAIR.pack(*parameter) for parameter in function.parameters)
            parts.append(_ATTRIBUTES.pack(*function.attributes))
        parts.append(_U32.pack(len(table.globals)))
        for variable in table.globals:
            parts += (_name(variable.name), _PLACE.pack(variable.address, variable.size))
    except StructError as error:
        raise ValueError(f"module table: {error}") from None
    return b"".join(parts)


def decode(data: Any) -> ModuleTable:
    """The inverse of :func:`encode`. Raises :class:`Corrupt` with the offset."""
    reader = _Reader(bytes(data))
    functions = tuple(_function(reader) for _ in range(reader.count(_LEAST_FUNCTION)))
    variables = tuple(GlobalVariable(reader.name(), *reader.take(_PLACE))
                      for _ in range(reader.count(_LEAST_GLOBAL)))
    if reader.at != len(reader.data):
        raise reader.corrupt(f"{len(reader.data) - reader.at} bytes left over")
    return ModuleTable(functions, variables)


def _function(reader: _Reader) -> FunctionInfo:
    name = reader.name()
    parameters = tuple(reader.take(_PAIR) for _ in range(reader.count(_PAIR.size)))
    return FunctionInfo(name, parameters, reader.take(_ATTRIBUTES))  # type: ignore[arg-type]


def _name(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def corrupt(self, what: str) -> Corrupt:
        return Corrupt(f"module table at offset {self.at}: {what}", offset=self.at, reason=what)

    def take(self, layout: Struct) -> tuple[int, ...]:
        if len(self.data) - self.at < layout.size:
            raise self.corrupt("cut off")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def count(self, least: int) -> int:
        """A count of things of at least ``least`` bytes each."""
        (count,) = self.take(_U32)
        if count > (len(self.data) - self.at) // least:
            raise self.corrupt(f"{count} entries do not fit into what is left")
        return count

    def name(self) -> str:
        (size,) = self.take(_U16)
        raw = self.data[self.at:self.at + size]
        if len(raw) != size:
            raise self.corrupt("a name is cut off")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.corrupt("a name that is not UTF-8") from None
        self.at += size
        return text
