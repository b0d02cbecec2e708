"""An image's manifest: format, limits, checks. Pure, no I/O. Offsets: docs/image.md.

The manifest says which session, what stands in each page of each region and
in which pack each chunk lies. It is written last, so an image exists exactly
when its manifest does.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from rgpu.checkpoint import chunk, pagehash
from rgpu.checkpoint.state import SessionState
from rgpu.session.addresses import PAGE
from rgpu.session.errors import Corrupt, VersionMismatch

MAGIC = b"RGPUIMG1"
VERSION = 1
MINIMUM_READER = 1
MAX_BODY = 1 << 30
ZERO_PAGE = 0xFFFFFFFF  #: in place of a chunk number

_HEADER = struct.Struct("<8sIIQ8s32s")  # magic, version, minimum reader, body length, key id, checksum
HEADER_SIZE = _HEADER.size
assert HEADER_SIZE == 64

#: Key of images whose store was given none: detects damage, does not authenticate.
DEFAULT_KEY = blake3(b"", derive_key_context="rgpu 2026 image v1: integrity without a secret").digest()


class Pack(msgspec.Struct, frozen=True):
    """A pack file: ``name`` (32 hexadecimal digits) and its whole length in bytes."""

    name: str
    size: int


class Chunks(msgspec.Struct, frozen=True):
    """Columns over all chunks of the image: 32-byte names, pack index (u32), offset in it (u64), length there (u32)."""

    names: bytes
    packs: bytes
    offsets: bytes
    lengths: bytes


class Body(msgspec.Struct, kw_only=True):
    """``pages``: for each region of ``state`` one u32 a page, a chunk number or ZERO_PAGE."""

    image: str
    created: float  #: Unix time, s
    state: SessionState
    pages: list[bytes]
    packs: list[Pack]
    chunks: Chunks
    statistics: dict[str, Any] = {}


class Table:
    """The body with its columns as arrays, checked: every index and offset in it is in range."""

    def __init__(self, body: Body) -> None:
        self.body = body
        columns = body.chunks
        self.count = len(columns.names) // chunk.NAME_SIZE
        self._names = columns.names
        self.packs = np.frombuffer(columns.packs, "<u4")
        self.offsets = np.frombuffer(columns.offsets, "<u8")
        self.lengths = np.frombuffer(columns.lengths, "<u4")
        self.pages = [np.frombuffer(column, "<u4") for column in body.pages]

    def name(self, number: int) -> bytes:
        return self._names[number * chunk.NAME_SIZE:(number + 1) * chunk.NAME_SIZE]


def key_id(key: bytes) -> bytes:
    """8 bytes that name a key without telling it."""
    return blake3(b"rgpu image key id", key=key).digest(length=8)


def encode(body: Body, key: bytes) -> bytes:
    """The manifest's bytes. Raises :class:`ValueError` above MAX_BODY."""
    data = msgspec.msgpack.encode(body)
    if len(data) > MAX_BODY:
        raise ValueError(f"a manifest of {len(data)} bytes; {MAX_BODY} are allowed")
    head = struct.pack("<8sIIQ8s", MAGIC, VERSION, MINIMUM_READER, len(data), key_id(key))
    return head + _checksum(head, data, key) + data


def _checksum(head: bytes, data: Any, key: bytes) -> bytes:
    return blake3(key=key).update(head).update(data).digest()


def body_length(header: bytes, name: str) -> int:
    """Check what stands before the body. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    if len(header) < HEADER_SIZE:
        raise Corrupt(f"image {name}: cut short in the manifest's header", offset=len(header), reason="cut short")
    magic, version, minimum, length, _, _ = _HEADER.unpack(header)
    if magic != MAGIC:
        raise Corrupt(f"image {name}: not a manifest", offset=0, reason="magic")
    if minimum > VERSION:
        raise VersionMismatch(f"image {name} is of version {version} and needs a reader of version {minimum}; this "
                              f"one knows {VERSION}", found=version, needed=minimum, known=VERSION)
    if length > MAX_BODY:
        raise Corrupt(f"image {name}: a body of {length} bytes; {MAX_BODY} are allowed", offset=16, reason="length")
    return int(length)


def decode(data: bytes, key: bytes, name: str) -> Table:
    """The checked manifest. Raises :class:`Corrupt` (offset, reason), :class:`VersionMismatch`."""
    length = body_length(data[:HEADER_SIZE], name)
    if len(data) != HEADER_SIZE + length:
        raise Corrupt(f"image {name}: the manifest has {len(data)} bytes, {HEADER_SIZE + length} wanted",
                      offset=min(len(data), HEADER_SIZE + length), reason="length")
    *_, stored_id, checksum = _HEADER.unpack(data[:HEADER_SIZE])
    if stored_id != key_id(key):
        raise Corrupt(f"image {name} was written under another key", offset=24, reason="key")
    body = memoryview(data)[HEADER_SIZE:]
    if _checksum(data[:32], body, key) != checksum:
        raise Corrupt(f"image {name}: the manifest's checksum does not verify", offset=32, reason="checksum")
    try:
        decoded = msgspec.msgpack.decode(body, type=Body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"image {name}: the manifest does not decode: {error}", offset=HEADER_SIZE,
                      reason="msgpack") from error
    return _checked(decoded, name)


def _checked(body: Body, name: str) -> Table:
    def bad(reason: str) -> Corrupt:
        return Corrupt(f"image {name}: {reason}", offset=HEADER_SIZE, reason=reason)

    body.state.check()
    columns = body.chunks
    count, odd = divmod(len(columns.names), chunk.NAME_SIZE)
    if odd or (len(columns.packs), len(columns.offsets), len(columns.lengths)) != (4 * count, 8 * count, 4 * count):
        raise bad("the chunk columns have different lengths")
    if any(len(pack.name) != 32 or not set(pack.name) <= set("0123456789abcdef") for pack in body.packs):
        raise bad("a pack's name is not 32 hexadecimal digits")
    if len(body.pages) != len(body.state.regions):
        raise bad("the page lists do not match the regions")
    for region, column in zip(body.state.regions, body.pages, strict=True):
        pages = pagehash.page_count(region.size)
        if len(column) != 4 * pages or len(region.hashes) != 16 * pages:
            raise bad(f"the page list of region {region.address:#x} has a wrong length")
    table = Table(body)
    _check_places(table, bad)
    return table


def _check_places(table: Table, bad: Any) -> None:
    if table.count:
        sizes = np.array([pack.size for pack in table.body.packs], np.uint64)
        if not len(sizes) or int(table.packs.max()) >= len(sizes):
            raise bad("a chunk in a pack that is not listed")
        limits = sizes[table.packs]
        lengths = table.lengths.astype(np.uint64)
        if (lengths < chunk.CHUNK_HEADER).any() or (lengths > chunk.CHUNK_HEADER + 2 * PAGE).any():
            raise bad("a chunk's length is out of range")
        if (table.offsets < chunk.PACK_HEADER).any() or (table.offsets > limits).any() \
                or (lengths > limits - table.offsets).any():
            raise bad("a chunk outside its pack")
    for column in table.pages:
        used = column[column != ZERO_PAGE]
        if len(used) and int(used.max()) >= table.count:
            raise bad("a page names a chunk that is not listed")
