"""A pause with all submitted work complete: stop applying, and wait for the device's work."""

from __future__ import annotations

import time
from typing import Protocol

from rgpu.checkpoint.device import Device
from rgpu.server.apply_path import ApplyPath
from rgpu.server.stalling import Stall
from rgpu.session.errors import TimedOut

LONGEST_RUN = 0.5  #: seconds for which the session runs between two attempts, at most


class Pausing(Protocol):
    """The part of the session that is needed here."""

    def pause(self) -> None:
        """Stop applying calls."""

    def resume(self) -> None:
        """Go on applying calls."""


def quiesce(session: Pausing, device: Device, path: ApplyPath, limit: float, settle: float) -> None:
    """Pause, with all submitted work complete.

    Work may wait for a call that was not applied yet (a kernel that spins, a host function, another host's stream): if
    it does not drain in ``settle`` seconds, more calls are applied until its oldest call is complete, for longer with
    each attempt, and it is tried again (SEMANTICS 19). Raises :class:`TimedOut` after ``limit`` seconds, or earlier
    where the oldest of it does not end (stalling.py), with the session running.
    """
    deadline, tries = time.monotonic() + limit, 0
    stall = Stall(device)
    try:
        while True:
            session.pause()
            if device.drain(settle):
                return
            tries += 1
            path.bound(tries)  # else the queues would be as full at the next try
            session.resume()
            why = stall.look(time.monotonic())
            if not why and time.monotonic() > deadline:
                why = f"it did not drain within {limit:.1f} s"
            if why:
                raise TimedOut(f"the session's work does not end: {why}; it runs on", seconds=limit)
            time.sleep(0.02)
            if (oldest := device.unfinished()) is not None:
                device.wait_complete(oldest[0], min(LONGEST_RUN, settle * tries))
    finally:
        path.bound(0)
