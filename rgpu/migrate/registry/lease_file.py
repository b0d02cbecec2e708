"""Until when leases last: a file beside the embedded registry's, because renewing must not wait for a disk.

A renewal need not survive a power cut (leases of another boot are over anyway),
but it must be made in time while checkpoints fill the disk's queues, and a commit of
the registry waits for those. So its rows say when a lease ends if it is never
renewed, and this file what renewals made of that:

========  =====  ==================================================================
offset    type   field of lease n, at 16 · n
========  =====  ==================================================================
0         i64    CLOCK_BOOTTIME in ns until which it was renewed; 0: never
8         u64    1: it has ended, and nothing renews it; the next transaction of the
                 registry removes its row and what it held
========  =====  ==================================================================

To renew a lease or end it, a process holds the flock of this file: one of the two
comes first, and the other one sees it. Nothing slow is done meanwhile.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from rgpu.migrate.registry.clock import boot_time_ns
from rgpu.migrate.registry.flock import held
from rgpu.session.errors import NotFound

_RECORD = struct.Struct("<qQ")
_ENDED = 1


class LeaseFile:
    """One process's view. Not for several threads at a time."""

    def __init__(self, path: Path, lock_seconds: float) -> None:
        """Raises :class:`OSError`."""
        self.path, self._lock_seconds = path, lock_seconds
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def granted(self, lease: int) -> None:
        """A new lease: what the number may have meant before (the registry was restored from a copy) is forgotten."""
        with self._locked():
            os.pwrite(self._fd, _RECORD.pack(0, 0), _RECORD.size * lease)

    def renew(self, lease: int, deadline: int, length: int) -> None:
        """Renew a lease for ``length`` ns from now on. ``deadline``: what its row says. Raises :class:`NotFound` if it
        has ended.
        """
        with self._locked():
            renewed, ended = self._read(lease)
            now = boot_time_ns()
            if ended or max(renewed, deadline) <= now:
                self._end(lease, renewed)
                raise NotFound(f"lease {lease} has ended", lease=lease)
            os.pwrite(self._fd, _RECORD.pack(now + length, 0), _RECORD.size * lease)

    def end_due(self, rows: Iterable[tuple[int, int]], now: int) -> list[int]:
        """End those of (lease, deadline of its row) … that are over at ``now``; from here on they are, for
        everybody.
        """
        found = []
        with self._locked():
            for lease, deadline in rows:
                renewed, ended = self._read(lease)
                if ended or max(renewed, deadline) <= now:
                    self._end(lease, renewed)
                    found.append(lease)
        return found

    def deadline(self, lease: int, row: int) -> int:
        """Deadline of a lease at this moment, ns. ``row``: what its row says."""
        renewed, ended = self._read(lease)
        return 0 if ended else max(renewed, row)

    def _read(self, lease: int) -> tuple[int, bool]:
        data = os.pread(self._fd, _RECORD.size, _RECORD.size * lease)
        renewed, flags = _RECORD.unpack(data.ljust(_RECORD.size, b"\0"))
        return renewed, bool(flags & _ENDED)

    def _end(self, lease: int, renewed: int) -> None:
        os.pwrite(self._fd, _RECORD.pack(renewed, _ENDED), _RECORD.size * lease)

    def _locked(self) -> AbstractContextManager[None]:
        """Raises :class:`PoolUnavailable` after ``lock_seconds``: whoever holds it is frozen."""
        return held(self._fd, self._lock_seconds, 0.002, f"the leases at {self.path}", self.path)
