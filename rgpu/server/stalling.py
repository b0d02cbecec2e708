"""Detection and naming of a session's work that does not end.

A session can be paused for a snapshot only when all submitted work is complete. A long queue that gets shorter may
drain as long as the snapshot's limits allow. A queue is *stuck* when its oldest unfinished call stays the same for
:data:`STUCK_SECONDS`: a kernel that spins for ever, a host function that does not return. No checkpoint or move is
begun then.
"""

from __future__ import annotations

import time
from typing import Protocol

STUCK_SECONDS = 3.0  #: a verb that is refused because of it is refused within 5 s
LOOK_SECONDS = 4.5  #: longest check before a checkpoint or move is begun
SOME = 3  #: calls whose end shows that work goes on


class Working(Protocol):
    """The part of a device that is used here (:class:`rgpu.checkpoint.device.Device`)."""

    def unfinished(self) -> tuple[int, str] | None:
        """Return (seq, description) of the oldest pending work; None: there is none."""

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        """Wait ``timeout`` seconds at most for the work of call ``seq``; returns whether it is complete."""


def said(oldest: tuple[int, str]) -> str:
    """Return a call's name for messages: its description, where known, and its position."""
    seq, what = oldest
    return f"{what} (call {seq})" if what else f"call {seq}"


def _why(oldest: tuple[int, str], seconds: float) -> str:
    return f"{said(oldest)} has not ended for {seconds:.1f} s, and with it nothing that was submitted behind it"


class Stall:
    """Watches one device. ``now`` is given by the caller, monotonic."""

    def __init__(self, device: Working, patience: float = STUCK_SECONDS) -> None:
        self._device, self._patience = device, patience
        self._oldest: tuple[int, str] | None = None
        self._since = 0.0

    def look(self, now: float) -> str:
        """Return why the device's work will not end soon; empty as long as it may."""
        oldest = self._device.unfinished()
        if oldest is None or self._oldest is None or oldest[0] != self._oldest[0]:
            self._oldest, self._since = oldest, now
            return ""
        if now - self._since < self._patience:
            return ""
        return _why(oldest, now - self._since)


def stuck(device: Working, patience: float = STUCK_SECONDS) -> str:
    """Return why work will not end soon; empty as soon as :data:`SOME` calls have ended, or when there is none.

    Several calls: work that does not end may be queued just behind work that does. Takes ``patience`` seconds where
    the device is stuck, and :data:`LOOK_SECONDS` at most.
    """
    began = since = time.monotonic()
    for _ in range(SOME):
        oldest = device.unfinished()
        if oldest is None:
            return ""
        if not device.wait_complete(oldest[0], min(patience, began + LOOK_SECONDS - since)):
            took = time.monotonic() - since
            return _why(oldest, patience) if took >= patience else ""
        since = time.monotonic()
    return ""


class OldestKernel:
    """The time for which a device's oldest unfinished work has been one and the same kernel. ``now``: monotonic."""

    def __init__(self, device: Working) -> None:
        self._device = device
        self._oldest: tuple[int, str] | None = None
        self._since = 0.0

    def look(self, now: float) -> tuple[float, str]:
        """Return (seconds since it was first seen as the oldest, its name); (0, "") where it is no kernel and no graph.

        Work that waits for the program (a host function) is not counted: it takes no time of the device.
        """
        oldest = self._device.unfinished()
        if oldest is None or not oldest[1].startswith(("kernel ", "a graph")):
            self._oldest = None
            return 0.0, ""
        if self._oldest is None or self._oldest[0] != oldest[0]:
            self._oldest, self._since = oldest, now
        return now - self._since, said(oldest)
