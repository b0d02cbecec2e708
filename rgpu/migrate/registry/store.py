"""The embedded registry's file: SQLite, used by several processes of one host at once.

Its calls block; :mod:`rgpu.migrate.registry.embedded` calls it from a thread, the
lease keeper uses it directly.

Write-ahead log, not rollback journal: readers (watches above all) never wait
for a writer, and a commit costs one fsync instead of three. SQLite before
3.51.3 can lose a commit in that mode when one connection commits while another
resets the log (sqlite.org/wal.html, "the WAL-reset bug"); so every writer and
every checkpoint of the log also holds a lock on ``FILE.lock``. It is a flock: the
kernel releases it when the holder is killed. synchronous=FULL: a commit that was
acknowledged survives power loss. Renewals of leases are not commits: they are in
``FILE.leases`` (:mod:`rgpu.migrate.registry.lease_file`).

After each commit one byte is written to ``FILE.lock``; processes that wait for commits
watch that file with inotify. The log itself is not suitable for this, because it
changes before its commit can be read.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rgpu.migrate.registry.base import (
    Change,
    Compacted,
    Compare,
    Delete,
    Entry,
    Event,
    Listing,
    Operation,
    Put,
    Target,
    TxnResult,
    check_txn,
)
from rgpu.migrate.registry.clock import NANOSECOND, boot_id, boot_time_ns
from rgpu.migrate.registry.flock import held
from rgpu.migrate.registry.lease_file import LeaseFile
from rgpu.migrate.registry.place import prepare
from rgpu.session.errors import NotFound, PoolUnavailable, UnknownOutcome, VersionMismatch

SCHEMA_VERSION = 2  #: in version 1 renewals were in the rows of leases
KEEP_CHANGES = 10_000  #: least number of revisions that a watch can resume over
_COMPACT_EVERY = 1_000
LOCK_SECONDS = 5.0

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL,
                      mod_revision INTEGER NOT NULL, lease INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX entries_of_lease ON entries (lease) WHERE lease != 0;
CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, boot TEXT NOT NULL, deadline INTEGER NOT NULL,
                     ttl INTEGER NOT NULL);
CREATE TABLE changes (revision INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
                      create_revision INTEGER NOT NULL, lease INTEGER NOT NULL,
                      PRIMARY KEY (revision, number)) WITHOUT ROWID;
"""

T = TypeVar("T")
Changes = list[Change]

