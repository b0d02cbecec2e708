"""Bodies of messages straight from the tables: knows nothing of the product's codecs, so it can judge them."""

from __future__ import annotations

import struct
from typing import Any, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from rgpu.link.protocols.table import SCALARS, Field, Form, Message, Protocol, Record

RANGES = {"u8": (0, 2**8 - 1), "u16": (0, 2**16 - 1), "u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1),
          "i32": (-2**31, 2**31 - 1)}


class Wrong(Exception):
    """A body that is not what its table says."""


# -- packed -----------------------------------------------------------------------------------
def pack(protocol: Protocol, of: Message | Record, values: dict[str, Any]) -> bytes:
    return b"".join(_pack(protocol, field, values[field.name]) for field in protocol.fields(of))


def _pack(protocol: Protocol, field: Field, value: Any) -> bytes:
    if field.base == "text":
        data = value.encode()
        return struct.pack("<H", len(data)) + data
    if field.base == "bytes" and not field.width:
        return bytes(value)
    if field.count:
        return b"".join(_one(protocol, field, one) for one in value)
    return _one(protocol, field, value)


def _one(protocol: Protocol, field: Field, value: Any) -> bytes:
    if field.base not in SCALARS and not field.width:
        return pack(protocol, protocol.record(field.base), value)
    return struct.pack("<" + field.code, *(value if field.times else [value]))


