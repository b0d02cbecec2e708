"""The description of a module that a load keeps for the next load of the same binary: names, parameters, attributes,
variables. Pure.

As msgpack arrays; their file has checksums (:mod:`rgpu.server.derived_format`). The key identifies binary, options, GPU
and driver. A description that does not decode is made anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from rgpu.server.device.cuda.work.binaries import Trait, Variable
from rgpu.session.objects.module_table import ATTRIBUTES, FunctionInfo, GlobalVariable

VERSION = 1

#: name, address relative to the module's first variable, size
Distance = tuple[str, int, int]
_Function = tuple[str, list[tuple[int, int]], list[int]]
_Variable = tuple[str, int, int, int]


@dataclass(frozen=True)
class Description:
    """``functions`` in the order of the driver's enumeration; ``variables`` as they were looked for.

    ``distances``: of the variables, as the load placed them. ``compiles``: it is PTX, and slow to compile.
    """

    functions: tuple[FunctionInfo, ...]
    variables: tuple[Variable, ...]
    distances: tuple[Distance, ...]
    traits: Trait
    compiles: bool


class _Body(msgspec.Struct, array_like=True):
    version: int
    functions: list[_Function]
    variables: list[_Variable]
    distances: list[Distance]
    traits: int
    compiles: bool


class _Code(msgspec.Struct, array_like=True):
    version: int
    code: bytes
    log: str


def encode(description: Description) -> bytes:
    """The description's bytes."""
    return msgspec.msgpack.encode(_Body(
        VERSION, [(one.name, list(one.parameters), list(one.attributes)) for one in description.functions],
        [(one.name, one.section, one.offset, one.size) for one in description.variables],
        list(description.distances), int(description.traits), description.compiles))


def decode_or_none(data: bytes | None) -> Description | None:
    """Decode a description: the inverse of :func:`encode`. None for None and for anything that no load makes."""
    body: Any = _decode(data, _Body)
    if body is None or any(len(attributes) != ATTRIBUTES for _, _, attributes in body.functions):
        return None
    return Description(tuple(FunctionInfo(name, tuple(parameters), tuple(attributes))
                             for name, parameters, attributes in body.functions),
                       tuple(Variable(*one) for one in body.variables), tuple(body.distances), Trait(body.traits),
                       body.compiles)


def encode_code(code: bytes, log: str) -> bytes:
    """Encode machine code compiled from PTX, with the compiler's log; empty code: it would give another module."""
    return msgspec.msgpack.encode(_Code(VERSION, code, log))


def decode_code(data: bytes) -> tuple[bytes, str] | None:
    """Decode machine code: the inverse of :func:`encode_code`; None for anything else."""
    found: Any = _decode(data, _Code)
    return None if found is None else (found.code, found.log)


def distances(variables: Iterable[GlobalVariable]) -> tuple[Distance, ...]:
    """Return the relative positions of a module's variables, in an order that follows from them."""
    found = list(variables)
    first = min((one.address for one in found), default=0)
    return tuple(sorted((one.name, one.address - first, one.size) for one in found))


def _decode(data: bytes | None, form: type) -> Any:
    if data is None:
        return None
    try:
        body: Any = msgspec.msgpack.decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return body if body.version == VERSION else None
