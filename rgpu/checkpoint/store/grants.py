"""Grants: the access that a node daemon gives to a worker for writing and reading one user's checkpoints.

For a directory: its path. For an object store: socket pairs to the daemon
(:mod:`rgpu.checkpoint.blobs.remote`), never credentials. In both cases the user's key, and no other user's.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from rgpu.checkpoint.blobs.base import Blobs, DirectoryBlobs
from rgpu.checkpoint.blobs.remote import BlobService, RemoteBlobs
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore, user_prefix
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.session.errors import Corrupt, NotFound

GATHERED = 32 << 20  #: maximal bytes of a pack that a worker gathers in memory to hand it over


class _Values(msgspec.Struct, forbid_unknown_fields=True):
    tag: str
    key: bytes
    root: str = ""
    pack_limit: int = 0
    shown: str = ""
    most: int | None = None


class UserCheckpoints:
    """One user's checkpoints in the present layout, and for reading also those that an earlier version wrote.

    ``most``: bytes that a new checkpoint may add; None: no limit.
    """

    def __init__(self, blobs: Blobs, tag: str, key: bytes, most: int | None = None) -> None:
        self.own = CheckpointStore(blobs, key, user_prefix(tag), most)
        self.earlier = CheckpointStore(blobs)

    def open(self, name: str) -> StoredCheckpoint:
        """Open a checkpoint. Raises :class:`NotFound` and what :meth:`CheckpointStore.open` raises."""
        return self.holding(name).open(name)

    def holding(self, name: str) -> CheckpointStore:
        """Return the namespace that holds the checkpoint. Raises :class:`NotFound`."""
        for store in (self.own, self.earlier):
            if store.blobs.size(store.manifest(name)) is not None:
                return store
        raise NotFound(f"no checkpoint {name} in {self.own.blobs.where('')}", image=name)


class Grant:
    """The daemon's side; a context manager: on leaving it, the worker's access ends."""

    def __init__(self, blobs: Blobs, tag: str, key: bytes, *, direct: bool = True, most: int | None = None) -> None:
        """Make a grant. ``direct``: the worker accesses a directory itself, else through the daemon.

        ``most``: bytes that a checkpoint may add; None: no limit, which workers of an earlier version also accept.
        """
        self._service: BlobService | None = None
        self.descriptors: tuple[int, ...] = ()
        self.values: dict[str, Any] = {"tag": tag, "key": key} | ({} if most is None else {"most": most})
        if direct and isinstance(blobs, DirectoryBlobs):
            self.values["root"] = str(blobs.root)
        else:
            self._service = BlobService(blobs, user_prefix(tag), ("images/", "packs/"))
            self.descriptors = self._service.descriptors
            self.values.update(pack_limit=min(blobs.pack_limit, GATHERED), shown=blobs.where(""))

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._service is not None:
            self._service.close()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


@contextlib.contextmanager
def granted(values: dict[str, Any], descriptors: list[int]) -> Any:
    """Open a grant in the worker: :class:`UserCheckpoints` for the ``with`` block. Raises :class:`Corrupt`."""
    try:
        found = msgspec.convert(values, _Values)
    except msgspec.ValidationError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise Corrupt(f"no grant of a store: {error}", reason="grant") from error
    if found.root:
        yield UserCheckpoints(DirectoryBlobs(found.root), found.tag, found.key, found.most)
        return
    remote = RemoteBlobs(descriptors, found.pack_limit, found.shown)
    try:
        yield UserCheckpoints(remote, found.tag, found.key, found.most)
    finally:
        remote.close()
