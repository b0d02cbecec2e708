"""Memory shared with an agent on this host: its bulk segments, mapped read-only, and an area for long answers.

:class:`HostMemory` lives as long as the worker; a :class:`Door` as long as one
attachment. Mapped memory stays mapped when a connection ends, for the
agent will most likely reconnect with the same memory.

The program's side makes the segments, so each descriptor is checked before it
is mapped (sealed against shrinking, allocated: reading it cannot kill the
worker), and each place before it is read. Bytes may change while they are
read; that harms only the program that changes them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import structlog

from rgpu.link.local import shared
from rgpu.link.messages.data import PLACE_LAYOUT
from rgpu.link.messages.memory import DROP, MAPPED, MEMORY, PROVEN, REFUSED
from rgpu.server.device import host_zone
from rgpu.server.fast_path import FastPath
from rgpu.session.errors import Corrupt, LinkError, RgpuError, TimedOut

log = structlog.get_logger(__name__)

LARGEST = (1 << 34) + 64 * 1024  #: bytes of one mapped memory, at most
MOST = 256  #: memories mapped at one time
AREA = int(os.environ.get("RGPU_ANSWER_AREA", 32 << 20))  #: bytes, where the device has none of its own
ALIGNMENT = 64
SWEEP = 5.0  #: seconds of silence after which a reconnected agent has offered all memory that it needs
F_SEAL_FUTURE_WRITE = 0x0010


class Memory:
    """One memfd of the agent's, mapped. ``pinned``: None as long as that was not tried."""

    def __init__(self, identity: shared.Identity, fd: int) -> None:
        """Map it. Raises :class:`OSError`."""
        self.identity, self.size = identity, identity[2]
        memory = host_zone.shared(fd, self.size)
        self.address = ctypes.addressof(memory)
        self.view = memoryview(memory).cast("B")
        self.pinned: bool | None = None
        self.wanted = True  #: the agent has not dropped it

    def close(self) -> None:
        """Release the view; the mapping ends with the last view, since a device thread may still read."""
        self.view.release()


class Area(Protocol):
    """Shared memory that holds long answers. ``fd`` is for the agent to map."""

    number: int
    size: int
    fd: int


class DeviceArea:
    """The fast path's own area: answers are copied there from the device."""

    def __init__(self, fd: int, address: int, size: int) -> None:
        self.number, self.fd, self.address, self.size = _number(), fd, address, size

    def offset(self, address: int, length: int) -> int | None:
        """Return the offset in the area of an address of this process; None if it does not lie in the area."""
        at = address - self.address
        return at if 0 <= at <= self.size - length else None


