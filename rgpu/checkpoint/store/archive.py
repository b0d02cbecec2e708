"""One checkpoint in one file, as `rgpu image export` writes it and `import` reads it. Offsets:
docs/developers/image-format.md.

An archive is a store of its own, of one checkpoint, under the key without a secret:
it can be taken to another pool, and gives its holder access to the program's memory.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
from blake3 import blake3

from rgpu.checkpoint.blobs.base import MAX_BLOB, Found, Gathered
from rgpu.checkpoint.blobs.files import NewFile, failing_as
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import Page
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.session.errors import AlreadyExists, Corrupt, StoreDenied, StoreMissing, VersionMismatch

MAGIC, END_MAGIC = b"RGPUARC1", b"RGPUAEND"
VERSION = 1
_HEAD = struct.Struct("<8sII")  # magic, version, zero
_END = struct.Struct("<8sIIQQ32s")  # magic, version, zero, offset and length of the index, its BLAKE3
_KEPT = ("images/", "packs/")


class Source(Protocol):
    """Source of a checkpoint: a :class:`StoredCheckpoint`, or a node that reads it on request."""

    name: str

    @property
    def state(self) -> SessionState:
        """State of the session at the checkpoint."""

    def read_pages(self, region: int, start: int, count: int) -> list[bytes | None]:
        """Return ``count`` pages from index ``start``; None stands for zeros. Raises :class:`Corrupt`."""


class ArchiveWriter:
    """Blobs that are written into one file; :meth:`commit` makes it exist."""

    pack_limit = 32 << 20

    def __init__(self, path: Path) -> None:
        self._file = NewFile(path)
        self._index: list[tuple[str, int, int]] = []
        self._other: dict[str, bytes] = {}  #: the blobs of writers (intents), which are not part of the archive
        self._lock = threading.Lock()
        self._file.write(_HEAD.pack(MAGIC, VERSION, 0))

    def where(self, name: str) -> str:
        return f"{self._file.path}:{name}"

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        with self._lock:
            if new and any(name == known for known, _, _ in self._index):
                raise AlreadyExists(f"{self.where(name)} exists")
            if name.startswith(_KEPT):
                at = self._file.size
                for piece in data:
                    self._file.write(piece)
                self._index.append((name, at, sum(map(len, data))))
            else:
                self._other[name] = b"".join(data)

    def create(self, name: str) -> Gathered:
        """Open a part of the archive that is put as a whole at its commit."""
        return Gathered(self, name)

    def size(self, name: str) -> int | None:
        found = self._other.get(name)
        return None if found is None else len(found)

    def ls(self, prefix: str) -> list[Found]:
        return []

    def leftovers(self, prefix: str) -> list[Found]:
        return []

    def delete(self, name: str) -> None:
        self._other.pop(name, None)

    def read(self, name: str, limit: int = MAX_BLOB) -> bytes:
        raise StoreMissing(f"{self.where(name)} is being written")

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return self.read(name)

    def commit(self) -> None:
        """Write the index and the end, and make the file durable under its name. Raises :class:`StoreError`."""
        index = msgspec.msgpack.encode(self._index)
        at = self._file.write(index)
        self._file.write(_END.pack(END_MAGIC, VERSION, 0, at, len(index), blake3(index).digest()))
        self._file.commit()

    def discard(self) -> None:
        """Remove the unfinished file."""
        self._file.discard()


class ArchiveReader:
    """Read-only blobs of an archive. Raises :class:`Corrupt`, :class:`VersionMismatch`, :class:`StoreError`."""

    pack_limit = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        with failing_as("cannot read", path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._index = self._read_index()
        except BaseException:
            self.close()
            raise

    def _read_index(self) -> dict[str, tuple[int, int]]:
        def bad(reason: str, offset: int = 0) -> Corrupt:
            return Corrupt(f"{self._path} is no whole archive of a checkpoint: {reason}", offset=offset, reason=reason)

        whole = os.fstat(self._descriptor).st_size
        head = self._pread(0, _HEAD.size)
        if len(head) < _HEAD.size or head[:8] != MAGIC:
            raise bad("magic")
        _, version, zero = _HEAD.unpack(head)
        if version != VERSION:
            raise VersionMismatch(f"{self._path}: archive version {version}, this reader supports {VERSION}",
                                  found=version, known=VERSION)
        if zero:
            raise bad("a field that must be zero", 12)
        end = self._pread(max(0, whole - _END.size), _END.size)
        if len(end) < _END.size or end[:8] != END_MAGIC:
            raise bad("cut short", whole)
        _, version, zero, at, length, digest = _END.unpack(end)
        if zero or version != VERSION or at + length + _END.size != whole or length > manifest.MAX_BODY:
            raise bad("index", at)
        index = self._pread(at, length)
        if blake3(index).digest() != digest:
            raise bad("checksum of the index", at)
        try:
            rows = msgspec.msgpack.decode(index, type=list[tuple[str, int, int]])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise bad(f"index: {error}", at) from error
        for name, offset, size in rows:
            if not name.startswith(_KEPT) or offset < _HEAD.size or size < 0 or offset + size > at:
                raise bad(f"the place of {name!r}", at)
        return {name: (offset, size) for name, offset, size in rows}

    def _pread(self, offset: int, length: int) -> bytes:
        with failing_as("cannot read", self._path):
            parts: list[bytes] = []
            while length and (part := os.pread(self._descriptor, length, offset)):
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def checkpoint(self) -> StoredCheckpoint:
        """Open the archive's checkpoint. Raises :class:`Corrupt`."""
        store = CheckpointStore(self)
        names = list(store.names())
        if len(names) != 1:
            raise Corrupt(f"{self._path} holds {len(names)} checkpoints instead of one", offset=0, reason="images")
        return store.open(names[0])

    def where(self, name: str) -> str:
        return f"{self._path}:{name}"

    def _place(self, name: str) -> tuple[int, int]:
        if name not in self._index:
            raise StoreMissing(f"{self.where(name)} is not there", path=self.where(name))
        return self._index[name]

    def read(self, name: str, limit: int = MAX_BLOB) -> bytes:
        offset, size = self._place(name)
        return self._pread(offset, min(size, limit))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        start, size = self._place(name)
        return self._pread(start + offset, max(0, min(length, size - offset)))

    def size(self, name: str) -> int | None:
        return self._index[name][1] if name in self._index else None

    def ls(self, prefix: str) -> list[Found]:
        return [Found(name, size, 0.0) for name, (_, size) in self._index.items() if name.startswith(prefix)]

    def leftovers(self, prefix: str) -> list[Found]:
        return []

    def put(self, name: str, *data: bytes, new: bool = False) -> None:
        raise StoreDenied(f"{self._path} is only read")

    def create(self, name: str) -> Any:
        """Refuse: an archive is only read. Raises :class:`StoreDenied`."""
        raise StoreDenied(f"{self._path} is only read")

    def delete(self, name: str) -> None:
        raise StoreDenied(f"{self._path} is only read")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def copy_checkpoint(source: Source, target: CheckpointStore, name: str, *, facts: dict[str, Any] | None = None,
               statistics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write ``source`` as checkpoint ``name`` of ``target``; every page is verified. Returns the statistics.

    Raises :class:`Corrupt`, :class:`AlreadyExists`, :class:`StoreError`.
    """
    with target.writer(name) as writer:
        for page in _verified(source):
            writer.add_page(page)
        return writer.finish(source.state, {"copied_from": source.name, **(statistics or {})}, facts)


def _verified(source: Source, count: int = 64) -> Iterable[Page] | Iterator[Page]:
    state = source.state
    for number, region_state in enumerate(state.regions):
        region, hashes = region_state.region(), region_state.page_hashes()
        for start in range(0, len(hashes), count):
            pages = source.read_pages(number, start, min(count, len(hashes) - start))
            for index, data in enumerate(pages, start):
                wanted = (int(hashes[index][0]), int(hashes[index][1]))
                if data is not None and pagehash.hash_page(data, state.hash_key) != wanted:
                    raise Corrupt(f"checkpoint {source.name}: page {index} of {region.address:#x} does not have its "
                                  f"hash",
                                  offset=index, reason="page hash")
                if data is not None:
                    yield Page(region, index, data, wanted)
