"""Spilled parts of the journal: files of some megabytes, read again by position."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rgpu.session.errors import StoreError
from rgpu.session.journal.journal_file import JournalFileWriter, encode_header

if TYPE_CHECKING:
    from rgpu.client.shim_link.segments import Run


@dataclass(frozen=True, slots=True)
class SpillJob:
    """The oldest runs in memory, to be written to a file in ``directory``."""

    runs: tuple[Run, ...]
    directory: Path


class SpillFile:
    """A journal file that holds runs, from offset ``start`` on."""

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        self.start = start
        self.runs = 0

    def settle(self) -> None:
        """Delete the file if it holds no run. Called once all of its runs are known, and when one is dropped."""
        if self.runs == 0:
            self.path.unlink(missing_ok=True)


class FiledRun:
    """A run whose bytes are in a file, which is opened for each read: there may be thousands of files."""

    __slots__ = ("first", "last", "size", "_file", "_offset")

    def __init__(self, first: int, last: int, file: SpillFile, offset: int, size: int) -> None:
        self.first, self.last, self.size = first, last, size
        self._file, self._offset = file, offset
        file.runs += 1

    def read(self, offset: int, limit: int) -> list[Any]:
        """Return ``limit`` bytes at most from ``offset`` on. Raises :class:`StoreError` for a missing or short file."""
        count = min(limit, self.size - offset)
        try:
            fd = os.open(self._file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, count, self._offset + offset)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreError(f"the journal file {self._file.path} cannot be read: {error}") from error
        if len(data) != count:
            raise StoreError(f"the journal file {self._file.path} is shorter than what was written")
        return [data]

    def drop(self) -> None:
        """Drop the run; the file is deleted with its last run."""
        self._file.runs -= 1
        self._file.settle()


def write_segment(job: SpillJob, session: str) -> tuple[SpillFile | None, str]:
    """Write a job's runs to a journal file: (file, "") or (None, why not). For a helper thread.

    The file is renamed to its final name once it is complete and on the disk, and the
    directory is synced then: after a power failure a journal is short, never wrong.
    """
    path = job.directory / f"{job.runs[0].first:016d}-{job.runs[-1].last:016d}.rgpuj"
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.unlink(missing_ok=True)
        with JournalFileWriter(aside, session, job.runs[0].first) as writer:
            start = len(encode_header(session, job.runs[0].first))
            for run in job.runs:
                writer.append_packed(run.read(0, run.size), run.first, run.last - run.first + 1)
            writer.close(durable=True)
        os.rename(aside, path)
        _sync_directory(path.parent)
        return SpillFile(path, start), ""
    except (OSError, ValueError) as error:
        for left in (aside, path):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
        return None, str(error)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
