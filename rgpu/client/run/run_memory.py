"""Device memory that each process of a run uses of the quota: a page that they share, beside the agent's socket.

Each takes a slot, writes there the bytes that it uses of each device, and is refused memory that would make the sum of
all slots more than the quota (client/shim/memory/run_memory.cpp). Little-endian 64-bit words, eight to a slot; the
first slot is the header and begins with the magic. A slot: bytes used of each of seven devices, then the session's
number in the run; 0: free. The agent only makes the page, and frees the slots of processes that ended.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

MAGIC = b"RGPURUN1"
SLOTS, WORDS = 1024, 8
SIZE = SLOTS * WORDS * 8  #: bytes
NAME = "memory"


class RunMemory:
    """The agent's side of the page. ``directory``: of its socket. ``name``: ``memory.N`` for member N of a gang."""

    def __init__(self, directory: Path, name: str = NAME) -> None:
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # no page of it may be missing later
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._map[:len(MAGIC)] = MAGIC
        self._words = memoryview(self._map).cast("Q")

    def used(self, device: int) -> int:
        """Return the bytes of the session's ``device`` that all processes use, as they wrote them."""
        return sum(self._words[at + device] for at in range(WORDS, SLOTS * WORDS, WORDS) if self._words[at + WORDS - 1])

    def ended(self, number: int) -> None:
        """Free the slots of session ``number``, which ended: its memory is available to the others again."""
        for at in range(WORDS, SLOTS * WORDS, WORDS):
            if self._words[at + WORDS - 1] == number:
                for word in range(at, at + WORDS):
                    self._words[word] = 0
