"""Digests of the leaves of long answers, by threads of compiled code (``summing.hpp``), else by the interpreter."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from rgpu.client.exchange import library
from rgpu.session import answers
from rgpu.session.answers import DIGEST_SIZE, LEAF

MOST_THREADS = 8  #: one sums some 10 GB/s from memory
_PROCESSORS = len(os.sched_getaffinity(0))
_THREADS = min(MOST_THREADS, _PROCESSORS // 2) if _PROCESSORS >= 4 else 1
ALONE = 4 * LEAF  #: bytes that one thread sums: waking others takes as long


def of_leaves(data: Any) -> bytes:
    """Return the digests of the leaves of :data:`LEAF` bytes that ``data`` consists of, one behind the other."""
    native, count = library.native(), len(data) // LEAF
    if native is None or not count:
        return answers.of_leaves(data)
    found = ctypes.create_string_buffer(count * DIGEST_SIZE)
    native.rgx_sum_leaves(library.address(data), LEAF, count, found, _THREADS if len(data) > ALONE else 1)
    return found.raw
