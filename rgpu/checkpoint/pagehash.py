"""The keyed page hash: tells a changed page from an unchanged one (never names content).

Definition (a CUDA kernel computes the same)
--------------------------------------------
A page is up to 65,536 bytes; a shorter one (the tail of a module variable) is
padded with zeros to 65,536 and its true length L enters the hash. It is read
as little-endian 32-bit words, in 16 blocks of 1,024 words.

*Level 1*, for each block b and lane t = 0…3, with key words k (1,030 of 32 bit)::

    N[b][t] = Σ_{i=0…511} ((m[2i] + k[2i+2t]) mod 2³²) · ((m[2i+1] + k[2i+1+2t]) mod 2³²)   mod 2⁶⁴

This is NH with a Toeplitz key (Black, Halevi, Krawczyk, Krovetz, Rogaway:
UMAC, CRYPTO '99). The key of 4,120 bytes fits in shared memory.

*Level 2*, modulo the prime p = 2⁶¹ − 1, with c = the 32-bit halves of N in the
order block, lane, low half, high half (128 coefficients) followed by L, and two
independent keys of 129 numbers uniform in [0, p)::

    H[j] = Σ_{i=0…128} c[i] · q[j][i]   mod p          j = 0, 1

The hash is (H[0], H[1]): two 64-bit words with 61 used bits each.

Collision bound
---------------
Let two different pages be fixed before the key is drawn.

* Same L: they differ in some block. UMAC's theorem for the Toeplitz form says
  that all four lanes of NH agree there with probability ≤ 2^(−32·4) = 2⁻¹²⁸.
* Otherwise, or if L differs, the coefficient vectors differ in some place by
  d ≠ 0 mod p (|d| < 2³² < p). For each j, exactly one value of that place's key
  makes the sums equal: probability 1/p, independently: p⁻² < 2⁻¹²¹·⁹.

Together ≤ 2⁻¹²⁸ + p⁻² < 2⁻¹²¹, below the 2⁻¹⁰⁰ asked for, plus the advantage of
telling the key expansion (BLAKE3 in XOF mode) from random. The program never
sees keys or hashes, so its pages do not depend on the key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3

from rgpu.session.addresses import PAGE

PRIME = (1 << 61) - 1
BLOCK_WORDS = 1024
BLOCKS = PAGE // (4 * BLOCK_WORDS)
LANES = 4
KEY_WORDS = BLOCK_WORDS + 2 * (LANES - 1)
COEFFICIENTS = BLOCKS * LANES * 2 + 1
KEY_BYTES = 32
_CONTEXT = "rgpu 2026 page hash v1: NH key words and level 2 multipliers"


@dataclass(frozen=True)
class HashKey:
    """The expanded key: ``words`` uint32[1030], ``multipliers`` uint64[2, 129]."""

    words: np.ndarray[Any, Any]
    multipliers: np.ndarray[Any, Any]


@lru_cache(maxsize=8)
def expand_key(key: bytes) -> HashKey:
    """From 32 secret bytes. The multipliers are drawn by rejection, so they are uniform in [0, p)."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a page hash key has {KEY_BYTES} bytes, not {len(key)}")
    wanted = 2 * COEFFICIENTS
    # A few draws more than needed: each is rejected with probability 2⁻⁶¹.
    stream = blake3(key, derive_key_context=_CONTEXT).digest(length=4 * KEY_WORDS + 8 * (wanted + 16))
    words = np.frombuffer(stream, "<u4", KEY_WORDS)
    drawn = np.frombuffer(stream, "<u8", wanted + 16, 4 * KEY_WORDS) & np.uint64(PRIME)
    multipliers = drawn[drawn != PRIME][:wanted].reshape(2, COEFFICIENTS)
    for array in (words, multipliers):
        array.flags.writeable = False
    return HashKey(words, multipliers)


def page_count(size: int) -> int:
    """Pages that ``size`` bytes take."""
    return -(-size // PAGE)


def hash_pages(data: Any, key: bytes) -> np.ndarray[Any, Any]:
    """(pages, 2) uint64 of a bytes-like object; the last page may be short."""
    from rgpu.checkpoint import pagehash_native  # it takes a moment to compile: only where hashing is done

    flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    return pagehash_native.hash_pages(flat, expand_key(key))


def hash_page(data: Any, key: bytes) -> tuple[int, int]:
    """One page of at most 64 KiB."""
    if len(data) > PAGE:
        raise ValueError(f"{len(data)} bytes are more than a page")
    low, high = hash_pages(data, key)[0] if len(data) else hash_pages_numpy(b"\0", key, length=0)[0]
    return int(low), int(high)


@lru_cache(maxsize=64)
def zero_hash(key: bytes, length: int = PAGE) -> tuple[int, int]:
    """The hash of a page of ``length`` zero bytes."""
    return hash_page(bytes(length), key)


def hash_pages_numpy(data: Any, key: bytes, length: int | None = None) -> np.ndarray[Any, Any]:
    """The definition in NumPy: slower than :func:`hash_pages`, and the check on it."""
    expanded = expand_key(key)
    flat = np.frombuffer(data, np.uint8)
    pages = page_count(len(flat))
    padded = np.zeros(pages * PAGE, np.uint8)
    padded[:len(flat)] = flat
    words = padded.view("<u4").reshape(pages, BLOCKS, BLOCK_WORDS)
    coefficients = np.empty((pages, COEFFICIENTS), np.uint64)
    halves = np.empty((pages, BLOCKS, LANES, 2), np.uint64)
    for lane in range(LANES):
        sums = words + expanded.words[2 * lane:2 * lane + BLOCK_WORDS]
        pairs = sums.reshape(pages, BLOCKS, BLOCK_WORDS // 2, 2).astype(np.uint64)
        total = (pairs[..., 0] * pairs[..., 1]).sum(axis=2, dtype=np.uint64)
        halves[:, :, lane, 0] = total & np.uint64(0xFFFFFFFF)
        halves[:, :, lane, 1] = total >> np.uint64(32)
    coefficients[:, :-1] = halves.reshape(pages, COEFFICIENTS - 1)
    coefficients[:, -1] = PAGE
    if pages:
        coefficients[-1, -1] = (len(flat) - 1) % PAGE + 1 if length is None else length
    # Python integers: 129 products of 32 and 61 bits do not fit in 64.
    exact = coefficients.astype(object) @ expanded.multipliers.astype(object).T
    return np.array(exact % PRIME, dtype=np.uint64).reshape(pages, 2)


def pack(hashes: np.ndarray[Any, Any]) -> bytes:
    """16 bytes for each page, little-endian, as images and messages carry them."""
    return hashes.astype("<u8").tobytes()


def unpack(data: bytes) -> np.ndarray[Any, Any]:
    """The inverse of :func:`pack`. Raises ValueError for a length that is not whole hashes."""
    if len(data) % 16:
        raise ValueError(f"{len(data)} bytes are not whole page hashes")
    return np.frombuffer(data, "<u8").reshape(-1, 2).astype(np.uint64)


def pack_one(value: tuple[int, int]) -> bytes:
    return struct.pack("<QQ", *value)
