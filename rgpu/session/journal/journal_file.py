"""The journal file: a session's calls on disk (docs/developers/journal.md).

A header, then records as they stand on the wire, then a trailer if the file
was closed. A file that a crash cut short has a torn tail: part of a record, or
zeros; readers tolerate and report that. Anything else that does not verify is
:class:`~rgpu.session.errors.Corrupt` with the offset in the file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, BinaryIO

from isal.isal_zlib import crc32

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.journal.record import Record, RecordReader, pack_record, padded

MAGIC = b"RGPUJNL1"
END_MAGIC = b"RGPUJEND"
VERSION = 1
MAX_NAME = 255  #: bytes of a session name
READ_SIZE = 1 << 20
#: magic, version, header size, first seq, name length, zero, crc
_HEADER = Struct("<8sIIQHHI")
#: magic, records, last seq, bytes of records, crc of the records, crc of the trailer before it
_TRAILER = Struct("<8sQQQII")
_CRC = Struct("<I")


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Contents of the header. ``size``: bytes of the header itself."""

    session: str
    first_seq: int
    size: int


@dataclass(slots=True)
class JournalReport:
    """Result of :func:`verify` for a sound file; a torn tail is sound."""

    path: str
    session: str
    first_seq: int
    last_seq: int  #: first_seq − 1 when there is no record
    records: int = 0
    record_bytes: int = 0
    payload_bytes: int = 0
    complete: bool = False  #: closed with a trailer
    torn_offset: int | None = None  #: where the torn tail begins
    torn_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)  #: wire call → records

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def encode_header(session: str, first_seq: int) -> bytes:
    """Encode a header. Raises ValueError for an impossible name or position."""
    name = session.encode()
    if not 0 < len(name) <= MAX_NAME or not 0 < first_seq < 1 << 63:
        raise ValueError(f"no journal begins with session {session!r}, position {first_seq}")
    size = padded(_HEADER.size + len(name))
    prefix = _HEADER.pack(MAGIC, VERSION, size, first_seq, len(name), 0, 0)[:-4]
    tail = name + bytes(size - _HEADER.size - len(name))
    return prefix + _CRC.pack(crc32(tail, crc32(prefix))) + tail


