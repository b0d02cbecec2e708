"""Finds the PTX in what a program loads: PTX text, fat binary, object or archive.

Layout of a fat binary (little-endian; known from public descriptions of the
format, e.g. ZLUDA's and n-eiling/cuda-fatbin-decompression's):

    header   0 u32 magic 0xBA55ED50 · 4 u16 version 1 · 6 u16 header size (16)
             8 u64 size of the entries that follow
    entry    0 u16 kind (1 PTX, 2 ELF) · 4 u32 header size (≥ 64)
             8 u64 payload size, padded · 16 u32 compressed size, 0 when not compressed
             28 u32 target (75 for sm_75) · 40 u64 flags · 56 u64 size after decompression
    flags    0x2000 LZ4 block · 0x8000 zstd frame

The bytes are the program's: every size is checked before it is used, and
a decompressed size is bounded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import lz4.block
import zstandard

from rgpu.session.errors import DeviceError

MAGIC = 0xBA55ED50
_MAGIC_BYTES = struct.pack("<I", MAGIC)
KIND_PTX, KIND_ELF = 1, 2
FLAG_LZ4, FLAG_ZSTD = 0x2000, 0x8000
MAX_PTX = 256 * 1024 * 1024  #: bytes of one PTX text

INVALID_IMAGE, NO_BINARY_FOR_GPU = 200, 209


@dataclass(frozen=True, slots=True)
class Entry:
    """One variant of the code. ``payload``: as stored, still compressed."""

    kind: int
    target: int  #: 75 for sm_75
    flags: int
    payload: bytes
    decompressed: int  #: bytes, 0 when not compressed


def _bad(offset: int, reason: str) -> DeviceError:
    return DeviceError(f"fat binary, offset {offset}: {reason}", INVALID_IMAGE, offset=offset, reason=reason)


def entries(binary: bytes, start: int = 0) -> list[Entry]:
    """Return the entries of the fat binary at ``start``. Raises DeviceError(200) where it is malformed."""
    if len(binary) - start < 16:
        raise _bad(start, "cut short in the header")
    magic, version, header_size, size = struct.unpack_from("<IHHQ", binary, start)
    if magic != MAGIC:
        raise _bad(start, f"magic {magic:#x}")
    if version != 1 or header_size < 16:
        raise _bad(start + 4, f"version {version}, header size {header_size}")
    at, end = start + header_size, start + header_size + size
    if end > len(binary):
        raise _bad(start + 8, f"announces {size} bytes of entries, {len(binary) - at} are there")
    found = []
    while at < end:
        entry, at = _entry(binary, at, end)
        found.append(entry)
    return found


def _entry(binary: bytes, at: int, end: int) -> tuple[Entry, int]:
    if end - at < 64:
        raise _bad(at, "cut short in an entry's header")
    kind, _, header_size, padded, compressed, _, _, _, target = struct.unpack_from("<HHIQIIHHI", binary, at)
    flags, _, decompressed = struct.unpack_from("<QQQ", binary, at + 40)
    if header_size < 64 or header_size > end - at:
        raise _bad(at + 4, f"entry header size {header_size}")
    if padded > end - at - header_size:
        raise _bad(at + 8, f"payload of {padded} bytes in {end - at - header_size}")
    is_compressed = bool(flags & (FLAG_LZ4 | FLAG_ZSTD))
    length = compressed if is_compressed and compressed else padded
    if length > padded:
        raise _bad(at + 16, f"compressed size {length} is more than the payload's {padded}")
    payload = binary[at + header_size:at + header_size + length]
    return Entry(kind, target, flags, payload, decompressed if is_compressed else 0), at + header_size + padded


def decompress(entry: Entry) -> bytes:
    """Return the entry's text or ELF. Raises DeviceError(200) if it does not decompress."""
    if not entry.flags & (FLAG_LZ4 | FLAG_ZSTD):
        return entry.payload
    if not 0 < entry.decompressed <= MAX_PTX:
        raise _bad(0, f"decompressed size {entry.decompressed} is not in 1…{MAX_PTX}")
    try:
        if entry.flags & FLAG_ZSTD:
            return _zstd(entry)
        return bytes(lz4.block.decompress(entry.payload, uncompressed_size=entry.decompressed))
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError) as error:
        raise _bad(0, f"payload does not decompress: {error}") from error


def _zstd(entry: Entry) -> bytes:
    """Unpack the payload's first frame in one call.

    A frame's own header may announce any size, and as much would be allocated: it is compared with the entry's size,
    which is bounded, before. Raises ValueError where it is more.
    """
    announced = zstandard.frame_content_size(entry.payload)  # -1: the frame has no size; then the entry's is the bound
    if announced > entry.decompressed:
        raise ValueError(f"more than the announced {entry.decompressed} bytes")
    return zstandard.ZstdDecompressor().decompress(entry.payload, max_output_size=entry.decompressed)


def select_ptx(binary: bytes, max_target: int, start: int = 0) -> bytes:
    """Return the PTX for the highest target that is not above ``max_target``. Raises DeviceError(209)."""
    found = entries(binary, start)
    usable = [entry for entry in found if entry.kind == KIND_PTX and entry.target <= max_target]
    if usable:
        return decompress(max(usable, key=lambda entry: entry.target))
    ptx = sorted({entry.target for entry in found if entry.kind == KIND_PTX})
    cubins = sorted({entry.target for entry in found if entry.kind == KIND_ELF})
    raise DeviceError(
        f"the fat binary holds no PTX that sm_{max_target} can run (PTX for {_names(ptx)}; machine code for "
        f"{_names(cubins)}); compile with PTX for compute_{max_target}", NO_BINARY_FOR_GPU)


def _names(targets: list[int]) -> str:
    return ", ".join(f"sm_{target}" for target in targets) or "none"


def extract_ptx(binary: bytes, max_target: int) -> str:
    """Return the PTX text of anything that a program may load.

    Raises DeviceError: 209 where there is machine code only, 200 for bytes that are no module binary at all, 218 for
    text outside PTX's character set.
    """
    if binary[:4] == _MAGIC_BYTES:
        binary = select_ptx(binary, max_target)
    elif binary[:4] == b"\x7fELF":
        embedded = find_embedded(binary)
        if embedded is None:
            raise DeviceError(f"the module binary is machine code (a cubin): the cpu device needs PTX; compile for "
                              f"compute_{max_target}, or ask the compiler for PTX", NO_BINARY_FOR_GPU)
        binary = select_ptx(binary, max_target, embedded)
    text = binary.split(b"\0", 1)[0]
    if b".version" not in text[:65536]:
        raise DeviceError("the module binary is neither PTX nor a fat binary", INVALID_IMAGE)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DeviceError(f"PTX text, offset {error.start}: not UTF-8", 218) from error


def find_embedded(data: bytes, start: int = 0) -> int | None:
    """Return the offset of the next well-formed fat binary inside an object or an archive; None: there is none."""
    at = data.find(_MAGIC_BYTES, start)
    while at >= 0:
        try:
            entries(data, at)
            return at
        except DeviceError:
            at = data.find(_MAGIC_BYTES, at + 4)
    return None


def embedded_ptx(data: bytes, max_target: int) -> list[str]:
    """Return the PTX of every fat binary in an object or archive, in order; one without PTX raises DeviceError(209)."""
    texts = []
    at = find_embedded(data)
    while at is not None:
        texts.append(extract_ptx(data[at:], max_target))
        size = struct.unpack_from("<Q", data, at + 8)[0]
        at = find_embedded(data, at + 16 + size)
    return texts
