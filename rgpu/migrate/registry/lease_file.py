"""Deadlines of leases: a file beside the embedded registry's, because a renewal must not wait for a disk.

A renewal need not survive a power cut (leases of another boot have ended anyway),
but it must be made in time while checkpoints fill the disk's queues, and a commit of
the registry waits for those. The registry's rows therefore contain when a lease ends if it is never
renewed, and this file contains the renewals:

========  =====  ==================================================================
offset    type   field of lease n, at 16 · n
========  =====  ==================================================================
0         i64    CLOCK_BOOTTIME in ns until which it was renewed; 0: never
8         u64    1: it has ended, and nothing renews it; the next transaction of the
                 registry removes its row and its keys
========  =====  ==================================================================

To renew a lease or end it, a process holds the flock of this file, so that the two are
ordered. Nothing slow is done while it is held.
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
    """View of the file for one process. Not for several threads at a time."""

    def __init__(self, path: Path, lock_seconds: float) -> None:
        """Open or create the file. ``lock_seconds``: how long to wait for its flock. Raises :class:`OSError`."""
        self.path, self._lock_seconds = path, lock_seconds
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def granted(self, lease: int) -> None:
        """Clear the slot of a new lease: a registry restored from a copy may have used the number before."""
        with self._locked():
            os.pwrite(self._fd, _RECORD.pack(0, 0), _RECORD.size * lease)

    def renew(self, lease: int, deadline: int, length: int) -> None:
        """Renew a lease for ``length`` ns from now on. ``deadline``: that of its row. Raises :class:`NotFound` if it
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
        """End the leases, of rows (lease, deadline), that are over at ``now``, for all processes; return them."""
        found = []
        with self._locked():
            for lease, deadline in rows:
                renewed, ended = self._read(lease)
                if ended or max(renewed, deadline) <= now:
                    self._end(lease, renewed)
                    found.append(lease)
        return found

    def deadline(self, lease: int, row: int) -> int:
        """Return the present deadline of a lease, ns. ``row``: the deadline in its row."""
        renewed, ended = self._read(lease)
        return 0 if ended else max(renewed, row)

    def _read(self, lease: int) -> tuple[int, bool]:
        data = os.pread(self._fd, _RECORD.size, _RECORD.size * lease)
        renewed, flags = _RECORD.unpack(data.ljust(_RECORD.size, b"\0"))
        return renewed, bool(flags & _ENDED)

    def _end(self, lease: int, renewed: int) -> None:
        os.pwrite(self._fd, _RECORD.pack(renewed, _ENDED), _RECORD.size * lease)

    def _locked(self) -> AbstractContextManager[None]:
        """Hold the flock. Raises :class:`PoolUnavailable` after ``lock_seconds``: its holder is frozen."""
        return held(self._fd, self._lock_seconds, 0.002, f"the leases at {self.path}", self.path)
