"""Chunks and packs: how page bytes lie in files. Pure format, no I/O. Offsets: docs/developers/image-format.md.

A chunk is a page (1 to 65,536 bytes) behind a 64-byte header, named by the
keyed BLAKE3 of its *raw* bytes. A pack is a 32-byte header, chunks, and a
64-byte end with its length and its keyed hash (packs of version 1 have no end).
All-zero pages have no chunk. Every byte is covered: headers and stored bytes by
CRCs (LZ4 has several encodings of one content), the contents by the name,
padding by being zero, the whole pack by the hash at its end.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import lz4.block
import numpy as np
from blake3 import blake3
from isal.isal_zlib import crc32

from rgpu.session.addresses import PAGE
from rgpu.session.errors import Corrupt, VersionMismatch

VERSION = 1
RAW, LZ4 = 0, 1
NAME_SIZE = 32

PACK_MAGIC = b"RGPUPACK"
PACK_VERSION = 2
_PACK = struct.Struct("<8sII12sI")  # magic, version, zero, first 12 bytes of the pack's name, crc
PACK_HEADER = _PACK.size

END_MAGIC = b"RGPUPEND"
_END = struct.Struct("<8sIIQ32sII")  # magic, version, chunks, bytes before, keyed BLAKE3 of them, zero, crc
PACK_END = _END.size

CHUNK_MAGIC = 0x4B434752  # "RGCK"
_CHUNK = struct.Struct("<IHHII32sI8sI")  # magic, version, codec, raw, stored, name, crc of stored bytes, zeros, crc
CHUNK_HEADER = _CHUNK.size

_SAMPLE = 4096
#: Compression is tried when a sample shrinks to less than this share, and kept when the whole page does.
_PAYS = 0.90

assert PACK_HEADER == 32 and CHUNK_HEADER == 64 and PACK_END == 64


def chunk_name(raw: Any, key: bytes) -> bytes:
    """Return the 32-byte name of a chunk's content: its BLAKE3 under ``key``."""
    return blake3(raw, key=key).digest()


def padded(length: int) -> int:
    """Round a length in bytes up to a multiple of 8."""
    return length + -length % 8


def worth_compressing(raw: Any) -> bool:
    """Whether LZ4 pays on a sample: three pieces of the page, so that one untypical part does not decide."""
    view = memoryview(raw)
    if len(view) <= _SAMPLE:
        sample = bytes(view)
    else:
        third = _SAMPLE // 3
        middle = len(view) // 2
        sample = b"".join((view[:third], view[middle:middle + third], view[-third:]))
    return len(lz4.block.compress(sample, store_size=False)) < _PAYS * len(sample)


def encode(raw: bytes, name: bytes) -> bytes:
    """Return header, stored bytes and padding of one chunk. ``raw``: 1 to 65,536 bytes. Raises ValueError."""
    if not 0 < len(raw) <= PAGE:
        raise ValueError(f"a chunk holds 1 to {PAGE} bytes, not {len(raw)}")
    codec, stored = RAW, raw
    if worth_compressing(raw):
        packed = lz4.block.compress(raw, store_size=False)
        if len(packed) < _PAYS * len(raw):
            codec, stored = LZ4, packed
    header = _CHUNK.pack(CHUNK_MAGIC, VERSION, codec, len(raw), len(stored), name, crc32(stored), bytes(8), 0)
    crc = crc32(header[:-4])
    return b"".join((header[:-4], struct.pack("<I", crc), stored, bytes(-len(stored) % 8)))


