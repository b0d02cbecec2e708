"""The packs of one image being written: chunks go into the open one, full ones are made durable behind."""

from __future__ import annotations

import contextlib
import secrets
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

from rgpu.checkpoint import chunk, image
from rgpu.checkpoint.blobs import Blobs, Sink
from rgpu.session.errors import StoreError

UNDER_WAY = 3  #: packs that may be on their way to the store while the next one is filled


def pack_blob(prefix: str, name: str) -> str:
    """The blob of a pack."""
    return f"{prefix}packs/{name}.pack"


class _Open:
    """The pack being filled."""

    def __init__(self, index: int, name: str, sink: Sink, key: bytes) -> None:
        self.index, self.name, self.sink, self.chunks = index, name, sink, 0
        self.hash = blake3(key=key)
        self.write(chunk.pack_header(name))

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.sink.write(data)


class Packs:
    """Thread-safe. ``owner``: the writer's ID; every pack's name begins with it (:mod:`.intents`)."""

    def __init__(self, blobs: Blobs, prefix: str, owner: str, key: bytes) -> None:
        self._blobs, self._prefix, self._owner, self._key = blobs, prefix, owner, key
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._written: list[image.Pack] = []
        self._names: list[str] = []
        self._commits = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="pack")
        self._room = threading.BoundedSemaphore(UNDER_WAY)
        self._pending: list[Future[None]] = []
        self._over = False
        self._failure: BaseException | None = None

    def append(self, data: bytes) -> tuple[int, int]:
        """(which of this writer's packs, offset there) of an encoded chunk. Raises :class:`StoreError`."""
        with self._lock:
            if self._over:
                raise self._failure or StoreError("the image was given up")
            if self._open is None:
                self._open = self._begin()
            pack = self._open
            offset = pack.write(data)
            pack.chunks += 1
            if pack.sink.size >= self._blobs.pack_limit:
                self._end()
            return pack.index, offset

    def _begin(self) -> _Open:
        name = self._owner + secrets.token_hex(16 - len(self._owner) // 2)
        pack = _Open(len(self._written), name, self._blobs.create(pack_blob(self._prefix, name)), self._key)
        self._names.append(name)
        self._written.append(image.Pack(name, 0))  # its size and hash are known at its end
        return pack

    def _end(self) -> None:
        pack, self._open = self._open, None
        if pack is None:
            return
        digest = pack.hash.digest()
        pack.sink.write(chunk.pack_end(pack.chunks, pack.sink.size, digest))
        self._written[pack.index] = image.Pack(pack.name, pack.sink.size, digest)
        self._room.acquire()
        future = self._commits.submit(pack.sink.commit)
        future.add_done_callback(self._committed)
        self._pending.append(future)

    def _committed(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failure, self._over = self._failure or error, True  # no more need be written
        self._room.release()

    def finish(self) -> list[image.Pack]:
        """End the open pack, wait until all are durable. Raises :class:`StoreError`."""
        with self._lock:
            self._end()
        self._commits.shutdown(wait=True)
        for future in self._pending:
            future.result()
        return self._written

    def discard(self) -> None:
        """Stop: nothing more is written. Never raises."""
        with self._lock:
            self._over = True
            if self._open is not None:
                self._open.sink.discard()
                self._open = None
        self._commits.shutdown(wait=True, cancel_futures=True)

    def remove(self) -> None:
        """Delete every pack of this writer. Raises :class:`StoreError`."""
        with contextlib.ExitStack() as others:  # every one is tried
            for name in self._names:
                others.callback(self._blobs.delete, pack_blob(self._prefix, name))
