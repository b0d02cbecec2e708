"""Streams, events and completion on the GPU: which calls are done, and who waits for what.

The driver tells nothing by itself: a marker event is recorded behind the work
of a stream when somebody waits for it, or when the watcher comes by, and the
watcher thread polls the oldest marker of each stream. Work of a stream
completes in order, so one marker stands for everything before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import STICKY, check

BUSY_POLL = 0.00002  #: seconds between two looks while a program waits
IDLE_POLL = 0.001  #: while work runs and nobody waits for it


@dataclass
class Marker:
    """An event behind everything up to ``seq``; ``actions`` run when it is reached."""

    seq: int
    event: Any
    actions: list[Callable[[int], None]] = field(default_factory=list)


class StreamState:
    """One stream's unfinished calls, oldest first, and the markers among them."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pending: deque[int] = deque()
        self.markers: deque[Marker] = deque()
        self.completed = 0

    @property
    def unmarked(self) -> bool:
        return bool(self.pending) and (not self.markers or self.markers[-1].seq < self.pending[-1])


class Completion:
    """Watches all streams of a session. ``on_error`` gets the first sticky CUresult."""

    def __init__(self, context: Any, on_error: Callable[[int, str], None]) -> None:
        self._context = context
        self._on_error = on_error
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.streams: dict[int, StreamState] = {}
        self._free_events: list[Any] = []
        self._notify: Callable[[], None] = lambda: None
        self._stopped = False
        self._waiting = 0  #: markers that somebody waits for
        self._thread = threading.Thread(target=self._watch, name="cuda-completion", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_progress(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def submitted(self, stream: int, seq: int) -> None:
        with self._lock:
            self.streams[stream].pending.append(seq)
            self._changed.notify_all()

    def mark(self, stream: int, seq: int, action: Callable[[int], None]) -> None:
        """Run ``action(CUresult)`` when everything given to the stream so far is complete; counts as work ``seq``."""
        with self._lock:
            state = self.streams[stream]
            state.pending.append(seq)
            self._mark(state).actions.append(action)
            self._waiting += 1
            self._changed.notify_all()

    def _mark(self, state: StreamState) -> Marker:
        event = self._free_events.pop() if self._free_events else check(
            driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        check(driver.cuEventRecord(event, state.handle), "cuEventRecord")
        marker = Marker(state.pending[-1], event)
        state.markers.append(marker)
        return marker

    def progress(self) -> tuple[set[int], dict[int, int]]:
        with self._lock:
            pending = {seq for state in self.streams.values() for seq in state.pending}
            return pending, {number: state.completed for number, state in self.streams.items() if state.completed}

    def is_complete(self, seq: int) -> bool:
        with self._lock:
            return not any(seq in state.pending for state in self.streams.values())

    def wait_complete(self, seq: int, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_complete(seq), timeout)

    def wait_idle(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(s.pending for s in self.streams.values()), timeout)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(5)

    def _watch(self) -> None:
        driver.cuCtxSetCurrent(self._context)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or any(s.pending for s in self.streams.values()))
                if self._stopped:
                    return
                actions = self._collect()
            for action, result in actions:
                action(result)
            if actions:
                self._notify()
            time.sleep(BUSY_POLL if self._waiting else IDLE_POLL)

    def _collect(self) -> list[tuple[Callable[[int], None], int]]:
        """Take what has completed; returns the actions to run outside the lock."""
        ready: list[tuple[Callable[[int], None], int]] = []
        moved = False
        for state in self.streams.values():
            if state.unmarked and not state.markers:
                self._mark(state)
            while state.markers:
                (status,) = driver.cuEventQuery(state.markers[0].event)
                result = int(status)
                if result == 600:  # CUDA_ERROR_NOT_READY
                    break
                if result in STICKY:
                    self._on_error(result, driver.CUresult(result).name)
                marker = state.markers.popleft()
                self._free_events.append(marker.event)
                while state.pending and state.pending[0] <= marker.seq:
                    state.pending.popleft()
                state.completed = marker.seq
                self._waiting -= len(marker.actions)
                ready.extend((action, result) for action in marker.actions)
                moved = True
        if moved:
            self._changed.notify_all()
            if not ready:
                ready.append((lambda _: None, 0))
        return ready
