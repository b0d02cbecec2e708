"""The nodes of executable graphs, as ``graph_instantiate`` and ``graph_exec_update`` carry them.

Graphs exist in the client only; a server receives the work on the device and
its order. Payload of ``graph_instantiate``: u32 version 1, u32 nodes,
then each node. Payload of ``graph_exec_update``: u32 version 1, u32 changes,
then for each u32 index and the node that replaces that one, without
dependencies, which stay as they are, as does the type.

A node: u32 type (as CUgraphNodeType: 0 kernel, 1 copy, 2 memset, 5 empty, 13 conditional), u32
flags (1: disabled), u32 count + that many u32 indexes of earlier nodes that it
depends on, then by type

======  ========================================================================
kernel  u64 module, u32 function, 3 x u32 grid, 3 x u32 block, u32 shared bytes,
        u32 flags (1: cooperative), u32 + bytes of parameters, u32 + raw
        CUlaunchAttribute entries (72 bytes each)
copy    u64 destination, pitch, plane; u64 source, pitch, plane; u64 width,
        height, depth (bytes; a plane is the distance of two layers)
memset  u64 destination, pitch, width, height, u32 value, u32 element (1, 2, 4)
empty   nothing
cond.   u64 handle, u32 value, u32 flags (1: the handle has that value when a
        launch begins; undefined otherwise), u32 kind (0 if, 1 while, 2 switch),
        u32 bodies, then of each: u32 nodes, the nodes, as a graph of their own
======  ========================================================================

A handle is the session's own number of a condition; kernels that set the condition receive it in their parameters.

Readers treat the bytes as untrusted: every count is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rgpu.session.errors import Corrupt

VERSION = 1
KERNEL, COPY, MEMSET, EMPTY, CONDITIONAL = 0, 1, 2, 5, 13
IF, WHILE, SWITCH = 0, 1, 2  #: CUgraphConditionalNodeType
DISABLED = 1
ATTRIBUTE_SIZE = 72
#: Limits of a kernel node: bytes of parameters, number of launch attributes.
MAX_PARAMETERS, MAX_ATTRIBUTES = 1 << 16, 64
#: Limits of conditional nodes: depth of nesting, bodies of one node.
MAX_DEPTH, MAX_BODIES = 16, 1024

_HEAD = struct.Struct("<II")
_NODE = struct.Struct("<III")
_KERNEL = struct.Struct("<QI3I3III")
_COPY = struct.Struct("<9Q")
_MEMSET = struct.Struct("<4QII")
_CONDITIONAL = struct.Struct("<QIIII")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A node that launches a kernel."""

    module: int
    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cooperative: bool
    parameters: bytes
    attributes: bytes
    dependencies: tuple[int, ...] = ()
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class CopyNode:
    """A node that copies within device memory. ``plane``: bytes between two layers."""

    destination: int
    destination_pitch: int
    destination_plane: int
    source: int
    source_pitch: int
    source_plane: int
    width: int
    height: int
    depth: int
    dependencies: tuple[int, ...] = ()
    disabled: bool = False

    def layers(self) -> list[tuple[int, int]]:
        """Return (destination, source) of each layer."""
        return [(self.destination + z * self.destination_plane, self.source + z * self.source_plane)
                for z in range(self.depth)]


@dataclass(frozen=True, slots=True)
class MemsetNode:
    """A node that sets memory to a value. ``width`` counts elements of ``element`` bytes."""

    destination: int
    pitch: int
    width: int
    height: int
    value: int
    element: int
    dependencies: tuple[int, ...] = ()
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class EmptyNode:
    """A node that only orders others."""

    dependencies: tuple[int, ...] = ()
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class ConditionalNode:
    """A node that runs one of its bodies, once or repeatedly, or none, depending on a condition when it is reached.

    ``kind``: IF runs the first body for a condition that is not 0 and the second, where there is one, for 0; WHILE
    runs its body as long as the condition is not 0; SWITCH runs the body of that number.
    """

    handle: int
    value: int  #: of the condition when a launch begins …
    assigned: bool  #: … where this is set; undefined otherwise
    kind: int
    bodies: tuple[tuple[Node, ...], ...]
    dependencies: tuple[int, ...] = ()
    disabled: bool = False

    def chosen(self, condition: int) -> int | None:
        """Return the index of the body to run for this value of the condition; None: no more."""
        if self.kind == SWITCH:
            return condition if condition < len(self.bodies) else None
        if condition:
            return 0
        return 1 if self.kind == IF and len(self.bodies) == 2 else None


