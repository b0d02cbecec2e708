"""The folder of this user's detached runs on this machine, and the process that keeps each run.

``$XDG_STATE_HOME/rgpu/runs`` (``~/.local/state``; setting ``runs_dir``), mode 0700::

    NAME.lock   locked by the process that keeps the run, until it ends, in whatever way
    NAME/       run.json (:mod:`.record`), output-… (:mod:`.output`), supervisor.log
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rgpu.link.keys import check_name
from rgpu.link.local.processes import alive, boot_id, process_start, signal_program
from rgpu.link.private_files import open_own, private_directory, write_file
from rgpu.link.runs import record as records
from rgpu.link.runs.output import OutputReader
from rgpu.link.runs.record import LONGEST, Facts, Process, RunRecord, Standing, standing
from rgpu.session.errors import AlreadyExists, Corrupt, NotFound, Refused, RgpuError, TimedOut, UnknownOutcome

RECORD, LOG = "run.json", "supervisor.log"
LOOK_SECONDS = 0.1
SETTLE_SECONDS = 3.0  #: after a supervisor's death, for its agent to take the run over


def this_host() -> str:
    """Return the name of this machine, as it is in records."""
    return socket.gethostname()


def process(pid: int) -> Process:
    """Return the process that has this pid now."""
    return Process(pid=pid, started=process_start(pid))


class Runs:
    """The runs of one user. ``root``: their folder, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, name: str) -> KnownRun:
        """Return a recorded run. Raises :class:`NotFound`, :class:`UsageError` for an invalid name."""
        found = self._at(name)
        if not found.folder.is_dir():
            raise NotFound(f"no detached run is called {name!r} on this machine", run=name)
        return found

    def names(self) -> list[str]:
        """Return the names of all recorded runs, sorted."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return sorted(entry.name for entry in os.scandir(self.root)
                          if re.match(r"[A-Za-z0-9]", entry.name) and entry.is_dir(follow_symlinks=False))
        return []

    def known(self) -> list[tuple[RunRecord, Standing]]:
        """Return the records that can be read, the newest first, each with its run's state."""
        found = []
        for name in self.names():
            with contextlib.suppress(RgpuError, OSError):
                found.append(self._at(name).look())
        return sorted(found, key=lambda one: -one[0].begun)

    def claim(self, name: str, patience: float = 0.0) -> int:
        """Lock a name for the run that this process keeps; return the descriptor that holds the lock.

        Raises :class:`AlreadyExists` when it is held for longer than ``patience`` seconds.
        """
        path = private_directory(self.root) / f"{check_name(name)}.lock"
        until = time.monotonic() + patience
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(fd)
                    raise AlreadyExists(f"a detached run named {name} is under way on this machine: choose another "
                                        f"name with --name, or end it with 'rgpu signal {name} TERM'",
                                        run=name) from None
            os.close(fd)
            time.sleep(LOOK_SECONDS)

    def put(self, record: RunRecord) -> Path:
        """Create a run's folder, in place of an ended one of that name; the caller holds its lock. Raises OSError."""
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))  # mode 0700
        write_file(new / RECORD, records.encode(record), mode=0o600, replace=True)
        folder = self.root / record.name
        self._discard(folder)
        os.rename(new, folder)
        return folder

    def save(self, record: RunRecord) -> None:
        """Write the record of an existing run; the caller holds its lock. Raises OSError."""
        write_file(self.root / record.name / RECORD, records.encode(record), mode=0o600, replace=True)

    def forget_old(self, keep: int) -> None:
        """Delete the records and outputs of ended runs except the ``keep`` newest. Raises OSError."""
        over = [record for record, now in self.known() if now.over and record.host == this_host()]
        for record in over[keep:]:
            with contextlib.suppress(AlreadyExists):  # one of that name has just been started
                lock = self.claim(record.name)
                try:
                    self._discard(self.root / record.name)
                    (self.root / f"{record.name}.lock").unlink(missing_ok=True)
                finally:
                    os.close(lock)

    def _discard(self, folder: Path) -> None:
        if folder.is_dir() or folder.is_symlink():
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=self.root))
            os.rename(folder, old / "run")
            shutil.rmtree(old, ignore_errors=True)

    def _at(self, name: str) -> KnownRun:
        return KnownRun(self.root, check_name(name))


