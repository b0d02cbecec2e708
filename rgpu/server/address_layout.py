"""Switch address randomisation off, so that module variables have the same addresses in every worker (SEMANTICS 12)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ADDR_NO_RANDOMIZE = 0x0040000  #: of personality(2)
_ASK = 0xFFFFFFFF


@contextmanager
def fixed_in_children() -> Iterator[None]:
    """Have processes that this thread starts inside the block begin without randomisation.

    A persona belongs to a thread and passes to what it forks (personality(2)): the child has it from its first
    mapping on, and need not start itself again. Where the system forbids it nothing is changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    persona = libc.personality(_ASK)
    if persona == -1 or persona & ADDR_NO_RANDOMIZE:
        yield
        return
    libc.personality(persona | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.personality(persona)


def ensure_fixed(module: str, arguments: Sequence[str]) -> bool:
    """Return True in a process without randomisation; with it, execute ``module`` anew without and do not return.

    False: the system forbids it. ``arguments``: command line of the new process image.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    persona = libc.personality(_ASK)
    if persona & ADDR_NO_RANDOMIZE:
        return True
    if libc.personality(persona | ADDR_NO_RANDOMIZE) == -1 or not libc.personality(_ASK) & ADDR_NO_RANDOMIZE:
        return False
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
