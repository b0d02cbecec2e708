"""The agent's end of the answer ring, written a second time from docs/developers/links/shim-link.md."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

ANSWER, WATERMARK, TEXT = 33, 34, 39


class FakeRing:
    """``page``: the agent's page, with ``capacity`` bytes of ring behind its 4 KiB."""

    def __init__(self, page: mmap.mmap, capacity: int, shim_page: int, doorbell: int) -> None:
        self.page, self.capacity, self.doorbell = page, capacity, doorbell
        self.shim = mmap.mmap(shim_page, 4096, prot=mmap.PROT_READ)
        os.close(shim_page)
        struct.pack_into("<QQ", page, 8, 4096, capacity)
        # Whole words: struct would write and read them byte by byte.
        self.words = memoryview(page).cast("Q")
        self.theirs = memoryview(self.shim)
        self.written = 0
        self.pieces = 0
        self.rung = 0  #: times that nobody attended
        self._lock = threading.Lock()  #: the agent's thread and the test's may both send

    def read_by_shim(self) -> int:
        return self.theirs.cast("Q")[64 // 8]

    def send(self, kind: int, body: bytes) -> None:
        """A message as it goes over the Unix socket; an answer is cut so that several pieces fit the ring."""
        if kind in (WATERMARK, TEXT):
            self.put(kind, body)
            return
        size = self.capacity // 3
        for at in range(0, len(body), size):
            self.put(kind, bytes([at + size < len(body)]) + body[at:at + size], at == 0)

    def put(self, kind: int, body: bytes, first: bool = True) -> None:
        with self._lock:
            self._put(kind, body, first)

    def _put(self, kind: int, body: bytes, first: bool) -> None:
        block = 16 + len(body) + 63 & ~63
        at = self.written % self.capacity
        skip = self.capacity - at if block > self.capacity - at else 0
        deadline = time.monotonic() + 10
        while self.written + skip + block - self.read_by_shim() > self.capacity:
            assert time.monotonic() < deadline, "the shim does not read its ring"
            self.ring_bell()
            time.sleep(0.0005)
        if skip:
            struct.pack_into("<IIII", self.page, 4096 + at, skip - 16, 0, 0, 0)
            at = 0
        struct.pack_into("<IIII", self.page, 4096 + at, len(body), kind, int(first), 0)
        self.page[4096 + at + 16:4096 + at + 16 + len(body)] = body
        self.pieces += 1
        self.publish(self.written + skip + block)

    def publish(self, written: int) -> None:
        self.written = written
        self.words[128 // 8] = written
        self.ring_bell()

    def ring_bell(self) -> None:
        if not self.theirs.cast("I")[128 // 4]:
            self.rung += 1
            os.eventfd_write(self.doorbell, 1)
