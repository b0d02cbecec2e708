"""Keeping of a run's lock, record and output, by its supervisor, or by its agent once the supervisor has died."""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

import msgspec

from rgpu.link.runs.folder import Runs
from rgpu.link.runs.output import CHUNK, OutputWriter
from rgpu.link.runs.record import RunRecord
from rgpu.session.errors import RgpuError

DRAIN_SECONDS = 2.0  #: to read the rest of the pipe after the program's end; its children may hold that open for ever


class Keeper:
    """The one process that keeps the run ``record``, and holds its lock. ``pump``: reads the program's output."""

    def __init__(self, runs: Runs, folder: Path, record: RunRecord, pump: int) -> None:
        self._runs, self.record, self.pump = runs, record, pump
        os.set_blocking(pump, False)
        self._output = OutputWriter(folder, record.log_limit)

    def take(self) -> bool:
        """Store what the program wrote; return False when no process can write any more."""
        while True:
            try:
                data = os.read(self.pump, CHUNK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._output.write(data)

    def say(self, line: str) -> None:
        """Add a line of rgpu's own to the output."""
        self._output.write(f"rgpu: {self.record.name}: {line}\n".encode(errors="backslashreplace"))

    def trouble(self, what: str) -> None:
        """Record what happened to the supervisor or the agent."""
        self._change(trouble=f"{self.record.trouble}; {what}" if self.record.trouble else what)

    def end(self, exit_code: int | None, reason: str) -> None:
        """Store the rest of the output, then record the end."""
        until = time.monotonic() + DRAIN_SECONDS
        poller = select.poll()
        poller.register(self.pump, select.POLLIN)
        while self.take() and (left := until - time.monotonic()) > 0:
            poller.poll(left * 1000)
        self._output.close()
        self._change(ended=time.time(), exit_code=exit_code, reason=reason[:4000])

    def _change(self, **fields: object) -> None:
        self.record = msgspec.structs.replace(self.record, **fields)
        with contextlib.suppress(OSError, RgpuError):  # a full disk: the record lacks the end then
            self._runs.save(self.record)
