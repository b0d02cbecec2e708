"""The journal record: one wire call with its place in the journal (docs/developers/journal.md).

:func:`pack` writes one; :class:`RecordReader` takes a byte stream cut anywhere
and returns the records in it. The reader is part of the worker's applying loop,
so it copies nothing that lies whole in the piece it was given: ``args`` and
``payload`` are views into it.

Order of the checks: the lengths as soon as the header has arrived, the
header's checksum as soon as the arguments have (before a payload is waited
for), the payload's checksum and the padding last. Nothing is allocated for the
length in a header before that many bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

from isal.isal_zlib import crc32

from rgpu.session.calls.codec import MAX_ARGS
from rgpu.session.errors import Corrupt

__all__ = ["AWAITED", "EXTERNAL", "HEADER", "HEADER_SIZE", "MAGIC", "MAX_ARGS", "MAX_PAYLOAD", "Record",
           "RecordReader", "pack", "pack_record", "padded", "record_size"]

MAGIC = 0x4C434752  #: "RGCL"
EXTERNAL = 1  #: flag: shared memory only, the payload is elsewhere
AWAITED = 2  #: flag: the program waits for the answer
MAX_PAYLOAD = 1 << 34  #: bytes
#: magic, call id, flags, seq, thread, args_len, payload_len, payload_crc, crc
HEADER = Struct("<IHHQIIQII")
HEADER_SIZE = HEADER.size
_COVERED = 36  #: bytes of the header under its own checksum
_PREFIX = Struct("<IHHQIIQI")
_CRC = Struct("<I")
_ZEROS = bytes(8)


def padded(size: int) -> int:
    """Round ``size`` up to a multiple of 8."""
    return (size + 7) & ~7


class Record:
    """One wire call. ``args`` and ``payload`` are bytes-like and may be views into a network buffer."""

    __slots__ = ("args", "call_id", "flags", "payload", "seq", "thread")

    def __init__(self, seq: int, call_id: int, args: Any, payload: Any = b"", thread: int = 0, flags: int = 0) -> None:
        self.seq = seq
        self.call_id = call_id
        self.args = args
        self.payload = payload
        self.thread = thread
        self.flags = flags

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (self.seq, self.call_id, self.thread, self.flags) == (
            other.seq, other.call_id, other.thread, other.flags
        ) and self.args == other.args and self.payload == other.payload

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (f"Record(seq={self.seq}, call_id={self.call_id}, thread={self.thread}, flags={self.flags}, "
                f"args={len(self.args)} bytes, payload={len(self.payload)} bytes)")


def pack(seq: int, call_id: int, args: Any, payload: Any = b"", thread: int = 0, flags: int = 0) -> bytes:
    """Return the wire bytes of a record. Raises ValueError for values that readers refuse."""
    if flags & ~AWAITED or not 0 < seq < 1 << 64 or len(args) > MAX_ARGS or len(payload) > MAX_PAYLOAD:
        raise ValueError(f"no such record: seq {seq}, flags {flags}, {len(args)} + {len(payload)} bytes")
    prefix = _PREFIX.pack(MAGIC, call_id, flags, seq, thread, len(args), len(payload), crc32(payload))
    return b"".join((prefix, _CRC.pack(crc32(args, crc32(prefix))), args, _ZEROS[:-len(args) % 8],
                     payload, _ZEROS[:-len(payload) % 8]))


def pack_record(record: Record) -> bytes:
    """Return :func:`pack` of a record's fields."""
    return pack(record.seq, record.call_id, record.args, record.payload, record.thread, record.flags)


def record_size(record: Record) -> int:
    """Return the size of the record on the wire, bytes."""
    return HEADER_SIZE + padded(len(record.args)) + padded(len(record.payload))


