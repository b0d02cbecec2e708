"""The ring in shared memory by which answers and watermarks reach the program's threads.

The agent writes the ring (it lies behind the agent's page), the shim writes a
page of its own: how far it has read, and whether one of its threads attends to
the ring. So neither side can change what the other wrote. A message of the
worker is opened straight into the ring; the thread that waits copies it from
there into the program's buffer. docs/developers/links/shim-link.md, "The answer ring", gives
the layout, and the reason why no wake-up is lost.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from typing import Any

from rgpu.link.messages.shim import (
    AGENT_PAGE_HEADER_LAYOUT,
    AGENT_PAGE_MAGIC,
    AGENT_PAGE_SIZE,
    AGENT_SLEEPING_OFFSET,
    AGENT_WRITTEN_OFFSET,
    RING_ALIGNMENT,
    RING_HEADER_LAYOUT,
    RING_SKIP,
    SHIM_ATTENDING_OFFSET,
    SHIM_PAGE_SIZE,
    SHIM_READ_OFFSET,
    SHIM_STAMPED_OFFSET,
    SHIM_STAMPS,
    SHIM_STAMPS_OFFSET,
)
from rgpu.session.errors import Corrupt

CAPACITY = 16 * 1024 * 1024  #: bytes of messages; the longest frame fits several times
_HEADER_SIZE = RING_HEADER_LAYOUT.size
_WRITTEN = AGENT_WRITTEN_OFFSET // 8
_READ, _ATTENDING = SHIM_READ_OFFSET // 8, SHIM_ATTENDING_OFFSET // 4
_STAMPED, _STAMPS_AT = SHIM_STAMPED_OFFSET // 8, SHIM_STAMPS_OFFSET // 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
F_SEAL_FUTURE_WRITE = 0x0010


class AgentPage:
    """The memfd that the shim reads: whether the agent sleeps, and the answer ring behind it if there is one."""

    _SLEEPING = AGENT_SLEEPING_OFFSET // 4

    def __init__(self, ring: int = 0) -> None:
        """``ring``: capacity in bytes, a multiple of 64; 0: none."""
        self.size = AGENT_PAGE_SIZE + ring
        self.fd = os.memfd_create("rgpu-agent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, self.size)
        self._map = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE,
                              mmap.PROT_READ | mmap.PROT_WRITE)  # page faults now, not with each answer
        # From here on no process can make a writable mapping of it; this one's exists already.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | F_SEAL_FUTURE_WRITE)
        self.view = memoryview(self._map)
        self._sleeping = self.view.cast("I")
        self.words = self.view.cast("Q")
        AGENT_PAGE_HEADER_LAYOUT.pack_into(self._map, 0, AGENT_PAGE_MAGIC, AGENT_PAGE_SIZE, ring)

    def set_sleeping(self, value: bool) -> None:
        """Tell the shim whether the agent has to be woken."""
        self._sleeping[self._SLEEPING] = int(value)

    def close(self) -> None:
        """Unmap the page and close its memory."""
        for view in (self._sleeping, self.words, self.view):
            view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a view of a message is still held; the mapping is freed with it
        os.close(self.fd)


class AnswerRing:
    """The writing end of the ring. Used by one thread."""

    def __init__(self, page: AgentPage, shim_page: int, doorbell: int) -> None:
        """Take ownership of the shim's page and of the eventfd that wakes its reader. Raises :class:`Corrupt`."""
        self._page, self.doorbell = page, doorbell
        self.capacity = page.size - AGENT_PAGE_SIZE
        self._data = page.view[AGENT_PAGE_SIZE:]
        try:
            self._shim = _map_shim_page(shim_page)
        except BaseException:
            os.close(doorbell)
            raise
        finally:
            os.close(shim_page)
        self._words = memoryview(self._shim).cast("Q")
        self._attending = memoryview(self._shim).cast("I")
        self._written = self._read = 0
        self._silent = False  #: something is published that the shim's reader was not woken for
        self._at = 0  #: where the message under way begins
        self._stamps = 0  #: number of stamps that were read
        self._fence = threading.Lock()

    def room(self, length: int) -> memoryview | None:
        """Return the place for a worker's message (type and body, ``length`` bytes); None: the shim has to read first.

        The place stays the same, and unpublished, until :meth:`publish`.
        """
        at = self._place(length)
        return None if at is None else self._data[at + _HEADER_SIZE - 1:at + _HEADER_SIZE - 1 + length]

    def _place(self, length: int) -> int | None:
        block = _HEADER_SIZE - 1 + length + RING_ALIGNMENT - 1 & -RING_ALIGNMENT
        at = self._written % self.capacity
        skipped = self.capacity - at if block > self.capacity - at else 0
        if skipped + block > self.capacity - (self._written - self._read):
            self._look()
            if skipped + block > self.capacity - (self._written - self._read):
                return None
        self._at = 0 if skipped else at
        return self._at

    def _look(self) -> None:
        """Read the shim's position. Its page is not trusted: raises :class:`Corrupt` for an impossible one."""
        read = self._words[_READ]
        if not self._read <= read <= self._written:
            raise Corrupt(f"the shim says it has read {read} bytes of answers; it had read {self._read} of "
                          f"{self._written}", reason="answer ring")
        self._read = read

    def publish(self, kind: int, length: int, first: bool = True, wake: bool = True) -> None:
        """Publish the message in the last :meth:`room` to the shim: ``length`` bytes with its type.

        ``first``: it begins an answer; an unfinished one before it is void. ``wake``: False where :meth:`wake`
        follows, or another message.
        """
        at, block = self._at, _HEADER_SIZE - 1 + length + RING_ALIGNMENT - 1 & -RING_ALIGNMENT
        begin = self._written % self.capacity
        if at != begin:
            RING_HEADER_LAYOUT.pack_into(self._data, begin, self.capacity - begin - _HEADER_SIZE, RING_SKIP, 0, 0)
            self._written += self.capacity - begin
        RING_HEADER_LAYOUT.pack_into(self._data, at, length - 1, kind, int(first), 0)
        self._written += block
        self._page.words[_WRITTEN] = self._written
        self._silent = True
        if wake:
            self.wake()

    def wake(self) -> None:
        """Wake the shim's reader, if it sleeps and was not woken for the newest message yet."""
        if not self._silent:
            return
        self._silent = False
        # The shim clears `attending`, then reads `written`; the agent has written `written`, and now reads
        # `attending`. Taking a lock keeps the processor from reordering the agent's two accesses.
        with self._fence:
            attending = self._attending[_ATTENDING]
        if not attending:
            os.eventfd_write(self.doorbell, 1)

    def published_at(self, after: int, newest: int) -> int:
        """Return the time (ns, CLOCK_MONOTONIC) when the oldest call behind ``after`` was published, by the stamps.

        0: no call behind it up to ``newest`` is stamped. The shim's page is not trusted: the caller has to check that
        the time is possible.
        """
        words, stamped = self._words, self._words[_STAMPED]
        if not 0 < stamped - self._stamps < 1 << 62:
            return 0
        for number in range(max(self._stamps, stamped - SHIM_STAMPS + 1), stamped):
            at = _STAMPS_AT + number % SHIM_STAMPS * 2
            seq = words[at]
            if seq > newest:
                return 0
            self._stamps = number + 1
            if seq > after:
                found = words[at + 1]
                self._stamps = self._skip(number + 1, stamped, newest)
                return found
        return 0

    def _skip(self, number: int, stamped: int, newest: int) -> int:
        while number < stamped and self._words[_STAMPS_AT + number % SHIM_STAMPS * 2] <= newest:
            number += 1
        return number

    @property
    def written(self) -> int:
        """Position behind the newest message."""
        return self._written

    @property
    def read(self) -> int:
        """Position that the shim had reached when it was looked at last."""
        return self._read

    @property
    def shim_page(self) -> Any:
        """The page that the shim writes."""
        return self._shim

    def body(self, at: int, size: int) -> memoryview:
        """Return ``size`` bytes of the ring, of a message that other code has put there."""
        return self._data[at:at + size]

    def continue_at(self, written: int) -> None:
        """Continue behind messages that other code has published, and woken the reader for."""
        self._written = written

    def was_read(self, position: int) -> bool:
        """Return whether the shim has read everything up to ``position``. Raises :class:`Corrupt`."""
        if self._read < position:
            self._look()
        return self._read >= position

    def put(self, kind: int, body: bytes, wake: bool = True) -> bool:
        """Publish a message of the agent's own; return False without space for it. ``wake``: as for :meth:`publish`."""
        room = self.room(len(body) + 1)
        if room is None:
            return False
        room[1:] = body
        self.publish(kind, len(body) + 1, wake=wake)
        return True

    def close(self) -> None:
        """Unmap the ring and close its doorbell."""
        self._data.release()
        self._words.release()
        self._attending.release()
        self._shim.close()
        os.close(self.doorbell)


def _map_shim_page(fd: int) -> mmap.mmap:
    try:
        seals, status = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd)
        if seals & _SEALS != _SEALS or status.st_size != SHIM_PAGE_SIZE or status.st_blocks * 512 < SHIM_PAGE_SIZE:
            raise Corrupt("the shim's page is not sealed, or has not its size: reading it could kill the agent",
                          reason="shim page")
        return mmap.mmap(fd, SHIM_PAGE_SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise Corrupt(f"the shim's page cannot be used: {error}", reason="shim page") from error
