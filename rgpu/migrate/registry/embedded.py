"""The embedded registry for an event loop: the file is used from threads (OWNERSHIP 11).

One thread runs the callers' requests one after the other, so that an fsync
never blocks the loop. A second thread, started with the first watch, wakes the watches
when a process has committed or a lease has ended; they then read the change log
independently of each other. It is woken by the kernel's notice of commits
(:attr:`Store.sign_path`, inotify). It also polls (``PRAGMA data_version``, a read of
shared memory): every two seconds, because a writer may be suspended right after its
commit, and every 20 ms where inotify is not available.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from rgpu.link.inotify import CLOSED, MODIFIED, FileWatch
from rgpu.migrate.registry.base import Change, Compare, Entry, Listing, Operation, Put, TxnResult, require
from rgpu.migrate.registry.clock import NANOSECOND, boot_time_ns
from rgpu.migrate.registry.store import Store
from rgpu.session.errors import PoolUnavailable, RgpuError

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.02  #: between two polls without inotify
LOOK_SECONDS = 2.0  #: between two polls with inotify
TOGETHER_SECONDS = 0.005  #: commits within this time wake the watches once

T = TypeVar("T")


class EmbeddedRegistry:
    """Implements :class:`rgpu.migrate.registry.base.Registry`. Make it with :meth:`open`."""

    def __init__(self, store: Store, executor: ThreadPoolExecutor) -> None:
        self._store = store
        self._executor = executor
        self.path = store.path
        self.cluster_id = store.cluster_id
        self._loop = asyncio.get_running_loop()
        self._watches: set[asyncio.Event] = set()
        self._poller: threading.Thread | None = None
        self._closing = threading.Event()
        self._closer = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  #: readable once the registry closes

    @classmethod
    async def open(cls, path: Path | str) -> EmbeddedRegistry:
        """Open, or create, the registry's file. Raises what :class:`Store` raises."""
        executor = ThreadPoolExecutor(1, "registry")
        try:
            store = await asyncio.get_running_loop().run_in_executor(executor, Store, Path(path))
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(store, executor)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the registry's thread. The outcome for a cancelled caller is not known."""
        if self._closing.is_set():
            raise PoolUnavailable(f"the registry at {self.path} is closed")
        return await self._loop.run_in_executor(self._executor, function, *arguments)

    async def revision(self) -> int:
        """Return the registry's revision."""
        return await self._run(self._store.revision)

    async def get(self, key: str) -> Entry | None:
        """Return a key's entry; None: it does not exist."""
        return await self._run(self._store.get, key)

    async def list(self, prefix: str) -> Listing:
        """Return all entries under a prefix as of one revision."""
        return await self._run(self._store.list, prefix)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TxnResult:
        """Apply operations if all compares hold, in one transaction."""
        return await self._run(self._store.txn, compares, operations)

    async def put_if(self, compare: Compare, value: bytes, lease: int = 0) -> int:
        """Put a value if the compare holds; returns the revision. Raises :class:`Conflict` if it does not."""
        return require(await self.txn([compare], [Put(compare.key, value, lease)]), f"put of {compare.key}")

    async def lease_grant(self, ttl: float) -> int:
        """Grant a lease of ``ttl`` seconds; returns its id."""
        return await self._run(self._store.lease_grant, ttl)

    async def keepalive(self, lease: int) -> float:
        """Renew a lease; returns the seconds granted. Raises :class:`NotFound`."""
        return await self._run(self._store.keepalive, lease)

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and remove its keys."""
        await self._run(self._store.lease_revoke, lease)

    async def compact(self, revision: int) -> None:
        """Forget the history up to a revision."""
        await self._run(self._store.compact, revision)

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[Change]:
        """Yield changes under a prefix from a revision on (0: from now on)."""
        wake = asyncio.Event()
        self._watches.add(wake)
        try:
            self._start_poller()
            following = from_revision or await self.revision() + 1
            while True:
                wake.clear()
                changes, following = await self._run(self._store.changes, prefix, following)
                for change in changes:
                    yield change
                if not changes:
                    await wake.wait()
        finally:
            self._watches.discard(wake)

    async def close(self) -> None:
        """Close the file; watches end with :class:`PoolUnavailable`."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._closer, 1)
        self._wake()
        if self._poller is not None:
            await self._loop.run_in_executor(None, self._poller.join)
        os.close(self._closer)
        await self._loop.run_in_executor(self._executor, self._store.close)
        self._executor.shutdown(wait=False)

    # -- the poller -------------------------------------------------------------
    def _start_poller(self) -> None:
        if self._poller is None:
            # The watch begins before the first read, so that no commit is missed between them.
            self._poller = threading.Thread(target=self._poll, args=(_signs(self._store),), daemon=True,
                                            name="registry-poll")
            self._poller.start()

    def _wake(self) -> None:
        for wake in list(self._watches):
            wake.set()

    def _poll(self, signs: FileWatch | None) -> None:
        """Wake the watches after every commit of any process, and end leases that are over.

        It has a connection of its own, because data_version changes only by commits of *other* connections. A
        registry that cannot be read also wakes the watches, so that they raise the error themselves.
        """
        store: Store | None = None
        seen: int = -1
        expiry: int | None = 0  # read in the first turn
        try:
            while self._pause(signs, expiry):
                try:
                    store = store or Store(self.path)
                    if expiry is not None and expiry <= boot_time_ns():
                        expiry = store.next_expiry()  # it may have been renewed, which is no commit
                        if expiry is not None and expiry <= boot_time_ns():
                            store.expire()
                            seen = -1  # a commit of this connection does not change its data_version
                    version = store.data_version()
                    if version == seen:
                        continue
                    seen, expiry = version, store.next_expiry()
                except RgpuError:
                    pass
                try:
                    self._loop.call_soon_threadsafe(self._wake)
                except RuntimeError:
                    break  # the loop is closed
        finally:
            if store is not None:
                store.close()
            if signs is not None:
                signs.close()

    def _pause(self, signs: FileWatch | None, expiry: int | None) -> bool:
        """Wait for a possible commit, or the end of a lease (``expiry``, ns); False: the registry closes."""
        if signs is None:
            return not self._closing.wait(POLL_SECONDS)
        seconds = LOOK_SECONDS
        if expiry is not None:
            seconds = min(seconds, max(0.0, (expiry - boot_time_ns()) / NANOSECOND))
        poll = select.poll()
        poll.register(signs, select.POLLIN)
        poll.register(self._closer, select.POLLIN)
        poll.poll(math.ceil(seconds * 1000))
        if not self._closing.is_set() and signs.drain():
            self._closing.wait(TOGETHER_SECONDS)
            signs.drain()
        return not self._closing.is_set()


def _signs(store: Store) -> FileWatch | None:
    """Return the inotify watch for commits; None where inotify is not available."""
    signs = None
    try:
        signs = FileWatch()
        signs.add(store.sign_path, MODIFIED | CLOSED)
    except OSError as error:
        log.warning("commits of the registry are looked for: the kernel does not tell of them", path=str(store.path),
                    reason=str(error), interval_s=POLL_SECONDS)
        if signs is not None:
            signs.close()
        return None
    return signs