Node = KernelNode | CopyNode | MemsetNode | EmptyNode | ConditionalNode


def every(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes, and those in bodies of conditional ones at any depth."""
    for node in nodes:
        yield node
        if isinstance(node, ConditionalNode):
            for body in node.bodies:
                yield from every(body)


class _Reader:
    def __init__(self, data: Any) -> None:
        self.data = memoryview(data).cast("B")
        self.at = 0
        self.depth = 0  #: nesting of conditional nodes at the present place

    def corrupt(self, reason: str) -> Corrupt:
        return Corrupt(f"graph nodes, byte {self.at}: {reason}", offset=self.at, reason=reason)

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        if form.size > len(self.data) - self.at:
            raise self.corrupt("cut short")
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def bytes(self, limit: int) -> bytes:
        (size,) = self.take(struct.Struct("<I"))
        if size > limit or size > len(self.data) - self.at:
            raise self.corrupt(f"{size} bytes")
        found = bytes(self.data[self.at:self.at + size])
        self.at += size
        return found

    def count(self, least: int) -> int:
        """Read how many entries of at least ``least`` bytes each follow."""
        version, number = self.take(_HEAD)
        if version != VERSION:
            raise self.corrupt(f"version {version}")
        if number * least > len(self.data) - self.at:
            raise self.corrupt(f"{number} entries")
        return int(number)

    def node(self, index: int) -> Node:
        kind, flags, number = self.take(_NODE)
        if flags & ~DISABLED:
            raise self.corrupt(f"flags {flags:#x}")
        if number > index or number * 4 > len(self.data) - self.at:
            raise self.corrupt(f"{number} dependencies of node {index}")
        dependencies = self.take(struct.Struct(f"<{number}I"))
        if any(other >= index for other in dependencies) or len(set(dependencies)) != number:
            raise self.corrupt(f"dependencies of node {index}")
        common: dict[str, Any] = {"dependencies": dependencies, "disabled": bool(flags & DISABLED)}
        if kind == KERNEL:
            return self.kernel(common)
        if kind == COPY:
            return CopyNode(*self.take(_COPY), **common)
        if kind == MEMSET:
            node = MemsetNode(*self.take(_MEMSET), **common)
            if node.element not in (1, 2, 4):
                raise self.corrupt(f"elements of {node.element} bytes")
            return node
        if kind == EMPTY:
            return EmptyNode(**common)
        if kind == CONDITIONAL:
            return self.conditional(common)
        raise self.corrupt(f"node type {kind}")

    def conditional(self, common: dict[str, Any]) -> ConditionalNode:
        handle, value, flags, kind, bodies = self.take(_CONDITIONAL)
        least, most = {IF: (1, 2), WHILE: (1, 1), SWITCH: (1, MAX_BODIES)}.get(kind, (1, 0))
        if flags & ~1 or not least <= bodies <= most or self.depth == MAX_DEPTH:
            raise self.corrupt(f"conditional node of kind {kind} with {bodies} bodies, flags {flags:#x}, "
                               f"in {self.depth} others")
        self.depth += 1
        found = []
        for _ in range(bodies):
            (number,) = self.take(_COUNT)
            if number * _NODE.size > len(self.data) - self.at:
                raise self.corrupt(f"{number} nodes of a body")
            found.append(tuple(self.node(index) for index in range(number)))
        self.depth -= 1
        return ConditionalNode(handle, value, bool(flags), kind, tuple(found), **common)

    def kernel(self, common: dict[str, Any]) -> KernelNode:
        module, function, *sizes, shared, flags = self.take(_KERNEL)
        if flags & ~1:
            raise self.corrupt(f"kernel flags {flags:#x}")
        parameters = self.bytes(MAX_PARAMETERS)
        attributes = self.bytes(MAX_ATTRIBUTES * ATTRIBUTE_SIZE)
        if len(attributes) % ATTRIBUTE_SIZE:
            raise self.corrupt("launch attributes")
        return KernelNode(module, function, (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5]), shared,
                          bool(flags), parameters, attributes, **common)

    def end(self) -> None:
        if self.at != len(self.data):
            raise self.corrupt("more bytes than nodes")


def decode(payload: Any) -> list[Node]:
    """Decode the nodes of ``graph_instantiate``; each depends on earlier ones only. Raises :class:`Corrupt`."""
    reader = _Reader(payload)
    nodes = [reader.node(index) for index in range(reader.count(_NODE.size))]
    reader.end()
    return nodes


def decode_changes(payload: Any) -> dict[int, Node]:
    """Decode {index: new node, without dependencies} of ``graph_exec_update``. Raises :class:`Corrupt`."""
    reader = _Reader(payload)
    changes: dict[int, Node] = {}
    for _ in range(reader.count(_NODE.size + 4)):
        (index,) = reader.take(struct.Struct("<I"))
        if index in changes:
            raise reader.corrupt(f"node {index} twice")
        changes[index] = reader.node(0)
    reader.end()
    return changes


def apply_changes(nodes: Sequence[Node], changes: dict[int, Node]) -> list[Node]:
    """Return the nodes after an update. Raises :class:`Corrupt` where an index or a type does not match."""
    found = list(nodes)
    for index, node in changes.items():
        if index >= len(found) or type(node) is not type(found[index]):
            raise Corrupt(f"graph update: node {index} of {len(found)} is no {type(node).__name__}", offset=0,
                          reason="graph update")
        found[index] = replace(node, dependencies=found[index].dependencies)
    return found


def encode_node(node: Node) -> bytes:
    """Encode one node."""
    kind, body = _body(node)
    dependencies = struct.pack(f"<{len(node.dependencies)}I", *node.dependencies)
    return _NODE.pack(kind, DISABLED if node.disabled else 0, len(node.dependencies)) + dependencies + body


def _body(node: Node) -> tuple[int, bytes]:
    if isinstance(node, KernelNode):
        head = _KERNEL.pack(node.module, node.function, *node.grid, *node.block, node.shared, int(node.cooperative))
        return KERNEL, b"".join((head, struct.pack("<I", len(node.parameters)), node.parameters,
                                 struct.pack("<I", len(node.attributes)), node.attributes))
    if isinstance(node, CopyNode):
        return COPY, _COPY.pack(node.destination, node.destination_pitch, node.destination_plane, node.source,
                                node.source_pitch, node.source_plane, node.width, node.height, node.depth)
    if isinstance(node, MemsetNode):
        return MEMSET, _MEMSET.pack(node.destination, node.pitch, node.width, node.height, node.value, node.element)
    if isinstance(node, ConditionalNode):
        head = _CONDITIONAL.pack(node.handle, node.value, int(node.assigned), node.kind, len(node.bodies))
        bodies = (_COUNT.pack(len(body)) + b"".join(map(encode_node, body)) for body in node.bodies)
        return CONDITIONAL, head + b"".join(bodies)
    return EMPTY, b""


def encode(nodes: Sequence[Node]) -> bytes:
    """Invert :func:`decode`."""
    return _HEAD.pack(VERSION, len(nodes)) + b"".join(map(encode_node, nodes))


def encode_changes(changes: dict[int, Node]) -> bytes:
    """Invert :func:`decode_changes`."""
    return _HEAD.pack(VERSION, len(changes)) + b"".join(
        struct.pack("<I", index) + encode_node(replace(node, dependencies=())) for index, node in changes.items())
