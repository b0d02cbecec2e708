"""Memory shared with an agent on this host: its bulk segments, mapped read-only, and an area for long answers.

:class:`HostMemory` is the worker's, for its whole life; a :class:`Door` is one
attachment's. What was mapped stays mapped when a connection ends, for the
agent will most likely come back with the same memory.

Segments come from the program's side, so each descriptor is checked before it
is mapped (sealed against shrinking, allocated: reading it cannot kill the
worker), and each place before it is read. Bytes may change while they are
read; that harms nobody but the program that does it.
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

LARGEST = (1 << 34) + 64 * 1024  #: bytes of one memory
MOST = 256  #: memories mapped at one time
AREA = int(os.environ.get("RGPU_ANSWER_AREA", 32 << 20))  #: bytes, where the device has none of its own
ALIGNMENT = 64
SWEEP = 5.0  #: seconds of silence after which an agent that came back has offered what it needs
F_SEAL_FUTURE_WRITE = 0x0010


class Memory:
    """One memfd of the agent's, mapped. ``pinned``: None as long as that was not tried."""

    def __init__(self, identity: shared.Identity, fd: int) -> None:
        """Raises :class:`OSError`."""
        self.identity, self.size = identity, identity[2]
        memory = host_zone.shared(fd, self.size)
        self.address = ctypes.addressof(memory)
        self.view = memoryview(memory).cast("B")
        self.pinned: bool | None = None
        self.wanted = True  #: the agent has not dropped it

    def close(self) -> None:
        """The mapping goes with the last view: a device thread may still read."""
        self.view.release()


class Area(Protocol):
    """Where long answers lie. ``fd`` is for the agent to map."""

    number: int
    size: int
    fd: int


class DeviceArea:
    """The fast path's own: answers are copied there from the device."""

    def __init__(self, fd: int, address: int, size: int) -> None:
        self.number, self.fd, self.address, self.size = _number(), fd, address, size

    def offset(self, address: int, length: int) -> int | None:
        """Offset in the area of memory of this process; None if it does not lie in the area."""
        at = address - self.address
        return at if 0 <= at <= self.size - length else None


class PlainArea:
    """Area for a device whose answers are bytes: they are copied here. One thread places them.

    The place of an answer is free again when the program has it: ``kept(seq)``
    says whether it may still be on its way there.
    """

    def __init__(self, size: int, kept: Callable[[int], bool]) -> None:
        """Raises :class:`OSError` where the memory cannot be had."""
        self.number, self.size, self._kept = _number(), size, kept
        self.fd = os.memfd_create("rgpu-answers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            # From here on nobody makes a writable mapping of it: ours exists already.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, shared.SEALS | F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(self.fd)
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._extents: list[tuple[int, int, int]] = []  #: (offset, end, seq), by offset

    def place(self, seq: int, data: Any) -> int | None:
        """Copy an answer's payload: its offset; None: there is no room now, or nobody says when it is free again."""
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
        """``kept``: as :class:`PlainArea` has it."""
        self._node = node
        self.worker = secrets.token_hex(16)  #: this process' name, by which an agent knows it again
        self._fast, self._kept = fast, kept
        self._lock = threading.Lock()
        self._memories: dict[shared.Identity, Memory] = {}
        self._dropped: list[Memory] = []  #: still pinned
        self._area: DeviceArea | PlainArea | None = None
        self._area_failed = False

    def invite(self, host: Any) -> Door | str | None:
        """Invite an agent on ``host``: a door, why there is none, or None for another host."""
        if not host or host != shared.identity(self._node):
            return None
        try:
            return Door(self)
        except RgpuError as error:
            return error.message

    # -- the area ----------------------------------------------------------------------------
    @property
    def area(self) -> DeviceArea | PlainArea | None:
        """Made when an agent first comes; None where none can be had."""
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
        """An agent has come: what it does not offer again is not its any more."""
        with self._lock:
            for memory in self._memories.values():
                memory.wanted = False

    def sweep(self) -> None:
        """It has had time to offer what it needs."""
        with self._lock:
            left = [memory for memory in self._memories.values() if not memory.wanted]
        for memory in left:
            self.drop(memory)

    def map(self, fd: int, size: int) -> Memory:
        """Map a memory, or find it mapped. Raises :class:`Corrupt`, :class:`OSError`."""
        identity = shared.check_sealed(fd, size, LARGEST)
        with self._lock:
            found = self._memories.get(identity)
            if found is None:
                if len(self._memories) >= MOST:
                    raise Corrupt(f"more than {MOST} shared memories", reason="count")
                found = self._memories[identity] = Memory(identity, fd)
            found.wanted = True
            return found

    def drop(self, memory: Memory) -> None:
        """The agent needs it no more: nothing that was placed in it is still being read."""
        with self._lock:
            memory.wanted = False
            self._memories.pop(memory.identity, None)
            if memory.pinned:
                self._dropped.append(memory)
                return
        memory.close()

    def pin(self, wanted: Memory) -> None:
        """Pin what can be pinned, if the device is idle: pinning waits for it. The applying thread's."""
        if self._fast is None or wanted.pinned is not None:
            return
        with self._lock:
            for memory in list(self._memories.values()):
                if memory.pinned is None:
                    memory.pinned = self._fast.pin(memory.address, memory.size)
            self._dropped = [memory for memory in self._dropped if not self._unpin(memory)]

    def _unpin(self, memory: Memory) -> bool:
        assert self._fast is not None
        if not self._fast.unpin(memory.address):
            return False
        memory.close()
        return True


class Door:
    """One attachment's way to hand memory over; its thread runs from :meth:`start` to :meth:`close`."""

    def __init__(self, host: HostMemory) -> None:
        """Raises :class:`LinkError` where no socket can be had."""
        self._host = host
        self.offer = shared.Offer.draw()
        self._listener = shared.listen(self.offer)
        self._channel: shared.Channel | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._memories: dict[int, Memory] = {}

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
        except Exception:  # noqa: BLE001 - bulk goes in frames then
            log.exception("memory channel failed")
            self.close()

    def _obey(self, channel: shared.Channel, message: shared.Message) -> None:
        if message.kind == MEMORY:
            self._map(channel, message)
        elif message.kind == DROP:
            with self._lock:
                memory = self._memories.pop(message.number, None)
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
        channel.send(MAPPED, message.number)

    # -- the receiving thread's ----------------------------------------------------------------
    def place(self, body: Any) -> tuple[int, Any, memoryview]:
        """A CALLS_AT: its offset in the stream, the bytes that come first, and the payload where it stands.

        Raises :class:`Corrupt` for a place that is not there.
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
        """May be called more than once, from any thread."""
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()
        self._listener.close()
