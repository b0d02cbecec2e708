"""The format of the derived file: results made of module binaries, kept for reuse (docs/developers/modules.md).

A header, then entries to the end. Pure: bytes in, bytes out. What is read is untrusted; an entry that does not
verify counts as absent.

=======  ==========================================================================
offset   header, 32 bytes
=======  ==========================================================================
0        magic ``RGPUDRVD``
8        u16 version, 1
10       6 bytes 0
16       u64 generation: drawn anew when the file is written anew, so that offsets read before are not used
24       8 bytes 0
=======  ==========================================================================

=======  ==========================================================================
offset   entry, 80 bytes and the payload
=======  ==========================================================================
0        magic ``RGDE``
4        u16 version, 1
6        u16 kind: 1 machine code compiled from PTX, 2 description of a module
8        32 bytes key: BLAKE3 of all inputs of the payload
40       u64 length of the payload
48       32 bytes BLAKE3 of bytes 0 to 47 and the payload
=======  ==========================================================================

All numbers are little-endian. Where a key occurs twice the later entry counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from blake3 import blake3

from rgpu.session.errors import Corrupt

MAGIC, ENTRY_MAGIC, VERSION = b"RGPUDRVD", b"RGDE", 1
HEADER = Struct("<8sH6xQ8x")
_COVERED = Struct("<4sHH32sQ")
DIGEST = 32
ENTRY = _COVERED.size + DIGEST  #: bytes before the payload
COMPILED, DESCRIPTION = 1, 2
MAX_PAYLOAD = 256 << 20  #: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry's header. ``length``: of the payload, bytes."""

    kind: int
    key: bytes
    length: int
    covered: bytes
    digest: bytes

    def holds(self, payload: bytes) -> bool:
        """Whether ``payload`` is the one that was written."""
        return len(payload) == self.length and _digest(self.covered, payload) == self.digest


def pack_header(generation: int) -> bytes:
    """The file's header."""
    return HEADER.pack(MAGIC, VERSION, generation)


def read_generation(data: bytes) -> int:
    """The generation that a header names. Raises :class:`Corrupt` for bytes that are no header of this version."""
    if len(data) < HEADER.size:
        raise Corrupt(f"derived file: a header of {len(data)} bytes", offset=0, reason="header")
    magic, version, generation = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or data[:HEADER.size] != pack_header(generation):
        raise Corrupt(f"derived file: magic {magic!r}, version {version}", offset=0, reason="header")
    return int(generation)


def pack_entry(kind: int, key: bytes, payload: bytes) -> bytes:
    """An entry with its payload. Raises ValueError for a key of another length, or too long a payload."""
    if len(key) != DIGEST or len(payload) > MAX_PAYLOAD:
        raise ValueError(f"an entry with a key of {len(key)} and {len(payload)} bytes")
    covered = _COVERED.pack(ENTRY_MAGIC, VERSION, kind, key, len(payload))
    return b"".join((covered, _digest(covered, payload), payload))


def read_entry(data: bytes, offset: int = 0) -> Entry:
    """The entry header in ``data``; ``offset``: its place in the file, for the error. Raises :class:`Corrupt`."""
    if len(data) < ENTRY:
        raise Corrupt(f"derived file at offset {offset}: an entry is cut off", offset=offset, reason="cut off")
    magic, version, kind, key, length = _COVERED.unpack_from(data)
    if magic != ENTRY_MAGIC or version != VERSION or length > MAX_PAYLOAD:
        raise Corrupt(f"derived file at offset {offset}: magic {magic!r}, version {version}, {length} bytes",
                      offset=offset, reason="entry")
    return Entry(kind, key, length, data[:_COVERED.size], data[_COVERED.size:ENTRY])


def key(*parts: bytes) -> bytes:
    """The key of a payload that is made from ``parts``, in this order."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _digest(covered: bytes, payload: bytes) -> bytes:
    hasher = blake3(covered)
    hasher.update(payload)
    return hasher.digest()
