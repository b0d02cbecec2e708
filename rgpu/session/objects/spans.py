"""Times at which the device did the work of one call: the answer of a ``timed`` call.

Times are ns of the monotonic clock of the worker that executed the work. ``clock`` identifies that clock, for a
session that is moved between two such calls; ``received`` and ``answered`` are readings of it when the call was applied
and when the answer was made, from which the program's side estimates its offset as NTP does (RFC 5905, section 8).

========  ======  ====================================================================================
offset    type    field
========  ======  ====================================================================================
0         u64     clock
8         i64     received
16        i64     answered
24        u32     number of spans; 28: u32 0
32        88 each kind u32, function u32, module u64, grid 3 × u32, block 3 × u32, shared u32, value u32,
                  bytes u64, start i64, end i64, copy kind u32, element u32, 8 bytes 0
========  ======  ====================================================================================
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rgpu.session.errors import Corrupt

CALL, KERNEL, COPY, MEMSET = range(4)  #: kinds: the call itself; nodes of a graph

CLOCK = secrets.randbits(63)  #: names the monotonic clock of this process
_HEAD = struct.Struct("<QqqII")
_SPAN = struct.Struct("<IIQ3I3IIIQqqII8x")
assert _HEAD.size == 32 and _SPAN.size == 88


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work. ``kind`` CALL: that of the call itself, whose grid and sizes the program's side has."""

    kind: int
    start: int  #: ns
    end: int  #: ns
    module: int = 0
    function: int = 0  #: index in the module's table
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    shared: int = 0  #: dynamic shared memory, bytes
    bytes: int = 0
    value: int = 0  #: value of a memset


def encode(clock: int, received: int, answered: int, spans: Sequence[Span]) -> bytes:
    """Encode times in the layout of the module docstring."""
    parts = [_HEAD.pack(clock, received, answered, len(spans), 0)]
    parts += [_SPAN.pack(s.kind, s.function, s.module, *s.grid, *s.block, s.shared, s.value & 0xFFFFFFFF, s.bytes,
                         s.start, s.end, 0, 0) for s in spans]
    return b"".join(parts)


def decode(data: bytes) -> tuple[int, int, int, list[Span]]:
    """Decode (clock, received, answered, spans). Raises :class:`Corrupt`."""
    if len(data) < _HEAD.size:
        raise Corrupt("times of a call: cut short", offset=len(data), reason="times")
    clock, received, answered, count, _ = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + count * _SPAN.size:
        raise Corrupt(f"times of a call: {len(data)} bytes for {count} spans", offset=24, reason="times")
    found = []
    for at in range(_HEAD.size, len(data), _SPAN.size):
        kind, function, module, *rest = _SPAN.unpack_from(data, at)
        found.append(Span(kind, rest[9], rest[10], module, function, (rest[0], rest[1], rest[2]),
                          (rest[3], rest[4], rest[5]), rest[6], rest[8], rest[7]))
    return clock, received, answered, found
