"""The embedded registry for an event loop: the file behind threads (OWNERSHIP 11).

One thread runs what the caller asks, one after the other, so that an fsync
never holds the loop. One more, started with the first watch, looks every 20 ms
whether any process has committed (``PRAGMA data_version``: a look at shared
memory) or a lease has ended, and wakes the watches; they read the change log
at their own pace.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rgpu.migrate.registry.base import Change, Compare, Entry, Listing, Operation, Put, TxnResult, require
from rgpu.migrate.registry.clock import boot_time_ns
from rgpu.migrate.registry.store import Store
from rgpu.session.errors import PoolUnavailable, RgpuError

POLL_SECONDS = 0.02

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

    @classmethod
    async def open(cls, path: Path | str) -> EmbeddedRegistry:
        """Open, or create, the registry's file. Raises as :class:`Store` does."""
        executor = ThreadPoolExecutor(1, "registry")
        try:
            store = await asyncio.get_running_loop().run_in_executor(executor, Store, Path(path))
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(store, executor)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """In the registry's thread. A caller that is cancelled does not know the outcome."""
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
        self._wake()
        if self._poller is not None:
            await self._loop.run_in_executor(None, self._poller.join)
        await self._loop.run_in_executor(self._executor, self._store.close)
        self._executor.shutdown(wait=False)

    # -- the poller -------------------------------------------------------------
    def _start_poller(self) -> None:
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, daemon=True, name="registry-poll")
            self._poller.start()

    def _wake(self) -> None:
        for wake in list(self._watches):
            wake.set()

    def _poll(self) -> None:
        """Wake the watches after every commit of any process, and end leases that are over.

        It has a connection of its own: data_version tells only what *others* committed. A registry
        that cannot be read wakes them as well, so that they meet the error themselves.
        """
        store: Store | None = None
        seen, expiry = -1, None
        while not self._closing.wait(POLL_SECONDS):
            try:
                store = store or Store(self.path)
                version = store.data_version()
                if expiry is not None and expiry <= boot_time_ns():
                    store.expire()
                    expiry, seen = None, -1  # our own commit does not change our data_version
                if version == seen:
                    continue
                seen, expiry = version, store.next_expiry()
            except RgpuError:
                pass
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                break  # the loop is closed
        if store is not None:
            store.close()