class KnownRun:
    """A recorded run, for processes that read it.

    ``program``: the run's process, where it is known; a later run of the same name counts as not found.
    """

    def __init__(self, root: Path, name: str, program: Process | None = None) -> None:
        self.name, self.folder = name, root / name
        self.program = program
        self._lock = root / f"{name}.lock"

    def record(self) -> RunRecord:
        """Read its record. Raises :class:`NotFound`, :class:`Corrupt`, :class:`VersionMismatch`."""
        path = self.folder / RECORD
        try:
            fd = open_own(path)
        except FileNotFoundError:
            raise NotFound(f"{path} does not exist: nothing is known of the run {self.name}", run=self.name) from None
        with open(fd, "rb", buffering=0) as file:
            record = records.decode(file.read(LONGEST + 1) or b"", str(path))
        if record.name != self.name:
            raise Corrupt(f"{path} is the record of another run, {record.name!r}", path=str(path), reason="name")
        if self.program not in (None, record.program):
            raise NotFound(f"the run {self.name} of process {self.program.pid if self.program else 0} is not on record "
                           "any more: another one has its name", run=self.name)
        return record

    def look(self) -> tuple[RunRecord, Standing]:
        """Return its record and its present state. Raises as :meth:`record`."""
        kept = self._kept()
        record = self.record()  # after the lock was checked: the keeper of a run writes its end before it unlocks
        return record, standing(record, Facts(
            record.host == this_host(), record.boot == boot_id(), kept,
            alive(record.agent.pid, record.agent.started), alive(record.program.pid, record.program.started)))

    def _kept(self) -> bool:
        try:
            fd = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def output(self, tail: int | None = None) -> OutputReader:
        """Return a reader of the program's stored output, or of its last ``tail`` lines."""
        found = OutputReader(self.folder)
        if tail is not None:
            found.seek_last(tail)
        return found

    def signal(self, number: int) -> int:
        """Send the program and its process group a signal; return its pid.

        Raises :class:`NotFound` where it has ended, :class:`Refused` where it runs on another machine.
        """
        record, _ = self.look()
        if record.host != this_host():
            raise Refused(f"{self.name} runs on {record.host}: send the signal there", run=self.name)
        program = record.program
        try:
            if record.ended or not alive(program.pid, program.started):
                raise ProcessLookupError
            signal_program(program.pid, number)
        except ProcessLookupError:
            raise NotFound(f"the program of {self.name} has ended: there is nothing to signal",
                           run=self.name) from None
        return program.pid

    def ended(self) -> Callable[[], bool]:
        """Return a function that returns whether the run is over; a lost supervisor counts after some seconds."""
        lost: list[float] = []

        def over() -> bool:
            record, now = self.look()
            if now.state != "unknown":
                lost.clear()
                return now.over
            lost.append(time.monotonic())
            return time.monotonic() - lost[0] > SETTLE_SECONDS

        return over

    def wait(self, timeout: float | None = None) -> RunRecord:
        """Return its record once it has ended.

        ``timeout``: in seconds. Raises :class:`TimedOut` (the run continues), :class:`UnknownOutcome` where its end
        is not known, and as :meth:`record`.
        """
        until, over = None if timeout is None else time.monotonic() + timeout, self.ended()
        while not over():
            if until is not None and time.monotonic() > until:
                raise TimedOut(f"{self.name} still runs after {timeout:g} s", run=self.name)
            time.sleep(LOOK_SECONDS)
        return self.end()

    def end(self) -> RunRecord:
        """Return the record of a run that is over. Raises :class:`UnknownOutcome` where its exit code is not known."""
        record, now = self.look()
        if now.state != "ended" or record.exit_code is None:
            raise UnknownOutcome(f"the end of {self.name} is not known: {now.reason}", run=self.name)
        return record
