"""The keyed page hash: distinguishes changed from unchanged pages (never names content).

Definition (NumPy here, compiled for the host in :mod:`rgpu.checkpoint.native.pagehash_native`, CUDA in
``rgpu/server/device/cuda/kernels/pagehash.cu``; all three agree)
---------------------------------------------------------------------------------
A page is up to 65,536 bytes; a shorter one (the tail of a module variable) is
padded with zeros to 65,536 and its true length L enters the hash. It is read
as little-endian 32-bit words, in 128 rows of 32 columns of 4 words: column l
holds the words x[4r+w] = word 128r + 4l + w of the page (r < 128, w < 4). So a
warp of 32 GPU threads takes a page: each reads 16 bytes a row, side by side,
and keeps a column of 2 KiB to itself, with no sums across threads in level 1.

*Level 1*, for each column l and lane t = 0…3, with key words k (518 of 32 bit,
the same for every column)::

    N[l][t] = Σ_{i=0…255} ((x[2i] + k[2i+2t]) mod 2³²) · ((x[2i+1] + k[2i+1+2t]) mod 2³²)   mod 2⁶⁴

This is NH with a Toeplitz key (Black, Halevi, Krawczyk, Krovetz, Rogaway:
UMAC, CRYPTO '99). The key of 2,072 bytes is in shared memory; all threads of a
warp read the same words of it.

*Level 2*, modulo the prime p = 2⁶¹ − 1, with c = the 32-bit halves of N in the
order column, lane, low half, high half (256 coefficients) followed by L, and two
independent keys of 257 numbers uniform in [0, p)::

    H[j] = Σ_{i=0…256} c[i] · q[j][i]   mod p          j = 0, 1

The hash is (H[0], H[1]): two 64-bit words with 61 used bits each.

Collision bound
---------------
Let two different pages be fixed before the key is drawn.

* Same L: they differ in some column. UMAC's theorem for the Toeplitz form (its
  4.3: NHᵀ with words of w bits and t lanes is 2^(−wt)-almost-universal on
  strings of equal length) says that all four lanes agree there with probability
  ≤ 2^(−32·4) = 2⁻¹²⁸. That other columns use the same key words changes nothing:
  the pages collide in level 1 only if this column does.
* Otherwise, or if L differs, the coefficient vectors differ in some place by
  d ≠ 0 mod p (|d| < 2³² < p). For each j, exactly one value of that place's key
  makes the sums equal: probability 1/p (Carter, Wegman: Universal classes of
  hash functions, 1979), independently for the two j, and of the level 1 key:
  p⁻² < 2⁻¹²¹·⁹.

Together ≤ 2⁻¹²⁸ + p⁻² < 2⁻¹²¹, below the required 2⁻¹⁰⁰, plus the advantage of
distinguishing the key expansion (BLAKE3 in XOF mode) from random. The program never
sees keys or hashes, so its pages do not depend on the key.

Cost on a GPU, for the 512 bytes that a warp reads in a row: 16 additions, 8
multiply-adds 32 × 32 + 64, 2 logical operations (is the page all zeros?), one
load of the data and one of the key: 28 instructions. At the memory rate of an
H200 (4.8 TB/s, 20 bytes a clock and multiprocessor) a row may take 25 clocks;
the additions take 8 of one pipe, the multiply-adds 4 to 8 of another, the loads
8 of the third. (Blocks of 4 KiB of neighbouring words would need sums across
threads for each block, and for each row a separate key for each thread.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rgpu.checkpoint.native import pagehash_native
from rgpu.checkpoint.pages.hash_key import (
    COEFFICIENTS,
    COLUMNS,
    HASH_BYTES,
    KEY_BYTES,
    LANES,
    PRIME,
    ROW_WORDS,
    ROWS,
    HashKey,
    PageHashes,
    expand_key,
)
from rgpu.session.addresses import PAGE

__all__ = ["HASH_BYTES", "KEY_BYTES", "PAGE", "HashKey", "PageHashes", "Ranges", "differ", "examine_pages",
           "expand_key", "hash_page", "hash_pages", "hash_pages_numpy", "pack", "page_count", "unpack", "zero_hash"]

#: (address, bytes) …, or an array of such rows (n, 2), which is cheaper for many
Ranges = Sequence[tuple[int, int]] | np.ndarray[Any, Any]


def page_count(size: int) -> int:
    """Return the number of pages of ``size`` bytes."""
    return -(-size // PAGE)


def hash_pages(data: Any, key: bytes) -> np.ndarray[Any, Any]:
    """Return (pages, 2) uint64: the page hashes of a bytes-like object; the last page may be short."""
    return examine_pages(data, key).hashes


def examine_pages(data: Any, key: bytes) -> PageHashes:
    """Hash as :func:`hash_pages` does; also return for each page whether it is all zeros (bool)."""
    flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    return pagehash_native.examine_pages(np.ascontiguousarray(flat), expand_key(key))


def hash_page(data: Any, key: bytes) -> tuple[int, int]:
    """Hash one page of at most 64 KiB. Raises ValueError for more."""
    if len(data) > PAGE:
        raise ValueError(f"{len(data)} bytes are more than a page")
    low, high = hash_pages(data, key)[0] if len(data) else hash_pages_numpy(b"\0", key, length=0)[0]
    return int(low), int(high)


@lru_cache(maxsize=64)
def zero_hash(key: bytes, length: int = PAGE) -> tuple[int, int]:
    """Return the hash of a page of ``length`` zero bytes."""
    return hash_page(bytes(length), key)


def hash_pages_numpy(data: Any, key: bytes, length: int | None = None) -> np.ndarray[Any, Any]:
    """Hash by the definition, in NumPy: slower than :func:`hash_pages`, for checking it."""
    expanded = expand_key(key)
    flat = np.frombuffer(data, np.uint8)
    pages = page_count(len(flat))
    padded = np.zeros(pages * PAGE, np.uint8)
    padded[:len(flat)] = flat
    words = padded.view("<u4").reshape(pages, ROWS, COLUMNS, ROW_WORDS)
    coefficients = np.empty((pages, COEFFICIENTS), np.uint64)
    halves = np.empty((pages, COLUMNS, LANES, 2), np.uint64)
    for lane in range(LANES):
        shifted = expanded.words[2 * lane:2 * lane + ROWS * ROW_WORDS].reshape(ROWS, 1, ROW_WORDS)
        pairs = (words + shifted).reshape(pages, ROWS, COLUMNS, ROW_WORDS // 2, 2).astype(np.uint64)
        total = (pairs[..., 0] * pairs[..., 1]).sum(axis=(1, 3), dtype=np.uint64)
        halves[:, :, lane, 0] = total & np.uint64(0xFFFFFFFF)
        halves[:, :, lane, 1] = total >> np.uint64(32)
    coefficients[:, :-1] = halves.reshape(pages, COEFFICIENTS - 1)
    coefficients[:, -1] = PAGE
    if pages:
        coefficients[-1, -1] = (len(flat) - 1) % PAGE + 1 if length is None else length
    # Python integers: 257 products of 32 and 61 bits do not fit in 64.
    exact = coefficients.astype(object) @ expanded.multipliers.astype(object).T
    return np.array(exact % PRIME, dtype=np.uint64).reshape(pages, 2)


def pack(hashes: np.ndarray[Any, Any]) -> bytes:
    """Return 16 bytes for each page, little-endian, as checkpoints and messages carry them."""
    return hashes.astype("<u8", copy=False).tobytes()


def unpack(data: bytes) -> np.ndarray[Any, Any]:
    """Invert :func:`pack`; the result is read-only. Raises ValueError for a length that is not whole hashes."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole page hashes")
    return np.frombuffer(data, "<u8").reshape(-1, 2).astype(np.uint64, copy=False)


def differ(some: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return for each row of two (pages, 2) arrays whether they differ. (``any(axis=1)`` takes ten times as long.)"""
    return (some[:, 0] != others[:, 0]) | (some[:, 1] != others[:, 1])
