"""The agent's side of a detached run: it reports the end to its supervisor, and keeps the run once that has died."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
from pathlib import Path

import msgspec

from rgpu.client.detached.channels import Supervised
from rgpu.client.detached.keeping import Keeper
from rgpu.link.local.processes import signal_program
from rgpu.link.loggers import get_logger
from rgpu.link.runs.folder import Runs, process
from rgpu.session.errors import RgpuError

log = get_logger(__name__)

PATIENCE = 10.0  #: seconds for a killed supervisor to have ended
SUPERVISOR_DIED = "its supervisor died, its agent went on"


class Standby:
    """The agent's end of the channels to its supervisor."""

    def __init__(self, shared: Supervised) -> None:
        shared.keep_private()
        self.output = shared.output
        self._shared = shared
        self._over = threading.Event()
        self._keeper: Keeper | None = None
        self._end: tuple[int, str] | None = None  #: exit code, reason
        self._lock = threading.Lock()

    def started(self, pid: int) -> None:
        """Note that the program runs: the agent's messages go to its output from now on, and no terminal is held."""
        for fd in (1, 2):
            os.dup2(self.output, fd)
        os.close(self.output)  # the program's and this process's 1 and 2 are left: the output ends with all of them
        threading.Thread(target=self._watch, args=(pid,), name="standby", daemon=True).start()

    def _watch(self, pid: int) -> None:
        """Wait for the supervisor's end, then do its work."""
        poller = select.poll()
        poller.register(self._shared.life, select.POLLIN)
        while not poller.poll(500):
            if self._over.is_set():
                return
        with self._lock:
            if self._over.is_set():
                return
            try:
                self._keeper = self._succeed()
            except (OSError, RgpuError) as error:
                log.error("a detached run whose supervisor died is not on record: its program is ended",
                          run=self._shared.name, reason=str(error))
                with contextlib.suppress(ProcessLookupError):
                    signal_program(pid, signal.SIGTERM)
        self._pump()

    def _succeed(self) -> Keeper:
        """Take over the supervisor's work. Raises OSError, :class:`RgpuError` where the run cannot be kept."""
        runs = Runs(Path(self._shared.root))
        runs.claim(self._shared.name, PATIENCE)  # held until this process ends
        known = runs.run(self._shared.name)
        record = msgspec.structs.replace(known.record(), supervisor=process(os.getpid()))
        keeper = Keeper(runs, known.folder, record, self._shared.pump)
        keeper.trouble(SUPERVISOR_DIED)
        log.warning("a detached run's supervisor died", run=self._shared.name)
        return keeper

    def _pump(self) -> None:
        poller = select.poll()
        poller.register(self._shared.pump, select.POLLIN)
        while not self._over.is_set():
            if poller.poll(200):
                with self._lock:
                    if self._over.is_set():
                        return
                    if self._keeper is None:
                        with contextlib.suppress(OSError):
                            os.read(self._shared.pump, 1 << 16)  # discarded: a program being ended does not block
                    else:
                        self._keeper.take()

    def exited(self, exit_code: int, reason: str) -> None:
        """Report the program's end to the supervisor; its session has not ended yet."""
        self._end = exit_code, reason
        word = json.dumps({"ended": {"exit_code": exit_code, "reason": reason}}).encode() + b"\n"
        with contextlib.suppress(OSError):  # the supervisor died: this process records the end itself
            os.write(self._shared.word, word)

    def close(self) -> None:
        """Finish: the session has ended too, and this process is about to. Record the end if the supervisor died."""
        with self._lock:
            self._over.set()
            if self._end is None:
                return
            for fd in (1, 2):  # this process writes nothing more to the output
                _to_null(fd)
            if self._keeper is None and self._alone():
                with contextlib.suppress(OSError, RgpuError):
                    self._keeper = self._succeed()
            if self._keeper is not None:
                self._keeper.end(*self._end)

    def _alone(self) -> bool:
        poller = select.poll()
        poller.register(self._shared.life, select.POLLIN)
        return bool(poller.poll(0))


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, fd)
    os.close(null)
