"""The bodies of PAGES messages: a table, then the stored bytes of all its pages in one run. Pure.

======  ====  =======================================================
offset  size  field (little-endian)
======  ====  =======================================================
0       4     u32 n: pages, 1 to 4096
4       33 n  u64 address, u32 size, u32 stored, u8 codec, 16 B hash
4+33n         the stored bytes, in the order of the table
======  ====  =======================================================

Codec 0 raw (stored = size), 1 lz4 block, 2 zero page (stored = 0). The hash is
the session's keyed page hash of the page's ``size`` bytes, whatever the codec.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lz4.block
import numpy as np

from rgpu.checkpoint import pagehash
from rgpu.checkpoint.device import PAGE
from rgpu.session.errors import Corrupt

RAW, LZ4, ZERO = 0, 1, 2
MOST_PAGES = 4096
ENTRY = np.dtype([("address", "<u8"), ("size", "<u4"), ("stored", "<u4"), ("codec", "u1"), ("hash", "<u8", 2)])
_COUNT = struct.Struct("<I")


def table(addresses: Any, hashes: Any, *, size: Any = PAGE, stored: Any = PAGE, codec: Any = RAW) -> np.ndarray:
    """Entries for pages; ``hashes`` is (n, 2). The other fields: one value for all, or one for each."""
    entries = np.empty(len(addresses), ENTRY)
    entries["address"], entries["hash"] = addresses, hashes
    entries["size"], entries["stored"], entries["codec"] = size, stored, codec
    return entries


def head(entries: np.ndarray) -> bytes:
    """Everything in front of the stored bytes."""
    return _COUNT.pack(len(entries)) + entries.tobytes()


def parse(body: Any) -> tuple[np.ndarray, memoryview]:
    """(table, stored bytes) of a body that may hold anything. Raises :class:`Corrupt`."""
    view = memoryview(body)
    count = _COUNT.unpack_from(view)[0] if len(view) >= _COUNT.size else 0
    start = _COUNT.size + count * ENTRY.itemsize
    if not 1 <= count <= MOST_PAGES or start > len(view):
        raise Corrupt(f"a message of {len(view)} bytes does not hold a table of {count} pages", offset=0,
                      reason="truncated")
    entries = np.frombuffer(view, ENTRY, count, _COUNT.size)
    size, stored, codec = (entries[name].astype(np.int64) for name in ("size", "stored", "codec"))
    bad = (size < 1) | (size > PAGE) | (stored > PAGE) | (entries["address"] > np.uint64(2**64 - 1 - PAGE))
    bad |= (codec > ZERO) | ((codec == RAW) & (stored != size)) | ((codec == ZERO) & (stored != 0))
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        row = entries[index]
        raise Corrupt(f"page {index} of a message, at {int(row['address']):#x}, has the impossible size "
                      f"{row['size']}, {row['stored']} stored bytes and codec {row['codec']}",
                      offset=_COUNT.size + index * ENTRY.itemsize, address=int(row["address"]), reason="size")
    if int(stored.sum()) != len(view) - start:
        raise Corrupt(f"{len(view) - start} bytes follow a table that names {int(stored.sum())}", offset=start,
                      reason="length")
    return entries, view[start:]


@dataclass(frozen=True, slots=True)
class Run:
    """Verified pages with neighbouring addresses; all but the last are whole. ``data`` None: zeros."""

    address: int
    size: int
    data: Any


def verified(entries: np.ndarray, data: memoryview, key: bytes) -> Iterator[Run]:
    """Each page once, unpacked, its hash compared. Raises :class:`Corrupt`, naming page and address."""
    if len(key) != pagehash.KEY_BYTES:
        raise Corrupt("pages came before the key of their hashes", reason="order")
    offsets = np.concatenate(([0], np.cumsum(entries["stored"].astype(np.int64))))
    at = 0
    for end in _ends(entries):
        part = entries[at:end]
        first, size = int(part["address"][0]), int(part["size"].astype(np.int64).sum())
        stored = data[int(offsets[at]):int(offsets[end])]
        if part["codec"][0] == ZERO:
            unpacked: Any = None
            tail = pagehash.zero_hash(key, int(part["size"][-1]))
            hashes = np.full((len(part), 2), pagehash.zero_hash(key), np.uint64)
            hashes[-1] = tail
        else:
            unpacked = stored if part["codec"][0] == RAW else unpack(stored, size, LZ4, first)
            hashes = pagehash.hash_pages(unpacked, key)
        wrong = np.flatnonzero((hashes != part["hash"]).any(axis=1))
        if len(wrong):
            index = at + int(wrong[0])
            address = int(entries["address"][index])
            raise Corrupt(f"page {index} of a message, at {address:#x}, does not have the hash it was sent with",
                          offset=int(offsets[index]), address=address, reason="page hash")
        yield Run(first, size, unpacked)
        at = end


def _ends(entries: np.ndarray) -> Sequence[int]:
    """Where runs end: of one codec, whole pages side by side; a compressed page is a run of its own."""
    follows = np.zeros(len(entries), np.bool_)
    before, after = entries[:-1], entries[1:]
    follows[:-1] = ((before["address"] + np.uint64(PAGE) == after["address"]) & (before["size"] == PAGE)
                    & (before["codec"] == after["codec"]) & (after["codec"] != LZ4))
    ends: list[int] = (np.flatnonzero(~follows) + 1).tolist()
    return ends


def unpack(stored: Any, size: int, codec: int, address: int = 0) -> bytes:
    """One page from its stored form. Raises :class:`Corrupt`."""
    if codec == ZERO:
        return bytes(size)
    if codec == RAW and len(stored) == size:
        return bytes(stored)
    if codec == LZ4:
        try:
            data: bytes = lz4.block.decompress(bytes(stored), uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise Corrupt(f"the page at {address:#x} does not decompress: {error}", address=address,
                          reason="lz4") from error
        if len(data) == size:
            return data
    raise Corrupt(f"the page at {address:#x}, of {size} bytes, has codec {codec} and {len(stored)} stored bytes",
                  address=address, reason="codec")