class Store:
    """Connection to the file. For one thread at a time."""

    def __init__(self, path: Path, lock_seconds: float = LOCK_SECONDS) -> None:
        """Open the file; create what is missing.

        Raises :class:`Refused`, :class:`PoolUnavailable`, :class:`VersionMismatch`.
        """
        self.path = Path(path)
        self._lock_seconds = lock_seconds
        prepare(self.path)
        self._lock_fd = os.open(self.sign_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._leases = LeaseFile(self.path.with_name(f"{self.path.name}.leases"), lock_seconds)
        except OSError as error:
            os.close(self._lock_fd)
            raise PoolUnavailable(f"the registry's leases beside {path} cannot be opened: {error}",
                                  path=str(path)) from error
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=lock_seconds)
            with self._locked():
                self._prepare()
            self.cluster_id = str(self._meta("cluster_id"))
        except sqlite3.Error as error:
            self._let_go()
            raise PoolUnavailable(f"the registry at {path} cannot be opened: {error}", path=str(path)) from error
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        os.close(self._lock_fd)
        self._leases.close()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise VersionMismatch(f"the registry at {self.path} has schema {version}; this program reads "
                                  f"{SCHEMA_VERSION}", found=version, known=SCHEMA_VERSION)
        if version == 0:
            identity = secrets.token_hex(8)
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('cluster_id', '{identity}'), ('revision', 1), "
                f"('compacted', 0); PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version < SCHEMA_VERSION:  # the same tables, but a process of that version would end renewed leases
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the database."""
        try:
            with self._locked():  # SQLite checkpoints the log when the last connection closes
                self._db.close()
        except PoolUnavailable:
            self._db.close()
        self._let_go()

    # -- reading ----------------------------------------------------------------
    def revision(self) -> int:
        """Return the registry's revision; expired leases are ended first."""
        self._expire_if_due()
        return int(self._read(lambda: self._meta("revision")))

    def get(self, key: str) -> Entry | None:
        """Return a key's entry; None: it does not exist."""
        self._expire_if_due()
        return self._read(lambda: self._entry(key))

    def list(self, prefix: str) -> Listing:
        """Return all entries under a prefix as of one revision."""
        self._expire_if_due()

        def body() -> Listing:
            with self._snapshot():
                rows = self._db.execute(
                    "SELECT key, value, create_revision, mod_revision, lease FROM entries "
                    "WHERE key >= ? AND substr(key, 1, ?) = ? ORDER BY key", (prefix, len(prefix), prefix))
                return Listing(int(self._meta("revision")), tuple(Entry(*row) for row in rows))

        return self._read(body)

    def changes(self, prefix: str, from_revision: int, limit: int = 500) -> tuple[Changes, int]:
        """Return whole changes from that revision on (about ``limit`` events), and the revision to read next.

        Raises :class:`Compacted`.
        """

        def body() -> tuple[Changes, int]:
            with self._snapshot():
                compacted, last = int(self._meta("compacted")), int(self._meta("revision"))
                if from_revision <= compacted:
                    raise Compacted(f"changes up to revision {compacted} are not kept; {from_revision} was asked for",
                                    oldest=compacted + 1)
                rows = self._db.execute(
                    "SELECT revision, key, value, create_revision, lease FROM changes WHERE revision >= ? "
                    "AND substr(key, 1, ?) = ? ORDER BY revision, number", (from_revision, len(prefix), prefix))
                return _grouped(rows, limit, max(from_revision, last + 1))

        return self._read(body)

    @property
    def sign_path(self) -> Path:
        """Path of the file that is written to after each commit, or closed by a writer that dies before that."""
        return Path(f"{self.path}.lock")

    def data_version(self) -> int:
        """Return a number that changes when another connection has committed. Cheap: a read of shared memory."""
        return int(self._read(lambda: self._db.execute("PRAGMA data_version").fetchone()[0]))

    def next_expiry(self) -> int | None:
        """Return the CLOCK_BOOTTIME in ns when the first lease ends; None without leases."""
        rows = self._read(lambda: self._db.execute("SELECT id, boot, deadline FROM leases").fetchall())
        boot = boot_id()
        return min((self._leases.deadline(lease, deadline) if of == boot else 0 for lease, of, deadline in rows),
                   default=None)

    # -- changing ---------------------------------------------------------------
    def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        """Apply operations if all compares hold, in one transaction."""
        check_txn(compares, operations)
        with self._transaction():
            if not all(_holds(compare, self._entry(compare.key)) for compare in compares):
                found = {compare.key: self._entry(compare.key) for compare in compares}
                return TxnResult(False, int(self._meta("revision")), found)
            for operation in operations:
                if isinstance(operation, Put) and operation.lease:
                    self._lease(operation.lease)
            return TxnResult(True, self._apply(operations))

    def lease_grant(self, ttl: float) -> int:
        """Grant a lease of ``ttl`` seconds; returns its id. Raises ValueError outside 0.05 s to a day."""
        if not 0.05 <= ttl <= 86400:
            raise ValueError(f"a lease of {ttl} s; 0.05 s to a day allowed")
        with self._transaction():
            length = int(ttl * NANOSECOND)
            cursor = self._db.execute("INSERT INTO leases (boot, deadline, ttl) VALUES (?, ?, ?)",
                                      (boot_id(), boot_time_ns() + length, length))
            lease = int(cursor.lastrowid or 0)
            self._leases.granted(lease)
            return lease

    def keepalive(self, lease: int) -> float:
        """Renew a lease; returns the seconds granted. Raises :class:`NotFound`."""
        row = self._read(lambda: self._db.execute("SELECT boot, deadline, ttl FROM leases WHERE id = ?",
                                                  (lease,)).fetchone())
        if row is None or row[0] != boot_id():
            raise NotFound(f"lease {lease} has ended", lease=lease)
        self._leases.renew(lease, row[1], row[2])
        return int(row[2]) / NANOSECOND

    def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        with self._transaction():
            self._end_leases([lease])

    def compact(self, revision: int) -> None:
        """Forget the history up to a revision."""
        with self._transaction():
            self._compact(min(revision, int(self._meta("revision"))))

    def expire(self) -> None:
        """End the leases whose deadline has passed."""
        with self._transaction():
            pass  # every transaction begins by ending such leases

    # -- inside a transaction -----------------------------------------------------
    def _apply(self, operations: Sequence[Operation]) -> int:
        """Apply operations at the next revision; one that changes nothing gets no revision. Return the revision."""
        last = int(self._meta("revision"))
        revision, number = last + 1, 0
        for operation in operations:
            old = self._entry(operation.key)
            if isinstance(operation, Delete):
                if old is None:
                    continue
                self._db.execute("DELETE FROM entries WHERE key = ?", (operation.key,))
                row: tuple[Any, ...] = (revision, number, operation.key, None, 0, 0)
            else:
                create = old.create_revision if old else revision
                self._db.execute("REPLACE INTO entries VALUES (?, ?, ?, ?, ?)",
                                 (operation.key, operation.value, create, revision, operation.lease))
                row = (revision, number, operation.key, operation.value, create, operation.lease)
            self._db.execute("INSERT INTO changes VALUES (?, ?, ?, ?, ?, ?)", row)
            number += 1
        if not number:
            return last
        self._set_meta("revision", revision)
        if revision % _COMPACT_EVERY == 0:
            self._compact(revision - KEEP_CHANGES)
        return revision

    def _compact(self, revision: int) -> None:
        if revision > int(self._meta("compacted")):
            self._db.execute("DELETE FROM changes WHERE revision <= ?", (revision,))
            self._set_meta("compacted", revision)

    def _lease(self, lease: int) -> int:
        """Return the granted ns of a live lease. Raises :class:`NotFound`."""
        row = self._db.execute("SELECT ttl FROM leases WHERE id = ?", (lease,)).fetchone()
        if row is None:
            raise NotFound(f"lease {lease} has ended", lease=lease)
        return int(row[0])

    def _end_leases(self, leases: Sequence[int]) -> None:
        for lease in leases:
            keys = self._db.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall()
            self._apply([Delete(key) for (key,) in keys])
            self._db.execute("DELETE FROM leases WHERE id = ?", (lease,))

    def _over(self) -> Sequence[int]:
        """Return the leases whose deadline has passed; they can no longer be renewed."""
        boot, now = boot_id(), boot_time_ns()
        rows = self._db.execute("SELECT id, boot, deadline FROM leases WHERE boot != ? OR deadline <= ?",
                                (boot, now)).fetchall()
        due = self._leases.end_due([(lease, deadline) for lease, of, deadline in rows if of == boot], now)
        return [lease for lease, of, _ in rows if of != boot] + due

    def _expire_if_due(self) -> None:
        """End due leases before a read: it must not return the keys of an ended lease, nor the revision before."""
        due = self.next_expiry()
        if due is not None and due <= boot_time_ns():
            self.expire()

    def _entry(self, key: str) -> Entry | None:
        row = self._db.execute("SELECT key, value, create_revision, mod_revision, lease FROM entries WHERE key = ?",
                               (key,)).fetchone()
        return None if row is None else Entry(*row)

    def _meta(self, name: str) -> int | str:
        return self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[0]

    def _set_meta(self, name: str, value: int) -> None:
        self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))

    # -- locks and errors -----------------------------------------------------------
    def _locked(self) -> AbstractContextManager[None]:
        """Hold the writers' lock. Raises :class:`PoolUnavailable` after ``lock_seconds`` (its holder is frozen)."""
        return held(self._lock_fd, self._lock_seconds, 0.004, f"the registry at {self.path}", self.path)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run one write transaction: due leases are ended, then the body runs, then the commit.

        Raises :class:`PoolUnavailable` when nothing was changed, :class:`UnknownOutcome` when only
        the result of the commit is missing.
        """
        with self._locked():
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._end_leases(self._over())
                # An error of the body (such as a lease that ended) must not undo the expiry.
                self._db.execute("SAVEPOINT body")
            except sqlite3.Error as error:
                self._rollback()
                raise PoolUnavailable(f"the registry at {self.path} fails: {error}", path=str(self.path)) from error
            try:
                yield
            except sqlite3.Error as error:
                self._rollback()
                raise PoolUnavailable(f"the registry at {self.path} fails: {error}", path=str(self.path)) from error
            except NotFound:
                self._db.execute("ROLLBACK TO body")
                self._commit()
                raise
            except BaseException:
                self._rollback()
                raise
            self._commit()

    def _commit(self) -> None:
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            raise UnknownOutcome(f"the registry at {self.path} failed while it committed: {error}") from error
        # A holder that dies before this closes the file, which inotify reports as well.
        with suppress(OSError):  # the file system is full: the others poll, only later
            os.pwrite(self._lock_fd, b"\0", 0)

    def _rollback(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the connection's next BEGIN raises the error

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._rollback()

    def _read(self, body: Callable[[], T]) -> T:
        try:
            return body()
        except sqlite3.Error as error:
            raise PoolUnavailable(f"the registry at {self.path} cannot be read: {error}",
                                  path=str(self.path)) from error


def _holds(compare: Compare, entry: Entry | None) -> bool:
    if compare.target is Target.VALUE:
        return entry is not None and entry.value == compare.operand
    if entry is None:
        return compare.operand == 0
    return compare.operand == (entry.mod_revision if compare.target is Target.MOD else entry.create_revision)


def _grouped(rows: Iterator[Any], limit: int, caught_up: int) -> tuple[list[Change], int]:
    """Group rows of the change log into whole changes; the limit never splits a revision."""
    changes: list[Change] = []
    events: list[Event] = []
    current, count = 0, 0
    for revision, key, value, create, lease in rows:
        if revision != current:
            if events:
                changes.append(Change(current, tuple(events)))
                if count >= limit:
                    return changes, revision
            current, events = revision, []
        events.append(Event(key, None if value is None else Entry(key, value, create, revision, lease)))
        count += 1
    if events:
        changes.append(Change(current, tuple(events)))
    return changes, caught_up
