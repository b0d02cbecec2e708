"""The lease keeper: a small process of its own, so that a busy daemon does not lose its leases (OWNERSHIP 4).

It is not a thread, because a thread waits for the interpreter lock, which decoding
a large record, or a compiler, may hold without bound. The keeper imports only the standard
library and its registry's client; it renews after a third of the time that a lease leaves after its margin.

The parent and the keeper share one page (a memfd), which workers map read-only:

======  ====  =====================================================================
offset  type  field of slot n, at 64 * (n + 1)
======  ====  =====================================================================
0       i64   deadline: CLOCK_BOOTTIME in ns after which the holder stops acting:
              send time of the last acknowledged keep-alive + granted time - margin
8       u64   lease
16      u32   state: 0 empty, 1 held, 2 lost, 3 the registry does not answer
24      i64   alive: the parent's sign of life, CLOCK_BOOTTIME in ns (slot 0 only)
======  ====  =====================================================================

Without a sign of life for ``patience`` seconds the keeper renews no more, and the leases
expire: a frozen daemon must not keep its place for ever. The parent writes the sign
from a thread, so that a busy event loop is not mistaken for a frozen process.

Protocol on the keeper's standard input, one line each: ``keep SLOT LEASE TTL``,
``drop SLOT``. End of file: the keeper ends and the leases expire.
On its standard output it writes one byte whenever a lease was lost or the registry
does not answer, so that the parent reads the page at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rgpu.migrate.registry.clock import NANOSECOND, boot_time_ns

MARGIN_SECONDS = 1.0
AGAIN_SECONDS = 0.1  #: after a keep-alive without an answer
FROZEN_SECONDS = 0.2  #: between two checks whether a frozen parent runs again
IDLE_SECONDS = 3600.0  #: with no lease to keep; a command ends the wait
PAGE_BYTES = 4096
SLOTS = 8
EMPTY, HELD, LOST, UNREACHABLE = range(4)

_I64, _U64, _U32 = struct.Struct("<q"), struct.Struct("<Q"), struct.Struct("<I")


def granted_until(sent_ns: int, ttl: float, margin: float = MARGIN_SECONDS) -> int:
    """Return the holder's own deadline, ns; the margin is at most half of a short lease."""
    return sent_ns + int((ttl - min(margin, ttl / 2)) * NANOSECOND)


def renewal_interval(ttl: float) -> float:
    """Return the seconds between keep-alives: TTL / 3, less where the margin takes much of a short lease."""
    return (ttl - min(MARGIN_SECONDS, ttl / 2)) / 3


