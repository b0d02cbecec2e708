"""The module table: the answer of a load, sufficient for every later query (docs/developers/modules.md).

u32 functions, each: u16 length + name, u32 parameters, each (u32 offset, u32
size), 16 × i32 attributes; u32 globals, each: u16 length + name, u64 address,
u64 size, with bit 63 set for managed memory (``__managed__``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from struct import error as StructError
from typing import Any

from rgpu.session.fields import U16, U32, FieldReader, pack_name

ATTRIBUTES = 16  #: CUfunction_attribute 0…15

_PAIR = Struct("<II")
_ATTRIBUTES = Struct(f"<{ATTRIBUTES}i")
_PLACE = Struct("<QQ")
_MANAGED = 1 << 63
#: Shortest encodings, for checking a count before anything is allocated for it.
_LEAST_FUNCTION = U16.size + U32.size + _ATTRIBUTES.size
_LEAST_GLOBAL = U16.size + _PLACE.size


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """A kernel of a module: parameters as (offset, size) in bytes, attributes by their number."""

    name: str
    parameters: tuple[tuple[int, int], ...]  #: (offset, size) in bytes
    attributes: tuple[int, ...]  #: CUfunction_attribute 0…15, −1 where unknown


@dataclass(frozen=True, slots=True)
class GlobalVariable:
    """A variable of a module; ``size`` in bytes."""

    name: str
    address: int
    size: int
    managed: bool = field(default=False, compare=False)  #: not compared: answers of loads are kept without it


@dataclass(frozen=True, slots=True)
class ModuleTable:
    """Table that a load returns to the client, sufficient to answer every later query."""

    functions: tuple[FunctionInfo, ...]
    globals: tuple[GlobalVariable, ...]


def encode(table: ModuleTable) -> bytes:
    """Encode a table. Raises ValueError for a value that does not fit its field."""
    try:
        parts = [U32.pack(len(table.functions))]
        for function in table.functions:
            parts += (pack_name(function.name), U32.pack(len(function.parameters)))
            parts += (_PAIR.pack(*parameter) for parameter in function.parameters)
            parts.append(_ATTRIBUTES.pack(*function.attributes))
        parts.append(U32.pack(len(table.globals)))
        for variable in table.globals:
            if variable.size >= _MANAGED:
                raise ValueError(f"module table: variable {variable.name} of {variable.size} bytes")
            size = variable.size | variable.managed * _MANAGED
            parts += (pack_name(variable.name), _PLACE.pack(variable.address, size))
    except StructError as error:
        raise ValueError(f"module table: {error}") from None
    return b"".join(parts)


def decode(data: Any) -> ModuleTable:
    """Invert :func:`encode`. Raises :class:`Corrupt` with the offset."""
    reader = FieldReader(data, "module table")
    functions = tuple(_function(reader) for _ in range(reader.count(_LEAST_FUNCTION)))
    variables = tuple(_variable(reader) for _ in range(reader.count(_LEAST_GLOBAL)))
    reader.end()
    return ModuleTable(functions, variables)


def _variable(reader: FieldReader) -> GlobalVariable:
    name = reader.name()
    address, size = reader.take(_PLACE)
    return GlobalVariable(name, address, size & ~_MANAGED, bool(size & _MANAGED))


def _function(reader: FieldReader) -> FunctionInfo:
    name = reader.name()
    parameters = tuple(reader.take(_PAIR) for _ in range(reader.count(_PAIR.size)))
    return FunctionInfo(name, parameters, reader.take(_ATTRIBUTES))  # type: ignore[arg-type]