class Reader:
    def __init__(self, protocol: Protocol, data: bytes) -> None:
        self.protocol, self.data, self.at = protocol, data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise Wrong(f"{size} bytes at {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size:self.at]

    def record(self, of: Message | Record) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for field in self.protocol.fields(of):
            values[field.name] = self.field(field, values)
        return values

    def field(self, field: Field, before: dict[str, Any]) -> Any:
        if field.base == "text":
            return self.take(struct.unpack("<H", self.take(2))[0]).decode()
        if not field.count:
            return self.one(field)
        if field.base == "bytes" and not field.width:
            return self.take(len(self.data) - self.at if field.count == "*" else before[field.count])
        found = []
        while self.at < len(self.data) if field.count == "*" else len(found) < before[field.count]:
            found.append(self.one(field))
        return found

    def one(self, field: Field) -> Any:
        if field.base not in SCALARS and not field.width:
            return self.record(self.protocol.record(field.base))
        values = struct.unpack("<" + field.code, self.take(struct.calcsize("<" + field.code)))
        return list(values) if field.times else values[0]


# -- msgpack ----------------------------------------------------------------------------------
def annotation(protocol: Protocol, text: str) -> Any:
    """The type that a keyed field's text stands for; maps inside maps are by their tables, too."""
    keyed = {record.name: struct_of(protocol, record.name, record.plain) for record in protocol.records
             if record.keyed and record.name in text}
    return eval(text, {**keyed, "Any": Any})  # noqa: S307 - text of our own tables


def struct_of(protocol: Protocol, name: str, fields: tuple[Field, ...]) -> type[msgspec.Struct]:
    rows: list[Any] = []
    for field in sorted(fields, key=lambda field: field.optional or bool(field.default)):
        kind = annotation(protocol, field.type)
        if field.optional:
            rows.append((field.name, kind | msgspec.UnsetType, msgspec.UNSET))
        elif field.default:
            default = eval(field.default)  # noqa: S307
            rows.append((field.name, kind, msgspec.field(default_factory=lambda default=default: type(default)(default))
                         if isinstance(default, (list, dict)) else default))
        else:
            rows.append((field.name, kind))
    return msgspec.defstruct(name, rows, forbid_unknown_fields=True)


def check_map(protocol: Protocol, message: Message, body: bytes) -> Any:
    """The map; raises :class:`Wrong` for a key or a type that the table does not have."""
    try:
        return msgspec.msgpack.decode(body, type=struct_of(protocol, message.name, protocol.fields(message)))
    except msgspec.MsgspecError as error:
        raise Wrong(f"{message.name}: {error}") from error


# -- both -------------------------------------------------------------------------------------
def encode(protocol: Protocol, message: Message, values: Any) -> bytes:
    return pack(protocol, message, values) if message.form is Form.PACKED else msgspec.msgpack.encode(values)


def decode(protocol: Protocol, message: Message, body: bytes) -> Any:
    """Values by name. Raises :class:`Wrong` for a body that is not just what the table says."""
    if message.form is Form.PACKED:
        reader = Reader(protocol, body)
        values = reader.record(message)
        if reader.at != len(body):
            raise Wrong(f"{message.name}: {len(body) - reader.at} bytes too many")
        return values
    if message.form is Form.VALUE:
        (field,) = protocol.fields(message)
        try:
            msgspec.msgpack.decode(body, type=annotation(protocol, field.type))
        except msgspec.MsgspecError as error:
            raise Wrong(f"{message.name}: {error}") from error
    else:
        check_map(protocol, message, body)
    return msgspec.msgpack.decode(body)


# -- values -----------------------------------------------------------------------------------
def values_of(protocol: Protocol, message: Message) -> st.SearchStrategy[Any]:
    """Whatever the message may say."""
    fields = protocol.fields(message)
    if message.form is Form.PACKED:
        return _record(protocol, fields)
    if message.form is Form.VALUE:
        return _typed(protocol, annotation(protocol, fields[0].type))
    return _keyed(protocol, fields)


def _keyed(protocol: Protocol, fields: tuple[Field, ...]) -> st.SearchStrategy[Any]:
    needed = {field.name: _typed(protocol, annotation(protocol, field.type)) for field in fields}
    free = {field.name: needed.pop(field.name) for field in fields if field.optional or field.default}
    return st.fixed_dictionaries(needed, optional=free)


def _record(protocol: Protocol, fields: tuple[Field, ...]) -> st.SearchStrategy[dict[str, Any]]:
    counted = {field.count for field in fields}

    @st.composite
    def make(draw: st.DrawFn) -> dict[str, Any]:
        values = {field.name: draw(_packed(protocol, field)) for field in fields if field.name not in counted}
        lengths = {field.count: len(values[field.name]) for field in fields if field.count and field.count != "*"}
        return {field.name: lengths[field.name] if field.name in lengths else values[field.name] for field in fields}

    return make()


def _packed(protocol: Protocol, field: Field) -> st.SearchStrategy[Any]:
    if field.base == "text":
        return st.text(max_size=40)
    if field.base == "bytes" and not field.width:
        return st.binary(max_size=60)
    one: st.SearchStrategy[Any]
    if field.width:
        one = st.binary(min_size=field.width, max_size=field.width)
    elif field.base in SCALARS:
        number = st.integers(*RANGES[field.base])
        one = st.lists(number, min_size=field.times, max_size=field.times) if field.times else number
    else:
        one = _record(protocol, protocol.fields(protocol.record(field.base)))
    return st.lists(one, max_size=4) if field.count else one


def _typed(protocol: Protocol, kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        record = protocol.record(kind.__name__)
        return _keyed(protocol, record.plain)
    if get_origin(kind) is list:
        return st.lists(_typed(protocol, get_args(kind)[0]), max_size=4)
    if get_origin(kind) is tuple:
        return st.tuples(*(_typed(protocol, part) for part in get_args(kind))).map(list)
    if get_origin(kind) is dict or kind is dict:
        return st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)
    if kind is not Any and get_args(kind):  # a union
        return st.one_of(*(_typed(protocol, part) for part in get_args(kind)))
    return {int: st.integers(-2**63, 2**64 - 1), str: st.text(max_size=20), bytes: st.binary(max_size=20),
            bool: st.booleans(), float: st.floats(allow_nan=False), type(None): st.none(),
            list: st.lists(st.text(max_size=5), max_size=3), Any: st.integers(0, 9)}[kind]
