"""The packs of one checkpoint being written: chunks are appended to open packs, full packs are made durable in the
background."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from blake3 import blake3

from rgpu.checkpoint.blobs.base import Blobs, Sink
from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.reuse import Array
from rgpu.session.errors import StoreError

SPREAD = 32 << 20  #: bytes that are written to each open pack of a checkpoint before one more is begun
UNDER_WAY = 3  #: packs that may be on their way to the store while the next one is filled


def pack_blob(prefix: str, name: str) -> str:
    """Return the name of a pack's blob."""
    return f"{prefix}packs/{name}.pack"


class _Open:
    """A pack being filled."""

    def __init__(self, index: int, name: str, sink: Sink, key: bytes) -> None:
        self.index, self.name, self.sink, self.chunks = index, name, sink, 0
        self.hash = blake3(key=key)
        self.write(chunk.pack_header(name))

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.sink.write(data)


class Packs:
    """Packs of one writer. Thread-safe.

    ``owner``: the writer's ID; every pack's name begins with it (:mod:`rgpu.checkpoint.store.intents`). Threads fill up
    to ``beside`` packs at a time; one thread at a time hashes and writes a pack. A further pack is begun only after
    SPREAD bytes for each open one, so that a small checkpoint is one pack.
    """

    def __init__(self, blobs: Blobs, prefix: str, owner: str, key: bytes, beside: int = 1) -> None:
        self._blobs, self._prefix, self._owner, self._key = blobs, prefix, owner, key
        self._changed = threading.Condition()
        self._beside = max(1, beside)
        self._idle: list[_Open] = []
        self._busy = 0  #: packs that a thread fills now
        self._bytes = 0  #: given to all of them so far
        self._written: list[manifest.Pack] = []
        self._names: list[str] = []
        self._commits = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="pack")
        self._room = threading.BoundedSemaphore(UNDER_WAY)
        self._pending: list[Future[None]] = []
        self._over = False
        self._failure: BaseException | None = None

    def append(self, data: Any, lengths: Array | None = None) -> Iterator[tuple[int, int, int]]:
        """Store encoded chunks; yield (index of this writer's pack, offset in it, number of chunks) for each run.

        ``lengths``: bytes of each chunk in ``data``; None: ``data`` is one chunk. A full pack is ended between
        two chunks. Raises :class:`StoreError`.
        """
        view = memoryview(data)
        ends = np.array([len(view)]) if lengths is None else np.cumsum(lengths)
        at, done = 0, 0
        while at < len(ends):
            pack, size = self._take(), 0
            try:
                room = self._blobs.pack_limit - pack.sink.size
                end = min(len(ends), int(np.searchsorted(ends, done + room)) + 1)  # including the chunk that fills it
                size = int(ends[end - 1]) - done
                offset = pack.write(view[done:done + size])
                pack.chunks += end - at
            finally:
                self._give(pack, size)
            yield pack.index, offset, end - at
            at, done = end, done + size

    def _take(self) -> _Open:
        with self._changed:
            while True:
                if self._over:
                    raise self._failure or StoreError("the checkpoint was given up")
                if self._idle:
                    self._busy += 1
                    return self._idle.pop()
                if not self._busy or (self._busy < self._beside and self._bytes >= SPREAD * self._busy):
                    self._busy += 1
                    break
                self._changed.wait()
        try:
            return self._begin()
        except BaseException:
            self._give(None)
            raise

    def _give(self, pack: _Open | None, size: int = 0) -> None:
        """Give back a pack of :meth:`_take`, to which ``size`` bytes were written; a full pack is ended."""
        full = pack is not None and pack.sink.size >= self._blobs.pack_limit
        try:
            if full and pack is not None and not self._over:
                self._end(pack)
                pack = None
        finally:
            with self._changed:
                self._busy -= 1
                self._bytes += size
                if pack is not None:
                    self._idle.append(pack)
                self._changed.notify_all()

    def _begin(self) -> _Open:
        name = self._owner + secrets.token_hex(16 - len(self._owner) // 2)
        sink = self._blobs.create(pack_blob(self._prefix, name))
        with self._changed:
            self._names.append(name)
            self._written.append(manifest.Pack(name, 0))  # its size and hash are known at its end
            index = len(self._written) - 1
        try:
            return _Open(index, name, sink, self._key)
        except BaseException:
            sink.discard()
            raise

    def _end(self, pack: _Open) -> None:
        digest = pack.hash.digest()
        pack.sink.write(chunk.pack_end(pack.chunks, pack.sink.size, digest))
        self._written[pack.index] = manifest.Pack(pack.name, pack.sink.size, digest)
        self._room.acquire()
        future = self._commits.submit(pack.sink.commit)
        future.add_done_callback(self._committed)
        with self._changed:
            self._pending.append(future)

    def _committed(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failure, self._over = self._failure or error, True  # no more need be written
        self._room.release()

    def finish(self) -> list[manifest.Pack]:
        """End the open packs and wait until all are durable. No thread appends any more. Raises :class:`StoreError`."""
        while self._idle:
            self._end(self._idle.pop())
        self._commits.shutdown(wait=True)
        for future in self._pending:
            future.result()
        return self._written

    def discard(self) -> None:
        """Stop writing and discard the open packs; no thread appends any more. Never raises."""
        with self._changed:
            self._over = True
            for pack in self._idle:
                pack.sink.discard()
            self._idle.clear()
            self._changed.notify_all()
        self._commits.shutdown(wait=True, cancel_futures=True)

    def remove(self) -> None:
        """Delete every pack of this writer. Raises :class:`StoreError`."""
        with contextlib.ExitStack() as others:  # each deletion is tried, also after one that failed
            for name in self._names:
                others.callback(self._blobs.delete, pack_blob(self._prefix, name))