def decode_header(data: bytes) -> JournalHeader:
    """Decode a header from the first bytes of a file. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    if len(data) < _HEADER.size:
        raise Corrupt(f"a journal of {len(data)} bytes has no header", offset=0, reason="truncated")
    magic, version, size, first_seq, name_length, zero, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt("this is no journal file", offset=0, reason="magic")
    if version != VERSION:
        raise VersionMismatch(f"the journal has format version {version}; this program reads {VERSION}",
                              version=version)
    if not 0 < name_length <= MAX_NAME or size != padded(_HEADER.size + name_length) or zero:
        raise Corrupt("the journal's header has impossible lengths", offset=8, reason="length")
    if len(data) < size:
        raise Corrupt(f"a journal of {len(data)} bytes ends inside its header", offset=len(data), reason="truncated")
    tail = data[_HEADER.size:size]
    if crc32(tail, crc32(data[:_HEADER.size - 4])) != crc or not 0 < first_seq < 1 << 63:
        raise Corrupt("the journal's header does not verify", offset=0, reason="checksum")
    try:
        session = tail[:name_length].decode()
    except UnicodeDecodeError:
        raise Corrupt("the session's name is not UTF-8", offset=_HEADER.size, reason="name") from None
    return JournalHeader(session, first_seq, size)


class JournalFileWriter:
    """Writer of a journal file; also a context manager.

    Closing writes the trailer; a process that is killed leaves a torn tail at most.
    """

    def __init__(self, path: str | os.PathLike[str], session: str, first_seq: int = 1) -> None:
        """Create ``path`` (mode 0600). Raises FileExistsError, OSError, ValueError."""
        header = encode_header(session, first_seq)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(header)
        self.next_seq = first_seq
        self.records = 0
        self.bytes = 0  #: bytes of records
        self._crc = 0

    def append(self, record: Record) -> None:
        """Append one record. Raises ValueError if it does not follow the last one, OSError."""
        self.append_packed((pack_record(record),), record.seq, 1)

    def append_packed(self, pieces: Any, first_seq: int, count: int) -> None:
        """Append ``count`` whole records in their wire form, in pieces cut anywhere, the first being ``first_seq``.

        The bytes are not checked. Raises ValueError for a gap, OSError.
        """
        if first_seq != self.next_seq:
            raise ValueError(f"position {first_seq} does not follow {self.next_seq - 1}")
        for piece in pieces:
            self._file.write(piece)
            self._crc = crc32(piece, self._crc)
            self.bytes += len(piece)
        self.next_seq += count
        self.records += count

    def flush(self, durable: bool = False) -> None:
        """Hand everything to the kernel; ``durable``: to the disk."""
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self, durable: bool = False) -> None:
        """Write the trailer and close, once; ``durable``: flush all of it to the disk before. Raises OSError."""
        if self._file.closed:
            return
        prefix = _TRAILER.pack(END_MAGIC, self.records, self.next_seq - 1, self.bytes, self._crc, 0)[:-4]
        self._file.write(prefix + _CRC.pack(crc32(prefix)))
        if durable:
            self.flush(durable=True)
        self._file.close()

    def abandon(self) -> None:
        """Close without a trailer, as a crash would."""
        self._file.close()

    def __enter__(self) -> JournalFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class JournalFileReader:
    """Iterator over the records of a journal file, once; also a context manager.

    Arguments and payloads are views into the piece read; copy what is kept.
    After the last record ``complete``, ``torn_offset`` and ``torn_bytes`` describe
    how the file ends. Raises :class:`Corrupt` with the offset in the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.header = decode_header(self._file.read(padded(_HEADER.size + MAX_NAME)))
            self._file.seek(self.header.size)
        except BaseException:
            self._file.close()
            raise
        self.records = 0
        self.complete = False
        self.torn_offset: int | None = None
        self.torn_bytes = 0
        self._crc = 0

    @property
    def last_seq(self) -> int:
        """Newest position read so far."""
        return self.header.first_seq + self.records - 1

    def __iter__(self) -> Iterator[Record]:
        trailer_at = self._trailer_at()
        end = self.size if trailer_at is None else trailer_at
        reader = RecordReader(offset=self.header.size, next_seq=self.header.first_seq)
        at = self.header.size
        self._file.seek(at)
        while at < end:
            piece = self._file.read(min(READ_SIZE, end - at))
            if not piece:
                break  # the file became shorter while it was read: torn
            at += len(piece)
            self._crc = crc32(piece, self._crc)
            try:
                for record in reader.feed(piece):
                    self.records += 1
                    yield record
            except Corrupt:
                if trailer_at is None and self._zeros_from(reader.offset):
                    self.torn_offset, self.torn_bytes = reader.offset, self.size - reader.offset
                    return
                raise
        if trailer_at is not None:
            reader.finish()
            self._check_trailer(trailer_at)
        elif reader.pending:
            self.torn_offset, self.torn_bytes = reader.offset, reader.pending

    def _trailer_at(self) -> int | None:
        """Return the offset of the trailer, if the last bytes are one; else None."""
        at = self.size - _TRAILER.size
        if at < self.header.size:
            return None
        self._file.seek(at)
        data = self._file.read(_TRAILER.size)
        return at if data[:8] == END_MAGIC and crc32(data[:-4]) == _CRC.unpack(data[-4:])[0] else None

    def _check_trailer(self, at: int) -> None:
        self._file.seek(at)
        _, records, last_seq, size, crc, _ = _TRAILER.unpack(self._file.read(_TRAILER.size))
        if (records, last_seq, size, crc) != (self.records, self.last_seq, at - self.header.size, self._crc):
            raise Corrupt(f"the journal's trailer records {records} calls up to {last_seq}, {size} bytes; "
                          f"here are {self.records} up to {self.last_seq}, {at - self.header.size} bytes",
                          offset=at, reason="trailer")
        self.complete = True

    def _zeros_from(self, offset: int) -> bool:
        """Whether only zeros follow ``offset``, as in blocks that a crash left allocated but unwritten."""
        self._file.seek(offset)
        while piece := self._file.read(READ_SIZE):
            if piece.count(0) != len(piece):
                return False
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> JournalFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verify(path: str | os.PathLike[str]) -> JournalReport:
    """Check every record of a journal file: sums, sequence, arguments.

    Raises :class:`Corrupt` with offset and reason, :class:`VersionMismatch`,
    OSError. A torn tail is reported, not refused.
    """
    calls: Counter[str] = Counter()
    with JournalFileReader(path) as reader:
        report = JournalReport(str(path), reader.header.session, reader.header.first_seq, reader.header.first_seq - 1)
        for record in reader:
            decoders.decode(record.call_id, record.args)
            call = BY_ID[record.call_id]
            if len(record.payload) and not call.payload:
                raise Corrupt(f"position {record.seq}: {call.name} carries no payload", seq=record.seq,
                              reason="payload")
            calls[call.name] += 1
            report.payload_bytes += len(record.payload)
        report.records, report.last_seq = reader.records, reader.last_seq
        report.complete, report.torn_offset, report.torn_bytes = reader.complete, reader.torn_offset, reader.torn_bytes
        end = reader.size - (_TRAILER.size if reader.complete else reader.torn_bytes)
        report.record_bytes = end - reader.header.size
    report.calls = dict(sorted(calls.items()))
    return report
