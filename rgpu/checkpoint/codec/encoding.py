"""Encoding of whole pages of a frame into chunks, in place. Pure but for the rows that it is given.

A row holds a page behind space for its header (:mod:`.frames`). Encoded, the
rows are chunks one behind the other from the first row's start on: a page that
is stored raw only gets its header, and is moved only when a page before it
became smaller.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.codec.chunk import CHUNK_HEADER
from rgpu.checkpoint.manifest.reuse import Array
from rgpu.checkpoint.native import blake3_native, crc32_native, pagehash_native
from rgpu.checkpoint.pages import pagehash

_ONE_IN = 7  #: one of so many pages is sampled to see whether compressing pays; odd, as data often has even periods


class PageChanged(Exception):
    """A row does not hold what was hashed. ``row``: the first such row."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded rows. ``names``: (n, 32) uint8; ``lengths``: (n,) int64, bytes of each chunk with its header."""

    names: Array
    lengths: Array


def prepare() -> None:
    """Compile the code that names and checks pages: a third of a second, once in a process."""
    for module in (blake3_native, crc32_native, pagehash_native):
        module.prepare()


def encode(rows: Array, hashes: Array, hash_key: bytes, key: bytes) -> Encoded:
    """Check (n, pitch) ``rows`` against (n, 2) ``hashes``, name them by ``key``, and make them chunks.

    Raises :class:`PageChanged`; then the rows are unchanged.
    """
    start, pitch, count = rows.ctypes.data + CHUNK_HEADER, rows.strides[0], len(rows)
    found = pagehash_native.hash_rows(start, pitch, count, pagehash.expand_key(hash_key))
    bad = np.flatnonzero(pagehash.differ(found, hashes))
    if len(bad):
        raise PageChanged(int(bad[0]))
    names = blake3_native.name_pages(start, pitch, count, key)
    rows[:, :CHUNK_HEADER] = chunk.raw_headers(names, crc32_native.crc_pages(start, pitch, count))
    lengths = np.full(count, pitch, np.int64)
    smaller = {}
    for index in compressible(rows):
        data = chunk.encode(rows[index, CHUNK_HEADER:].tobytes(), names[index].tobytes())
        if len(data) < pitch:
            smaller[index] = data
            lengths[index] = len(data)
    if smaller:
        _close_up(rows, smaller)
    return Encoded(names, lengths)


def compressible(rows: Array) -> list[int]:
    """List the rows to compress. Of many rows, a few are sampled first: if none of these pays, the list is empty."""
    def pays(index: int) -> bool:
        return chunk.worth_compressing(rows[index, CHUNK_HEADER:])

    if len(rows) > _ONE_IN and not any(pays(index) for index in range(0, len(rows), _ONE_IN)):
        return []
    return [index for index in range(len(rows)) if pays(index)]


def _close_up(rows: Array, smaller: dict[int, bytes]) -> None:
    """Close the gaps between the chunks: put them one behind the other."""
    base, pitch = rows.ctypes.data, rows.strides[0]
    at, row = 0, 0
    for index in [*sorted(smaller), len(rows)]:
        if (size := (index - row) * pitch) and at != row * pitch:
            ctypes.memmove(base + at, base + row * pitch, size)
        at += size
        if index < len(rows):
            ctypes.memmove(base + at, smaller[index], len(smaller[index]))
            at += len(smaller[index])
        row = index + 1