def raw_headers(names: np.ndarray[Any, Any], crcs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return (n, 64) uint8: the headers of whole pages stored raw. ``names``: (n, 32); ``crcs``: (n,), of the pages."""
    headers = np.zeros((len(names), CHUNK_HEADER), np.uint8)
    headers[:, :16] = raw_start()
    headers[:, 16:48] = names
    headers[:, 48:52] = crcs.astype("<u4").reshape(-1, 1).view(np.uint8)
    data = headers.tobytes()
    ends = [crc32(data[at:at + 60]) for at in range(0, len(data), CHUNK_HEADER)]
    headers[:, 60:] = np.array(ends, "<u4").reshape(-1, 1).view(np.uint8)
    return headers


@lru_cache(maxsize=1)
def raw_start() -> np.ndarray[Any, Any]:
    """Return the first 16 bytes of the header of a page stored raw: the fields before the name."""
    start = _CHUNK.pack(CHUNK_MAGIC, VERSION, RAW, PAGE, PAGE, bytes(NAME_SIZE), 0, bytes(8), 0)[:16]
    return np.frombuffer(start, np.uint8)


def read_header(header: bytes, offset: int) -> tuple[int, int, int, bytes, int]:
    """Return (codec, raw length, stored length, name, CRC of the stored bytes). Raises Corrupt, VersionMismatch."""

    def bad(at: int, reason: str) -> Corrupt:
        return Corrupt(f"chunk at offset {offset + at}: {reason}", offset=offset + at, reason=reason)

    if len(header) != CHUNK_HEADER:
        raise bad(0, "cut short")
    magic, version, codec, raw, stored, name, stored_crc, zeros, crc = _CHUNK.unpack(header)
    if magic != CHUNK_MAGIC:
        raise bad(0, f"magic {magic:#x}")
    if crc32(header[:-4]) != crc:
        raise bad(60, "header checksum")
    if version != VERSION:
        raise VersionMismatch(f"chunk at offset {offset}: version {version}, this reader supports {VERSION}",
                              offset=offset, found=version, known=VERSION)
    if codec not in (RAW, LZ4) or zeros != bytes(8):
        raise bad(6, f"codec {codec}")
    if not 0 < raw <= PAGE or not 0 < stored <= raw or (codec == RAW and stored != raw):
        raise bad(8, f"lengths {raw} and {stored}")
    return codec, raw, stored, name, stored_crc


def decode(data: Any, key: bytes, offset: int) -> tuple[bytes, bytes]:
    """Return (name, raw bytes) of a whole chunk with its padding. Raises :class:`Corrupt`."""
    view = memoryview(data)
    codec, raw_length, stored_length, name, stored_crc = read_header(bytes(view[:CHUNK_HEADER]), offset)
    at = offset + CHUNK_HEADER
    if len(view) != CHUNK_HEADER + padded(stored_length):
        raise Corrupt(f"chunk at offset {offset}: {len(view)} bytes", offset=offset, reason="chunk length")
    stored = view[CHUNK_HEADER:CHUNK_HEADER + stored_length]
    if crc32(stored) != stored_crc:
        raise Corrupt(f"chunk at offset {offset}: its stored bytes are damaged", offset=at, reason="checksum")
    if any(view[CHUNK_HEADER + stored_length:]):
        raise Corrupt(f"chunk at offset {offset}: padding is not zero", offset=at + stored_length, reason="padding")
    if codec == LZ4:
        try:
            raw = lz4.block.decompress(stored, uncompressed_size=raw_length)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise Corrupt(f"chunk at offset {offset}: {error}", offset=at, reason="lz4") from error
    else:
        raw = bytes(stored)
    if len(raw) != raw_length or chunk_name(raw, key) != name:
        raise Corrupt(f"chunk at offset {offset}: its content does not have its name", offset=at, reason="content")
    return name, raw


def unpack_page(data: memoryview, name: bytes) -> bytes:
    """Return the page of a compressed chunk of this name, its content not checked; empty if the chunk is damaged.

    :func:`decode` raises the reason. One short call here replaces six there, each of which releases the GIL.
    """
    magic, version, codec, raw, stored, named, _, _, _ = _CHUNK.unpack_from(data)
    if (magic, version, codec, raw, named) != (CHUNK_MAGIC, VERSION, LZ4, PAGE, name) or \
            CHUNK_HEADER + padded(stored) != len(data):
        return b""
    try:
        page: bytes = lz4.block.decompress(data[CHUNK_HEADER:CHUNK_HEADER + stored], uncompressed_size=PAGE)
    except (lz4.block.LZ4BlockError, ValueError):
        return b""
    return page if len(page) == PAGE else b""


def pack_header(pack_name: str) -> bytes:
    """Return the first 32 bytes of the pack ``pack_name`` (at least 24 hexadecimal digits)."""
    body = _PACK.pack(PACK_MAGIC, PACK_VERSION, 0, bytes.fromhex(pack_name)[:12], 0)[:-4]
    return body + struct.pack("<I", crc32(body))


def check_pack_header(header: bytes, pack_name: str) -> int:
    """Check a pack's header; return the pack's version, 1 or 2. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    if len(header) != PACK_HEADER:
        raise Corrupt(f"pack {pack_name}: cut short in its header", offset=len(header), reason="cut short")
    magic, version, zero, name, crc = _PACK.unpack(header)
    if magic != PACK_MAGIC or crc32(header[:-4]) != crc:
        raise Corrupt(f"pack {pack_name}: header checksum or magic", offset=0, reason="pack header")
    if not 1 <= version <= PACK_VERSION:
        raise VersionMismatch(f"pack {pack_name}: version {version}, this reader supports {PACK_VERSION}",
                              found=version, known=PACK_VERSION)
    if zero or name != bytes.fromhex(pack_name)[:12]:
        raise Corrupt(f"pack {pack_name}: holds the header of another pack", offset=16, reason="pack name")
    return int(version)


def pack_end(chunks: int, before: int, digest: bytes) -> bytes:
    """Return the last 64 bytes of a pack. ``before``: the number of bytes before them; ``digest``: keyed BLAKE3 of
    those.
    """
    body = _END.pack(END_MAGIC, PACK_VERSION, chunks, before, digest, 0, 0)[:-4]
    return body + struct.pack("<I", crc32(body))


def check_pack_end(end: bytes, before: int, digest: bytes, pack_name: str) -> int:
    """Check a pack's end; return how many chunks the pack holds. Raises :class:`Corrupt`."""

    def bad(reason: str) -> Corrupt:
        return Corrupt(f"pack {pack_name}: its end: {reason}", offset=before, reason=reason)

    if len(end) != PACK_END:
        raise bad("cut short")
    magic, version, chunks, length, stored, zero, crc = _END.unpack(end)
    if magic != END_MAGIC or version != PACK_VERSION or zero or crc32(end[:-4]) != crc:
        raise bad("magic or checksum")
    if length != before:
        raise bad(f"length {length}, {before} wanted")
    if stored != digest:
        raise bad("the pack does not have its hash")
    return int(chunks)
