"""Recording effects (:mod:`rgpu.session.effects`): off unless ``RGPU_EFFECTS`` names a folder.

Each process writes one file for each session, a record with one ``write``, so
that what a process did is known up to the moment in which it was killed. A run
of calls is one record: it is written when the run ends, and at the latest
before an answer is sent that depends on it.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from pathlib import Path

from rgpu.link.loggers import get_logger
from rgpu.session.effects import LONGEST_NOTE, MAGIC, Effect, Header, Kind, pack

log = get_logger(__name__)

_FOLDER = os.environ.get("RGPU_EFFECTS")
_leaders: dict[tuple[str, str], EffectsLog] = {}


class EffectsLog:
    """The file of one session in a process. Any thread may write; a disk that fails ends the log, never the session."""

    def __init__(self, folder: Path, who: str, session: str, host: str = "") -> None:
        """Create the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        words = "-".join(re.sub(r"[^A-Za-z0-9._]", "~", word) for word in (who, host, session) if word)
        self._lock = threading.Lock()
        self._position = 0  #: of the last call that was written or is in the run
        self._run: tuple[int, int] | None = None  #: epoch and first call of a run that is not written yet
        self._fd = os.open(folder / f"{words}-{os.getpid()}-{secrets.token_hex(2)}.effects",
                           os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._write(MAGIC + pack(Header(1, who, session, host, os.getpid(), _boot_id())))

    def note(self, kind: Kind, epoch: int, position: int, note: str = "") -> None:
        """Write one effect, after the run of calls before it."""
        with self._lock:
            self._write(self._ended_run() + _effect(kind, epoch, position, position, note))
            if kind in (Kind.BEGUN, Kind.REBUILT):
                self._position = position

    def reached(self, epoch: int, position: int) -> None:
        """Note that the calls up to ``position`` are applied, or are about to be; written later."""
        with self._lock:
            if position <= self._position:
                return
            if self._run is not None and self._run[0] != epoch:
                self._write(self._ended_run())
            if self._run is None:
                self._run = (epoch, self._position + 1)
            self._position = position

    def applying(self, epoch: int, seq: int) -> None:
        """Note that one call is applied; a gap before it is written as one."""
        with self._lock:
            if self._run is not None and (self._run[0] != epoch or seq != self._position + 1):
                self._write(self._ended_run())
            if self._run is None:
                self._run = (epoch, seq)
            self._position = seq

    def flush(self) -> None:
        """Write the run of calls."""
        with self._lock:
            self._write(self._ended_run())

    def close(self) -> None:
        """Write the run of calls and close the file."""
        with self._lock:
            self._write(self._ended_run())
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _ended_run(self) -> bytes:
        run, self._run = self._run, None
        return b"" if run is None else _effect(Kind.APPLIED, run[0], run[1], self._position)

    def _write(self, data: bytes) -> None:
        if data and self._fd >= 0:
            try:
                os.write(self._fd, data)
            except OSError as error:
                log.error("effects are not written any more", reason=str(error))
                os.close(self._fd)
                self._fd = -1


def open_log(who: str, session: str, host: str = "") -> EffectsLog | None:
    """Return the log of this process for a session; None where none is requested, or it cannot be created."""
    if _FOLDER is None:
        return None
    try:
        return EffectsLog(Path(_FOLDER), who, session, host)
    except OSError as error:
        log.error("effects are not written", reason=str(error))
        return None


def publishing(host: str, session: str, epoch: int, position: int, checkpoint: str) -> None:
    """Note that a leader is about to publish a checkpoint."""
    if _FOLDER is None:
        return
    found = _leaders.get((host, session)) or open_log("leader", session, host)
    if found is not None:
        _leaders[host, session] = found
        found.note(Kind.PUBLISHING, epoch, position, checkpoint)


def _effect(kind: Kind, epoch: int, first: int, last: int, note: str = "") -> bytes:
    return pack(Effect(kind, time.clock_gettime_ns(time.CLOCK_BOOTTIME), epoch, first, last, note[:LONGEST_NOTE]))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