class RecordReader:
    """Parser that turns pieces of a record stream into records.

    ``offset``: stream offset of the next record, for error messages; give the
    constructor's ``offset`` when the stream begins elsewhere. With
    ``next_seq`` the numbers must follow on without a gap.

    A reader that raised :class:`Corrupt` returns no further records.
    """

    def __init__(self, offset: int = 0, next_seq: int | None = None) -> None:
        self.offset = offset
        self.next_seq = next_seq
        self._pieces: list[bytes] = []
        self._held = 0  #: bytes in _pieces
        self._need = 0  #: bytes that must be held before parsing can go on
        self._error: Corrupt | None = None
        self._whole: tuple[int, int] | None = None  #: payload's length and checksum, when only the payload is missing

    @property
    def pending(self) -> int:
        """Bytes held of a record that has not arrived whole."""
        return self._held

    def feed(self, data: Any) -> Iterator[Record]:
        """Return the records that ``data`` completes; take them all before the next call.

        ``data`` must not change while records from it are in use. The iterator
        raises :class:`Corrupt` with offset and reason.
        """
        if self._error is not None:
            raise self._error
        if self._whole is not None and len(data) == self._whole[0]:
            return self._with_payload(data)
        self._whole = None
        if self._held:
            self._pieces.append(bytes(data))
            self._held += len(data)
            if self._held < self._need:
                return iter(())
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._held = 0
        return self._records(memoryview(data).cast("B") if not isinstance(data, memoryview) else data)

    def finish(self) -> None:
        """Note the end of the stream. Raises :class:`Corrupt` if it ended inside a record."""
        if self._error is not None:
            raise self._error
        if self._held:
            raise self._corrupt(f"the stream ends {self._held} bytes into a record", "truncated")

    def _records(self, view: memoryview) -> Iterator[Record]:
        at, size = 0, len(view)
        unpack = HEADER.unpack_from
        while True:
            left = size - at
            if left < HEADER_SIZE:
                return self._hold(view, at, HEADER_SIZE)
            magic, call_id, flags, seq, thread, args_len, payload_len, payload_crc, crc = unpack(view, at)
            if magic != MAGIC or flags & ~AWAITED or args_len > MAX_ARGS or payload_len > MAX_PAYLOAD or not seq:
                raise self._bad_header(magic, flags, args_len, payload_len)
            args_at = at + HEADER_SIZE
            args_end = args_at + args_len
            if args_end > size:
                return self._hold(view, at, HEADER_SIZE + args_len)
            args = view[args_at:args_end]
            if crc32(args, crc32(view[at:at + _COVERED])) != crc:
                raise self._corrupt("checksum of header and arguments", "checksum")
            if seq != self.next_seq:
                self._check_sequence(seq)
            payload_at = (args_end + 7) & ~7
            payload_end = payload_at + payload_len
            end = (payload_end + 7) & ~7
            if end > size:
                if payload_at == size and payload_end == end and not any(view[args_end:payload_at]):
                    self._whole = payload_len, payload_crc
                return self._hold(view, at, end - at)
            payload: Any = b""
            if payload_len:
                payload = view[payload_at:payload_end]
                if crc32(payload) != payload_crc:
                    raise self._corrupt(f"checksum of a payload of {payload_len} bytes", "payload checksum")
            elif payload_crc:
                raise self._corrupt("a checksum without a payload", "payload checksum")
            if (args_end != payload_at and any(view[args_end:payload_at])) or \
                    (payload_end != end and any(view[payload_end:end])):
                raise self._corrupt("padding that is not zero", "padding")
            self.offset += end - at
            if self.next_seq is not None:
                self.next_seq += 1
            at = end
            yield Record(seq, call_id, args, payload, thread, flags)

    def _with_payload(self, data: Any) -> Iterator[Record]:
        """Complete the held record with ``data``, which is exactly its payload and is not copied."""
        assert self._whole is not None
        length, payload_crc = self._whole
        head = b"".join(self._pieces)
        self._pieces.clear()
        self._held, self._whole = 0, None
        _, call_id, flags, seq, thread, args_len, _, _, _ = HEADER.unpack_from(head)
        if crc32(data) != payload_crc:
            raise self._corrupt(f"checksum of a payload of {length} bytes", "payload checksum")
        self.offset += len(head) + length
        if self.next_seq is not None:
            self.next_seq += 1
        yield Record(seq, call_id, head[HEADER_SIZE:HEADER_SIZE + args_len], data, thread, flags)

    def _hold(self, view: memoryview, at: int, need: int) -> None:
        rest = bytes(view[at:])
        if rest:
            self._pieces.append(rest)
            self._held = len(rest)
        self._need = need

    def _check_sequence(self, seq: int) -> None:
        if self.next_seq is not None:
            raise self._corrupt(f"position {seq}, where {self.next_seq} should be", "sequence", seq=seq)

    def _bad_header(self, magic: int, flags: int, args_len: int, payload_len: int) -> Corrupt:
        if magic != MAGIC:
            return self._corrupt(f"no record: magic {magic:#010x}", "magic")
        if flags & ~AWAITED:
            return self._corrupt(f"flags {flags:#x}", "flags")
        if args_len > MAX_ARGS:
            return self._corrupt(f"arguments of {args_len} bytes", "length")
        if payload_len > MAX_PAYLOAD:
            return self._corrupt(f"a payload of {payload_len} bytes", "length")
        return self._corrupt("journal position 0", "sequence")

    def _corrupt(self, what: str, reason: str, **detail: Any) -> Corrupt:
        self._error = Corrupt(f"record at offset {self.offset}: {what}", offset=self.offset, reason=reason, **detail)
        return self._error
