"""Slows a session down by a given share, while a replay elsewhere catches up with it.

The applying thread is paused for that share of each short period, at a
record's boundary. The sum of these pauses counts as the move's brownout.
"""

from __future__ import annotations

import threading
import time

from rgpu.server.worker.apply.runtime import SessionRuntime

PERIOD = 0.1  #: seconds: longer than a device's queued work (20 ms), so that a pause takes effect


class SessionThrottle:
    """Throttle of a session from :meth:`start` to :meth:`stop`; ``share`` (0 to 1) may be changed while it runs."""

    def __init__(self, runtime: SessionRuntime) -> None:
        self.share = 0.0
        self.stood = 0.0  #: seconds that the session was held back
        self._runtime = runtime
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    def start(self) -> None:
        """Begin to throttle, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End the throttle; on return the session runs at its own speed. May be called without :meth:`start`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            share = min(max(self.share, 0.0), 0.95)
            if share:
                self._runtime.pause(brief=True)
                began = time.monotonic()
                try:
                    self._stop.wait(PERIOD * share)
                finally:
                    self._runtime.resume(brief=True)
                    self.stood += time.monotonic() - began
            self._stop.wait(PERIOD * (1.0 - share))