class PlainArea:
    """Area for a device whose answers are bytes: they are copied here. One thread places them.

    The place of an answer is free again when the program has read it: ``kept(seq)``
    returns whether it may still be on its way there.
    """

    def __init__(self, size: int, kept: Callable[[int], bool]) -> None:
        """Allocate the area. Raises :class:`OSError` where there is not enough memory."""
        self.number, self.size, self._kept = _number(), size, kept
        self.fd = os.memfd_create("rgpu-answers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            # From here on no process can make a writable mapping of it: ours exists already.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, shared.SEALS | F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._extents: list[tuple[int, int, int]] = []  #: (offset, end, seq), by offset

    def place(self, seq: int, data: Any) -> int | None:
        """Copy an answer's payload into the area. Return its offset; None: no space is free, or ``seq`` is not kept."""
        if not self._kept(seq):
            return None
        size = len(data)
        self._extents = [extent for extent in self._extents if self._kept(extent[2])]
        at = 0
        for index, (offset, end, _) in enumerate([*self._extents, (self.size, 0, 0)]):
            if offset - at >= size:
                self._extents.insert(index, (at, at + size, seq))
                self._bytes[at:at + size] = np.frombuffer(data, np.uint8)
                return at
            at = end + ALIGNMENT - 1 & -ALIGNMENT
        return None


def _number() -> int:
    return secrets.randbelow(2**32 - 1) + 1


class HostMemory:
    """See the module docstring."""

    def __init__(self, fast: FastPath | None, kept: Callable[[int], bool], node: str = "") -> None:
        """Map nothing yet. ``kept``: as :class:`PlainArea` takes it."""
        self._node = node
        self.worker = secrets.token_hex(16)  #: random name of this process, by which an agent recognises it
        self._fast, self._kept = fast, kept
        self._lock = threading.Lock()
        self._memories: dict[shared.Identity, Memory] = {}
        self._dropped: list[Memory] = []  #: still pinned
        self._area: DeviceArea | PlainArea | None = None
        self._area_failed = False
        self.pins = 0  #: rounds of pinning that changed something
        self.news = -1  #: descriptor that is ready when memory was mapped; from the first attachment on

    def invite(self, host: Any) -> Door | str | None:
        """Return a door for an agent on ``host``, the reason why there is none, or None for another host."""
        if not host or host != shared.identity(self._node):
            return None
        if self.news < 0:
            self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            return Door(self)
        except RgpuError as error:
            return error.message

    # -- the area ----------------------------------------------------------------------------
    @property
    def area(self) -> DeviceArea | PlainArea | None:
        """Area for long answers, made when the first agent attaches; None where there is not enough memory."""
        with self._lock:
            if self._area is None and not self._area_failed:
                try:
                    self._area = self._make_area()
                except OSError as error:
                    log.warning("no shared memory for answers: they go over TCP", reason=str(error))
                self._area_failed = self._area is None
            return self._area

    def _make_area(self) -> DeviceArea | PlainArea | None:
        if self._fast is None:
            return PlainArea(AREA, self._kept)
        found = self._fast.area()
        return None if found is None else DeviceArea(*found)

    # -- segments -----------------------------------------------------------------------------
    def begin(self) -> None:
        """Note that an agent has attached: memory that it does not offer again is dropped by :meth:`sweep`."""
        with self._lock:
            for memory in self._memories.values():
                memory.wanted = False

    def sweep(self) -> None:
        """Drop the memory that the agent has not offered again."""
        with self._lock:
            left = [memory for memory in self._memories.values() if not memory.wanted]
        for memory in left:
            self.drop(memory)

    def map(self, fd: int, size: int) -> Memory:
        """Map a memory, or return it if it is mapped. Raises :class:`Corrupt`, :class:`OSError`."""
        identity = shared.check_sealed(fd, size, LARGEST)
        with self._lock:
            found = self._memories.get(identity)
            if found is None:
                if len(self._memories) >= MOST:
                    raise Corrupt(f"more than {MOST} shared memories", reason="count")
                found = self._memories[identity] = Memory(identity, fd)
                if self.news >= 0:
                    os.eventfd_write(self.news, 1)
            found.wanted = True
            return found

    def drop(self, memory: Memory) -> None:
        """Unmap a memory that the agent needs no more: nothing that was placed in it is still being read."""
        with self._lock:
            memory.wanted = False
            self._memories.pop(memory.identity, None)
            if memory.pinned:
                self._dropped.append(memory)
                return
        memory.close()

    @property
    def unpinned(self) -> bool:
        """Whether there is memory that was not tried to be pinned."""
        with self._lock:
            return self._fast is not None and any(memory.pinned is None for memory in self._memories.values())

    def pin_ahead(self) -> bool:
        """Pin one memory before it is needed; return False while the device works. For the applying thread only."""
        with self._lock:
            wanted = next((memory for memory in self._memories.values() if memory.pinned is None), None)
            if wanted is not None and self._fast is not None:
                wanted.pinned = self._fast.pin(wanted.address, wanted.size)
                self.pins += bool(wanted.pinned)
            return wanted is None or wanted.pinned is not None

    def pin(self, wanted: Memory) -> None:
        """Pin what can be pinned, if the device is idle: pinning waits for it. For the applying thread only."""
        if self._fast is None or wanted.pinned is not None:
            return
        with self._lock:
            for memory in list(self._memories.values()):
                if memory.pinned is None:
                    memory.pinned = self._fast.pin(memory.address, memory.size)
                    self.pins += bool(memory.pinned)
            self._dropped = [memory for memory in self._dropped if not self._unpin(memory)]

    def _unpin(self, memory: Memory) -> bool:
        assert self._fast is not None
        if not self._fast.unpin(memory.address):
            return False
        memory.close()
        return True


class Door:
    """One attachment's memory channel; its thread runs from :meth:`start` to :meth:`close`."""

    def __init__(self, host: HostMemory) -> None:
        """Listen on a new socket. Raises :class:`LinkError` where none can be made."""
        self._host = host
        self.offer = shared.Offer.draw()
        self._listener = shared.listen(self.offer)
        self._channel: shared.Channel | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._memories: dict[int, Memory] = {}
        self._changes = 0

    def start(self) -> None:
        """Begin to wait for the agent, in a thread of its own."""
        threading.Thread(target=self._run, name="shared-memory", daemon=True).start()

    def _run(self) -> None:
        try:
            try:
                channel = shared.admit(self._listener, self.offer)
            finally:
                self._listener.close()
            with self._lock:
                self._channel = channel
                if self._closed:
                    channel.close()
                    return
            area = self._host.area
            if area is None:
                channel.send(PROVEN, data=self.offer.proven)
            else:
                channel.send(PROVEN, area.number, area.size, self.offer.proven, area.fd)
            self._host.begin()
            channel.sock.settimeout(SWEEP)
            while True:
                try:
                    message = channel.receive()
                except TimedOut:
                    self._host.sweep()
                    channel.sock.settimeout(None)
                    continue
                if message is not None:
                    self._obey(channel, message)
        except (LinkError, TimedOut) as error:
            log.debug("memory channel ended", reason=error.message)
        except RgpuError as error:
            log.warning("memory channel given up", error=error.code, reason=error.message)
            self.close()
        except Exception:  # noqa: BLE001 - bulk is then sent in frames
            log.exception("memory channel failed")
            self.close()

    def _obey(self, channel: shared.Channel, message: shared.Message) -> None:
        if message.kind == MEMORY:
            self._map(channel, message)
        elif message.kind == DROP:
            with self._lock:
                memory = self._memories.pop(message.number, None)
                self._changes += 1
            if memory is not None:
                self._host.drop(memory)
        else:
            if message.fd >= 0:
                os.close(message.fd)
            raise Corrupt(f"a message of type {message.kind} on the memory channel", reason="message")

    def _map(self, channel: shared.Channel, message: shared.Message) -> None:
        try:
            memory = self._host.map(message.fd, message.size)
        except (Corrupt, OSError, ValueError) as error:
            reason = error.message if isinstance(error, Corrupt) else str(error)
            log.warning("a shared memory is refused", number=message.number, bytes=message.size, reason=reason)
            channel.send(REFUSED, message.number, data=reason.encode()[:300])
            return
        finally:
            os.close(message.fd)
        with self._lock:
            self._memories[message.number] = memory
            self._changes += 1
        channel.send(MAPPED, message.number)

    @property
    def host(self) -> HostMemory:
        """The memory of all attachments."""
        return self._host

    # -- the receiving thread's ----------------------------------------------------------------
    @property
    def changes(self) -> int:
        """Return a number that grows when :meth:`pinned` may return something else."""
        return self._changes + self._host.pins

    def pinned(self) -> list[tuple[int, int, int]]:
        """Return number, address and bytes of each memory that is pinned: it stays mapped until this thread unpins."""
        with self._lock:
            return [(number, memory.address, memory.size) for number, memory in self._memories.items() if memory.pinned]

    def place(self, body: Any) -> tuple[int, Any, memoryview]:
        """Return a CALLS_AT's offset in the stream, its first bytes, and a view of its payload in shared memory.

        Raises :class:`Corrupt` for a place that does not exist.
        """
        if len(body) < PLACE_LAYOUT.size:
            raise Corrupt(f"a place of {len(body)} bytes", reason="length")
        stream, number, zero, offset, length = PLACE_LAYOUT.unpack_from(body)
        with self._lock:
            memory = self._memories.get(number)
        if memory is None or zero or not length or offset > memory.size or length > memory.size - offset:
            raise Corrupt(f"a payload of {length} bytes at {offset} of shared memory {number}, which is not there",
                          reason="place")
        self._host.pin(memory)
        return stream, body[PLACE_LAYOUT.size:], memory.view[offset:offset + length]

    def close(self) -> None:
        """Close the channel; may be called more than once, from any thread."""
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()
        self._listener.close()
