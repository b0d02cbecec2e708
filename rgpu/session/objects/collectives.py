"""Communicators and collectives as calls carry them: pure. Layouts: docs/developers/objects/collectives.md.

Values of types, reductions and results are those of ``nccl.h`` 2.32 (``ncclDataType_t``, ``ncclRedOp_t``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from rgpu.session.errors import Corrupt

UNIQUE_ID_BYTES = 128  #: NCCL_UNIQUE_ID_BYTES
MOST_OPERATIONS = 16384  #: in one group: they must fit into the arguments of one record, of 1 MiB at most
MOST_RANKS = 1 << 16
NO_PEER = -1


class DataType(IntEnum):
    """``ncclDataType_t``."""

    INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 = range(12)

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)[self]


class Reduction(IntEnum):
    """``ncclRedOp_t``; PREMULSUM: any that ``ncclRedOpCreatePreMulSum`` made."""

    SUM, PROD, MAX, MIN, AVG, PREMULSUM = range(6)


class Kind(IntEnum):
    """Kind of an operation of a group."""

    (ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND,
     RECEIVE) = range(10)

    @property
    def reduces(self) -> bool:
        """Whether contributions are combined."""
        return self in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)

    @property
    def rooted(self) -> bool:
        """Whether ``peer`` names the root."""
        return self in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)

    @property
    def paired(self) -> bool:
        """Whether it concerns two ranks, ``peer`` being the other one."""
        return self in (Kind.SEND, Kind.RECEIVE)

    def extent(self, ranks: int, rank: int, root: int) -> tuple[int, int]:
        """Return how many elements, in units of the operation's count, this rank (reads, writes)."""
        mine = rank == root
        return {
            Kind.ALL_REDUCE: (1, 1), Kind.REDUCE: (1, int(mine)), Kind.BROADCAST: (int(mine), 1),
            Kind.ALL_GATHER: (1, ranks), Kind.REDUCE_SCATTER: (ranks, 1), Kind.ALL_TO_ALL: (ranks, ranks),
            Kind.GATHER: (1, ranks * mine), Kind.SCATTER: (ranks * mine, 1), Kind.SEND: (1, 0), Kind.RECEIVE: (0, 1),
        }[self]


_OPERATION = struct.Struct("<BBBBiQQQQQQQ")
_SCALAR_ON_DEVICE = 1


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a group. ``peer``: root, or the other rank of a send or receive; NO_PEER: neither.

    ``count``: elements, as the function's argument of that name. ``scalar``: of PREMULSUM, the value's own bytes
    (little-endian, in the low bytes), or its device address where ``on_device``. ``number``: the operation's index
    among the rank's collectives in that communicator, from 0 on, or among its sends to (receives from) that peer. The
    client counts, so a replay from any position, on any worker, gives an operation the same number.
    """

    kind: Kind
    data_type: DataType
    reduction: Reduction
    peer: int
    communicator: int
    stream: int
    send: int
    receive: int
    count: int
    scalar: int = 0
    number: int = 0
    on_device: bool = False

    @property
    def size(self) -> int:
        """Bytes of ``count`` elements."""
        return self.count * self.data_type.size

    def __str__(self) -> str:
        reduction = f" {self.reduction.name.lower()}" if self.kind.reduces else ""
        peer = f" {'peer' if self.kind.paired else 'root'} {self.peer}" if self.peer != NO_PEER else ""
        return (f"{self.kind.name.lower()}{reduction} of {self.count} x {self.data_type.name.lower()}{peer} "
                f"({self.size} bytes)")


def encode(operations: Sequence[Operation]) -> bytes:
    """Encode the blob ``operations`` of the call ``collective_group``."""
    return b"".join(_OPERATION.pack(
        op.kind, op.data_type, op.reduction, _SCALAR_ON_DEVICE * op.on_device, op.peer, op.communicator, op.stream,
        op.send, op.receive, op.count, op.scalar, op.number) for op in operations)


def decode(data: bytes) -> list[Operation]:
    """Invert :func:`encode`. Raises :class:`Corrupt`, also for values that no program can pass."""
    if not data or len(data) % _OPERATION.size or len(data) > MOST_OPERATIONS * _OPERATION.size:
        raise Corrupt(f"operations of a group: {len(data)} bytes", offset=0, reason="no whole number of operations")
    found = []
    for number, row in enumerate(_OPERATION.iter_unpack(data)):
        kind, data_type, reduction, flags, peer, *rest = row
        try:
            op = Operation(Kind(kind), DataType(data_type), Reduction(reduction), peer, *rest,  # type: ignore[misc]
                           on_device=bool(flags & _SCALAR_ON_DEVICE))
        except ValueError as error:
            raise _bad(number, str(error)) from None
        if flags & ~_SCALAR_ON_DEVICE or not NO_PEER <= peer < MOST_RANKS:
            raise _bad(number, f"flags {flags:#x}, peer {peer}")
        if (op.kind.rooted or op.kind.paired) != (peer != NO_PEER):
            raise _bad(number, f"{op.kind.name.lower()} with peer {peer}")
        if op.count * op.data_type.size >= 1 << 47:
            raise _bad(number, f"{op.count} elements")
        found.append(op)
    return found


def decode_members(data: bytes, ranks: int) -> list[str]:
    """Decode the blob ``members`` of the call ``communicator_create``: the session of each rank, u16 length and UTF-8.

    Empty where all ranks are in one session. Raises :class:`Corrupt`.
    """
    found: list[str] = []
    at = 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at:at + 2], "little")
        try:
            if end > len(data) or end == at + 2:
                raise ValueError("it is cut off, or a name is empty")
            found.append(bytes(data[at + 2:end]).decode())
        except ValueError as error:
            raise Corrupt(f"members of a communicator: {error}", offset=at, reason="members") from None
        at = end
    if found and len(found) != ranks:
        raise Corrupt(f"members of a communicator: {len(found)} for {ranks} ranks", offset=0, reason="members")
    return found


def _bad(number: int, reason: str) -> Corrupt:
    return Corrupt(f"operation {number} of a group: {reason}", offset=number * _OPERATION.size, reason=reason)
