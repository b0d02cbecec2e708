"""The bodies of PAGES messages: a table, then the stored bytes of all its pages in one run. Pure.

The layout is in docs/protocols/pages.md (PAGES). The hash is the session's keyed page hash of the page's ``size``
bytes, whatever the codec; stored = size for RAW, 0 for ZERO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lz4.block
import numpy as np

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.pages import pagehash
from rgpu.link.messages.pages import LZ4, PAGE_COUNT_LAYOUT, PAGE_ENTRY_LAYOUT, RAW, ZERO
from rgpu.session.errors import Corrupt

MOST_PAGES = 4096


def table(addresses: Any, hashes: Any, *, size: Any = PAGE, stored: Any = PAGE, codec: Any = RAW) -> np.ndarray:
    """Return table entries for pages; ``hashes`` is (n, 2). The other fields: one value for all, or one for each."""
    entries = np.empty(len(addresses), PAGE_ENTRY_LAYOUT)
    entries["address"], entries["hash"] = addresses, hashes
    entries["size"], entries["stored"], entries["codec"] = size, stored, codec
    return entries


def head(entries: np.ndarray) -> bytes:
    """Return the part of a body in front of the stored bytes."""
    return PAGE_COUNT_LAYOUT.pack(len(entries)) + entries.tobytes()


def parse(body: Any) -> tuple[np.ndarray, memoryview]:
    """Return (table, stored bytes) of an untrusted body. Raises :class:`Corrupt`."""
    view = memoryview(body)
    count = PAGE_COUNT_LAYOUT.unpack_from(view)[0] if len(view) >= PAGE_COUNT_LAYOUT.size else 0
    start = PAGE_COUNT_LAYOUT.size + count * PAGE_ENTRY_LAYOUT.itemsize
    if not 1 <= count <= MOST_PAGES or start > len(view):
        raise Corrupt(f"a message of {len(view)} bytes does not hold a table of {count} pages", offset=0,
                      reason="truncated")
    entries = np.frombuffer(view, PAGE_ENTRY_LAYOUT, count, PAGE_COUNT_LAYOUT.size)
    size, stored, codec = (entries[name].astype(np.int64) for name in ("size", "stored", "codec"))
    bad = (size < 1) | (size > PAGE) | (stored > PAGE) | (entries["address"] > np.uint64(2**64 - 1 - PAGE))
    bad |= (codec > ZERO) | ((codec == RAW) & (stored != size)) | ((codec == ZERO) & (stored != 0))
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        row = entries[index]
        raise Corrupt(f"page {index} of a message, at {int(row['address']):#x}, has the impossible size "
                      f"{row['size']}, {row['stored']} stored bytes and codec {row['codec']}",
                      offset=PAGE_COUNT_LAYOUT.size + index * PAGE_ENTRY_LAYOUT.itemsize, address=int(row["address"]),
                      reason="size")
    if int(stored.sum()) != len(view) - start:
        raise Corrupt(f"{len(view) - start} bytes follow a table that names {int(stored.sum())}", offset=start,
                      reason="length")
    return entries, view[start:]


@dataclass(frozen=True, slots=True)
class Run:
    """Verified pages with contiguous addresses; all but the last are whole. ``data`` None: zeros."""

    address: int
    size: int
    data: Any


def verified(entries: np.ndarray, data: memoryview, key: bytes) -> Iterator[Run]:
    """Yield each page once, unpacked, its hash compared. Raises :class:`Corrupt`, naming page and address."""
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
    """Return where runs end: whole contiguous pages of one codec; a compressed page is a run of its own."""
    follows = np.zeros(len(entries), np.bool_)
    before, after = entries[:-1], entries[1:]
    follows[:-1] = ((before["address"] + np.uint64(PAGE) == after["address"]) & (before["size"] == PAGE)
                    & (before["codec"] == after["codec"]) & (after["codec"] != LZ4))
    ends: list[int] = (np.flatnonzero(~follows) + 1).tolist()
    return ends


def unpack(stored: Any, size: int, codec: int, address: int = 0) -> bytes:
    """Unpack one page from its stored form. Raises :class:`Corrupt`."""
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
