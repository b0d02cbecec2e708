"""Constants, key and result of the page hash (:mod:`.pagehash`), shared by its NumPy and compiled versions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from rgpu.session.addresses import PAGE

PRIME = (1 << 61) - 1
COLUMNS = 32
ROW_WORDS = 4  #: words of a column in a row
ROWS = PAGE // (4 * COLUMNS * ROW_WORDS)
HASH_BYTES = 16  #: bytes of a page's packed hash
LANES = 4
KEY_WORDS = ROWS * ROW_WORDS + 2 * (LANES - 1)
COEFFICIENTS = COLUMNS * LANES * 2 + 1
KEY_BYTES = 32
_CONTEXT = "rgpu 2026 page hash v2: NH key words and level 2 multipliers"


class PageHashes(NamedTuple):
    """Result of hashing a run of pages."""

    hashes: np.ndarray[Any, Any]  #: (pages, 2) uint64
    zero: np.ndarray[Any, Any]  #: bool: the page is all zeros


@dataclass(frozen=True)
class HashKey:
    """The expanded key: ``words`` uint32[518], ``multipliers`` uint64[2, 257]."""

    words: np.ndarray[Any, Any]
    multipliers: np.ndarray[Any, Any]


@lru_cache(maxsize=8)
def expand_key(key: bytes) -> HashKey:
    """Expand 32 secret bytes to a key. The multipliers are drawn by rejection, so they are uniform in [0, p).

    Raises ValueError for another length.
    """
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
