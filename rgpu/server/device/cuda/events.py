"""Events of the ``cuda`` device and the session's clock, which their times refer to.

The driver gives the time between two events that were recorded on one GPU. Times that leave the GPU (checkpoints,
moves, events of two GPUs) are computed from each GPU's reference event (:mod:`.gpus`), whose time on the session's
clock was noted; an event that was recorded elsewhere has its restored time until it is recorded here.
"""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.engine import Engine
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.gpus import Gpus
from rgpu.session.errors import DeviceError

CUDA_ERROR_INVALID_HANDLE = 400


class Clock:
    """The session's clock, ns: it begins at 0, and a restored session continues from its former time."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._offset = -time.monotonic_ns()

    def now(self) -> int:
        """Return the time, ns."""
        return time.monotonic_ns() + self._offset

    def set(self, now: int) -> None:
        """Set the clock; the references of the GPUs keep their distance."""
        shift = now - self.now()
        self._offset += shift
        for gpu in self._gpus:
            gpu.reference_time += shift


class Events:
    """The events of a session by their numbers. Every method raises :class:`DeviceError` for an unknown event."""

    def __init__(self, gpus: Gpus, engine: Engine) -> None:
        self._gpus, self._engine = gpus, engine
        self._events: dict[int, tuple[Any, bool, int]] = {}  #: handle, whether it takes the time, number of its GPU
        self._restored: dict[int, int | None] = {}

    def create(self, event: int, context: int, flags: int) -> None:
        """Make an event on the GPU of one of the program's contexts."""
        self._gpus.use_context(context)
        keep = flags & int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        handle = check(driver.cuEventCreate(keep), "cuEventCreate")
        self._events[event] = (handle, not keep, self._gpus.of_context(context).number)
        self._engine.add_event(event, int(handle))

    def destroy(self, event: int) -> None:
        """Destroy an event."""
        handle, _, home = self._find(event)
        self._gpus.use(home)
        self._engine.remove_event(event)
        del self._events[event]
        self._restored.pop(event, None)
        check(driver.cuEventDestroy(handle), "cuEventDestroy")

    def _find(self, event: int) -> tuple[Any, bool, int]:
        if event not in self._events:
            raise DeviceError(f"event {event} does not exist", CUDA_ERROR_INVALID_HANDLE)
        return self._events[event]

    def _recorded(self, event: int) -> bool:
        """Whether the event was recorded here, which supersedes a restored time."""
        return bool(self._engine.event_recorded(event))

    def _time(self, event: int) -> int:
        """Return the session-clock ns of the event's last completed record."""
        handle, timing, home = self._find(event)
        if not timing:
            raise DeviceError(f"event {event} was made without timing", CUDA_ERROR_INVALID_HANDLE)
        restored = self._restored.get(event)
        if restored is not None and not self._recorded(event):
            return restored
        if not self._recorded(event):
            raise DeviceError(f"event {event} was never recorded", CUDA_ERROR_INVALID_HANDLE)
        gpu = self._gpus[home]
        gpu.use()
        milliseconds = check(driver.cuEventElapsedTime(gpu.reference, handle), "cuEventElapsedTime")
        return gpu.reference_time + int(milliseconds * 1e6)

    def elapsed(self, start: int, end: int) -> float:
        """Return the ms between two events: by the driver if both were recorded on one GPU, else by the clock."""
        (first, _, home), (last, _, other) = self._find(start), self._find(end)
        if self._recorded(start) and self._recorded(end) and home == other:
            self._gpus.use(home)
            return float(check(driver.cuEventElapsedTime(first, last), "cuEventElapsedTime"))
        return (self._time(end) - self._time(start)) / 1e6

    def states(self) -> dict[int, int | None]:
        """Return each event's time, ns on the session's clock; 0 without timing, None if never recorded."""
        states: dict[int, int | None] = {}
        for event, (_, timing, _) in self._events.items():
            if event in self._restored or self._recorded(event):
                states[event] = self._time(event) if timing else 0
            else:
                states[event] = None
        return states

    def restore(self, states: dict[int, int | None]) -> None:
        """Restore the times of events, in the form of :meth:`states`."""
        self._restored = {event: when for event, when in states.items() if when is not None}
