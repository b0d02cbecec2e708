"""The module binaries that a node has received, on disk, so that no client sends one twice.

One directory serves all workers of a node. A file's name is the BLAKE3 hash of
its content, which is verified when it is read: a file that does not match is
deleted and counts as absent. The cache is never
required: on a full or broken disk the module binaries are sent again.

Writing: a temporary file, locked (flock) by its writer as long as it lives,
flushed, renamed. Making room and making temporary files happen under the
directory's own lock; a temporary file that is not locked is left from a crash.
The bound counts temporary files at their full size. The least recently used file
(modification time) is evicted first.

A client that names a hash gets the module with that hash loaded, so a session can find out
which module binaries other sessions of the node sent. They share a pool, and its keys, already.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3

from rgpu.link.data.module_refs import SMALLEST

log = structlog.get_logger(__name__)

DEFAULT_SIZE = 4 << 30  #: bytes
PENDING = 256 << 20  #: bytes that may wait to be written; binaries beyond that are not kept
_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = ".tmp"
_LOCK = "lock"


@dataclass
class Counters:
    """Counters of this process. ``saved``: bytes that a client did not have to send."""

    hits: int = 0
    misses: int = 0
    saved: int = 0
    stored: int = 0
    evicted: int = 0
    damaged: int = 0


@dataclass
class ModuleCache:
    """See the module docstring. Thread-safe. ``limit``: bytes in the directory; 0 keeps nothing."""

    directory: Path
    limit: int = DEFAULT_SIZE
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._pending = 0  #: bytes in the queue or being written
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._told: set[int] = set()  #: errors that were logged

    # -- reading ------------------------------------------------------------------------
    def has(self, digest: bytes) -> bool:
        """Whether the binary is there, without reading it; it counts as used, so that it is not evicted soon."""
        try:
            os.utime(self.directory / digest.hex())
        except OSError:
            return False
        return self.limit > 0

    def get(self, digest: bytes) -> bytes | None:
        """The verified content with that hash; None where the node does not hold it."""
        data = self._read(self.directory / digest.hex(), digest) if self.limit > 0 else None
        if data is None:
            self.counters.misses += 1
        else:
            self.counters.hits += 1
            self.counters.saved += len(data)
        return data

    def _read(self, path: Path, digest: bytes) -> bytes | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain("cannot read", error)
            return None
        with open(descriptor, "rb") as file:
            try:
                data = file.read()
                if blake3(data).digest() == digest:
                    os.utime(file.fileno())
                    return data
                self.counters.damaged += 1
                log.error("a cached module is damaged and is deleted", name=path.name, size=len(data))
                with self._locked():
                    if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                        os.unlink(path)
            except OSError as error:
                self._complain("cannot read", error)
        return None

    # -- writing ------------------------------------------------------------------------
    def keep(self, data: bytes) -> None:
        """Queue a binary to be written, if it has :data:`SMALLEST` bytes at least.

        One that does not fit in the queue is discarded.
        """
        if not SMALLEST <= len(data) <= self.limit:
            return
        with self._changed:
            if self._pending + len(data) > max(PENDING, len(data)):
                return
            self._pending += len(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="module-cache", daemon=True)
                self._writer.start()
        self._queue.put(data)

    def _write_all(self) -> None:
        while True:
            data = self._queue.get()
            try:
                self.put(data)
            except Exception:
                log.exception("the module cache failed; the session goes on without")
            with self._changed:
                self._pending -= len(data)
                self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything was written; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    def put(self, data: Any) -> bool:
        """Write a binary that is not there yet; False where that failed. Disk errors are logged, not raised."""
        if len(data) > self.limit:
            return False
        digest = blake3(data).digest()
        if self.has(digest):
            return True
        temporary = None
        try:
            with self._locked():
                if not self._make_room(len(data)):
                    return False
                temporary, descriptor = self._reserve(len(data))
            with open(descriptor, "r+b", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view):]
                os.fsync(file.fileno())
                os.rename(temporary, self.directory / digest.hex())
        except OSError as error:
            self._complain("cannot keep a module in", error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            return False
        self.counters.stored += 1
        return True

    def _reserve(self, size: int) -> tuple[Path, int]:
        """Make a temporary file of ``size`` bytes, locked by its descriptor. The directory is locked."""
        path = self.directory / f"{secrets.token_hex(8)}{_TEMPORARY}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._share(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return path, descriptor

    # -- the bound ----------------------------------------------------------------------
    def _make_room(self, size: int) -> bool:
        """Evict until ``size`` more bytes fit. The directory is locked."""
        total, files = size, []
        with os.scandir(self.directory) as found:
            for entry in found:
                status = _status(entry)
                if status is None:
                    continue
                if entry.name.endswith(_TEMPORARY):
                    if not _abandoned(entry.path):
                        total += status.st_size
                elif _NAME.fullmatch(entry.name):
                    total += status.st_size
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        files.sort(reverse=True)
        while total > self.limit and files:
            _, freed, path = files.pop()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= freed
            self.counters.evicted += 1
        return total <= self.limit

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._share(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _share(self, descriptor: int) -> None:
        """Let the folder's group use a file where the folder is setgid: each worker then has a user of its own."""
        if os.stat(self.directory).st_mode & stat.S_ISGID:
            with contextlib.suppress(PermissionError):  # another user's file: that user has done so
                os.fchmod(descriptor, 0o660)

    def _complain(self, what: str, error: OSError) -> None:
        """Log an error once for each errno: a full disk would fill the log as well."""
        if error.errno not in self._told:
            self._told.add(error.errno or 0)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            log.warning(f"{what} the module cache; module binaries are sent again", directory=str(self.directory),
                        reason="the disk is full" if full else str(error))

    def statistics(self) -> dict[str, int]:
        """Figures for ``rgpu ps``: what this worker found and kept."""
        return dict(vars(self.counters))


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _abandoned(path: str) -> bool:
    """Whether a temporary file's writer has ended; the file is then deleted."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            os.unlink(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
