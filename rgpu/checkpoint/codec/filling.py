"""Reading of chunks from packs into the rows of a frame, checked against their names: by threads or processes.

Chunks that lie one behind the other in a pack are one read; raw chunks are read
into their rows, compressed ones into a buffer. Chunks are named while they are
still in a processor's cache. A chunk that is not as expected is left to the
caller, which examines it alone and reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.codec.frames import PITCH
from rgpu.checkpoint.manifest.reuse import Array
from rgpu.checkpoint.native import blake3_native

#: A row's chunk: number of the pack, length, offset in the pack, name. Also its form on a socket (:mod:`.encoder`).
WANTED = np.dtype([("pack", "<u4"), ("length", "<u4"), ("offset", "<u8"), ("name", "u1", (chunk.NAME_SIZE,))])
ROWS = 64  #: rows that are read and then named: 4 MiB

#: (pack, offset, buffers): fill the buffers one after the other from that offset on.
Read = Callable[[int, int, list[memoryview]], object]


def fill(rows: Array, wanted: Array, key: bytes | None, read: Read) -> Array:
    """Fill rows with pages; return (n,) bool: which of (n,) ``wanted`` are in (n, PITCH) ``rows`` as raw chunks now.
    The contents of the other rows are undefined.

    ``key`` None: names are not compared, and compressed chunks are left out. Raises what ``read`` raises.
    """
    right = np.zeros(len(wanted), bool)
    for start in range(0, len(wanted), ROWS):
        some = slice(start, min(start + ROWS, len(wanted)))
        right[some] = _fill(rows[some], wanted[some], key, read)
    return right


def _fill(rows: Array, wanted: Array, key: bytes | None, read: Read) -> Array:
    lengths, offsets = wanted["length"], wanted["offset"]
    raw = lengths == PITCH
    apart = (np.diff(wanted["pack"]) != 0) | (offsets[1:] - offsets[:-1] != lengths[:-1])
    if key is None:
        apart |= raw[1:] != raw[:-1]
    starts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(wanted)]
    for first, last in zip(starts, starts[1:], strict=False):
        if raw[first] or key is not None:
            _read_run(rows[first:last], wanted[first:last], read)
    right: Array = (rows[:, :16] == chunk.raw_start()).all(axis=1) & (rows[:, 16:48] == wanted["name"]).all(axis=1)
    if key is None:
        return right & raw
    names = blake3_native.name_pages(rows.ctypes.data + chunk.CHUNK_HEADER, rows.strides[0], len(rows), key)
    return right & (names == wanted["name"]).all(axis=1)


def _read_run(rows: Array, wanted: Array, read: Read) -> None:
    """Read chunks that lie one behind the other; a compressed one that is a page gets the header of a raw chunk."""
    lengths, into, beside = wanted["length"], [], []
    edges = [0, *(np.flatnonzero(np.diff(lengths == PITCH)) + 1).tolist(), len(wanted)]
    for first, last in zip(edges, edges[1:], strict=False):
        if lengths[first] == PITCH:
            into.append(rows[first:last].reshape(-1).data)
        else:
            into.append(memoryview(bytearray(int(lengths[first:last].sum()))))
            beside.append((first, last, into[-1]))
    read(int(wanted["pack"][0]), int(wanted["offset"][0]), into)
    for first, last, packed in beside:
        at = 0
        for index in range(first, last):
            row, name, length = rows[index], wanted["name"][index], int(lengths[index])
            data = chunk.unpack_page(packed[at:at + length], name.tobytes())
            row[:16] = chunk.raw_start() if data else 0
            row[16:48] = name
            if data:
                row[chunk.CHUNK_HEADER:] = np.frombuffer(data, np.uint8)
            at += length