class DeadlinePage:
    """The shared page. Stores of eight aligned bytes are atomic on this machine; no reader needs a lock."""

    def __init__(self, fd: int, writable: bool = True) -> None:
        self.fd = fd
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, protection)

    @classmethod
    def create(cls) -> DeadlinePage:
        """Make a page in sealed shared memory. Raises OSError."""
        import fcntl

        fd = os.memfd_create("rgpu-leases", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def deadline(self, slot: int) -> int:
        """Return the deadline, CLOCK_BOOTTIME in ns; 0 when the slot is empty or its lease was lost."""
        return int(_I64.unpack_from(self._map, self._at(slot))[0])

    def state(self, slot: int) -> int:
        """Return the state of a slot's lease."""
        return int(_U32.unpack_from(self._map, self._at(slot) + 16)[0])

    def lease(self, slot: int) -> int:
        """Return the id of a slot's lease."""
        return int(_U64.unpack_from(self._map, self._at(slot) + 8)[0])

    def in_time(self, slot: int) -> bool:
        """Whether the holder may still act under the lease."""
        return boot_time_ns() < self.deadline(slot)

    def write(self, slot: int, deadline: int, lease: int, state: int) -> None:
        """Set a slot: deadline (ns of CLOCK_BOOTTIME), lease id, state; the deadline last."""
        at = self._at(slot)
        _U64.pack_into(self._map, at + 8, lease)
        _U32.pack_into(self._map, at + 16, state)
        _I64.pack_into(self._map, at, deadline)

    def sign_of_life(self) -> None:
        """Write the daemon's sign of life, with the present time."""
        _I64.pack_into(self._map, self._at(0) + 24, boot_time_ns())

    def keeper_is_up(self) -> None:
        """Write that the keeper has begun; called by the keeper."""
        _I64.pack_into(self._map, self._at(0) + 32, boot_time_ns())

    def keeper_up(self) -> bool:
        """Whether the keeper process has begun."""
        return bool(_I64.unpack_from(self._map, self._at(0) + 32)[0])

    def last_sign(self) -> int:
        """Return the time of the daemon's last sign of life, ns of CLOCK_BOOTTIME."""
        return int(_I64.unpack_from(self._map, self._at(0) + 24)[0])

    def close(self) -> None:
        """Unmap the page and close its descriptor."""
        self._map.close()
        os.close(self.fd)

    @staticmethod
    def _at(slot: int) -> int:
        if not 0 <= slot < SLOTS:
            raise ValueError(f"slot {slot}; 0 to {SLOTS - 1} exist")
        return 64 * (slot + 1)


class LeaseClient(Protocol):
    """Blocking interface to a registry that the keeper needs. The embedded store implements it."""

    def keepalive(self, lease: int) -> float:
        """Renew a lease; returns the seconds granted. Raises :class:`NotFound`, :class:`PoolUnavailable`."""


@dataclass
class _Kept:
    lease: int
    ttl: float
    next_at: int  #: ns


class Keeper:
    """The keeper's loop, without process and pipe, so that a test can run it."""

    def __init__(self, client: LeaseClient, page: DeadlinePage, patience: float,
                 tell: Callable[[], None] = lambda: None) -> None:
        """Make the loop. ``patience``: s; ``tell``: called when a slot's lease was lost or could not be renewed."""
        self._tell = tell
        self._client = client
        self._page = page
        self._patience = int(patience * NANOSECOND)
        self._kept: dict[int, _Kept] = {}

    def take(self, line: str) -> None:
        """Carry out one line of the protocol. Raises :class:`ValueError` for anything else."""
        match line.split():
            case ["keep", slot, lease, ttl]:
                self._kept[int(slot)] = _Kept(int(lease), float(ttl), boot_time_ns())
            case ["drop", slot]:
                self._kept.pop(int(slot), None)
                self._page.write(int(slot), 0, 0, EMPTY)
            case _:
                raise ValueError(f"not a keeper command: {line!r}")

    def renew_due(self) -> float:
        """Renew the leases that are due; return the seconds until the next one is."""
        now = boot_time_ns()
        if now - self._page.last_sign() > self._patience:
            return FROZEN_SECONDS  # the parent is frozen: its leases expire
        for slot, kept in list(self._kept.items()):
            if kept.next_at <= now:
                self._renew(slot, kept)
        waits = [kept.next_at - boot_time_ns() for kept in self._kept.values()]
        return max(0.0, min(waits, default=IDLE_SECONDS * NANOSECOND) / NANOSECOND)

    def _renew(self, slot: int, kept: _Kept) -> None:
        from rgpu.session.errors import NotFound, RgpuError

        sent = boot_time_ns()
        try:
            granted = self._client.keepalive(kept.lease)
        except NotFound:
            self._page.write(slot, 0, kept.lease, LOST)
            del self._kept[slot]
            self._tell()
        except RgpuError:
            self._page.write(slot, self._page.deadline(slot), kept.lease, UNREACHABLE)
            kept.next_at = sent + int(AGAIN_SECONDS * NANOSECOND)
            self._tell()
        else:
            self._page.write(slot, granted_until(sent, granted), kept.lease, HELD)
            kept.next_at = sent + int(renewal_interval(granted) * NANOSECOND)


def open_client(registry: str) -> LeaseClient:
    """Open ``embedded:PATH`` or ``etcd://…``. Raises :class:`ValueError` for another kind of registry."""
    kind, _, place = registry.partition(":")
    if kind == "embedded":
        from rgpu.migrate.registry.store import Store

        return Store(Path(place), lock_seconds=1.0)
    if kind == "etcd":
        from rgpu.migrate.registry.etcd.registry import EtcdLeases

        return EtcdLeases(registry)
    raise ValueError(f"unknown registry {registry!r}")


def main() -> None:
    """Run ``python -m rgpu.migrate.membership.lease_keeper REGISTRY PAGE_FD PATIENCE``; commands on standard input."""
    registry, page = sys.argv[1], DeadlinePage(int(sys.argv[2]))
    os.set_blocking(0, False)
    os.set_blocking(1, False)
    keeper = Keeper(_persistent(registry), page, float(sys.argv[3]), _tell)
    page.keeper_is_up()
    pending = b""
    wait = 0.0
    while True:
        ready, _, _ = select.select([0], [], [], wait)
        if ready:
            data = os.read(0, 4096)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                keeper.take(line.decode())
        wait = keeper.renew_due()


def _tell() -> None:
    with contextlib.suppress(OSError):  # the pipe is full: an unread byte is enough
        os.write(1, b"!")


def _persistent(registry: str) -> LeaseClient:
    """Return the client once the registry can be opened: it may not be reachable when a node starts."""
    from rgpu.session.errors import PoolUnavailable

    while True:
        try:
            return open_client(registry)
        except PoolUnavailable:
            time.sleep(0.1)
            if select.select([0], [], [], 0)[0] and os.getppid() == 1:
                raise SystemExit(0) from None


if __name__ == "__main__":
    main()
