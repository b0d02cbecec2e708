"""Events that several sessions share: a page of shared memory for each, which the exporting worker alone writes.

The page counts the event's records: word 0 is the newest one's number, and word 1 + n mod :data:`SLOTS` becomes n when
record n is complete. A waiter takes the newest number as it is when its call is applied, as the driver captures the
record then.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable

from rgpu.session.errors import DeviceError

INVALID_VALUE = 1
SIZE = 4096
SLOTS = SIZE // 8 - 1  #: records of one event that can be under way side by side before later ones are reported late
LOOK_SECONDS = 0.0005  #: between two checks of events with waiters
_SEAL_FUTURE_WRITE = 0x10  #: linux/fcntl.h; no other process can map it for writing


class EventPage:
    """The exporter's side."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rgpu-event", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, SIZE)
        self._map = mmap.mmap(self._fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS,
                    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self._words = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()
        self._early: set[int] = set()  #: complete records whose slot still belongs to an earlier record

    def descriptor(self) -> int:
        """Return a new descriptor of the page, which the caller closes."""
        return os.dup(self._fd)

    def record(self) -> int:
        """Note that the event is recorded once more. Return the record's number."""
        with self._lock:
            self._words[0] += 1
            return self._words[0]

    def complete(self, number: int) -> None:
        """Note that record ``number`` is complete; for any thread."""
        with self._lock:
            self._early.add(number)
            while number in self._early and self._words[1 + number % SLOTS] >= number - SLOTS:
                self._early.discard(number)
                self._words[1 + number % SLOTS] = number
                number += SLOTS

    def close(self) -> None:
        """Close the page; other holders of a descriptor keep it."""
        os.close(self._fd)  # the mapping stays: a record that is under way may still be completed


class SharedEvent:
    """The importer's side. ``fd`` stays the caller's. Raises :class:`DeviceError`."""

    def __init__(self, fd: int) -> None:
        seals = fcntl.F_SEAL_SHRINK | _SEAL_FUTURE_WRITE
        try:
            good = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals and os.fstat(fd).st_size == SIZE
        except OSError:
            good = False
        if not good:
            raise DeviceError("what another worker shares is no event's page", INVALID_VALUE)
        self._words = memoryview(mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)).cast("Q")
        self.over = False  #: its session has ended: nothing of it is under way

    def newest(self) -> int:
        """Return the number of the event's last record; 0: there was none."""
        return int(self._words[0])

    def is_complete(self, number: int) -> bool:
        """Whether that record is complete, or never will be."""
        return not number or self.over or self._words[1 + number % SLOTS] >= number


class EventWatch:
    """Polls shared events while there are waiters, in a thread of its own, which ends with the last waiter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: list[tuple[SharedEvent, int, Callable[[], None]]] = []
        self._looking = False

    def when_complete(self, event: SharedEvent, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` once record ``number`` is complete: at once, or in a thread."""
        if event.is_complete(number):
            then()
            return
        with self._lock:
            self._waits.append((event, number, then))
            if self._looking:
                return
            self._looking = True
        threading.Thread(target=self._look, daemon=True, name="shared-events").start()

    def _look(self) -> None:
        while True:
            with self._lock:
                ready = [wait for wait in self._waits if wait[0].is_complete(wait[1])]
                self._waits = [wait for wait in self._waits if wait not in ready]
                if not self._waits and not ready:
                    self._looking = False
                    return
            for _, _, then in ready:
                then()
            if not ready:
                time.sleep(LOOK_SECONDS)
