"""Checkpoints in a store: a namespace of one user's checkpoints and packs, in blobs.

    PREFIXimages/NAME.image   manifests (names percent-encoded)
    PREFIXpacks/HEX.pack      immutable packs, shared between the checkpoints of the namespace
    PREFIXintents/ID          writers at work       (:mod:`.intents`)
    PREFIXcondemned/HEX       packs to be removed

A checkpoint exists exactly when its manifest does; it *counts* only when the
registry's session record names it. A pack is removed only when no manifest
names it and no writer needs it (:mod:`.collect`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import structlog
from blake3 import blake3

from rgpu.checkpoint.blobs.base import Blobs, DirectoryBlobs
from rgpu.checkpoint.codec.encoders import Encoders
from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest import manifest as manifests
from rgpu.checkpoint.manifest.packs import pack_blob
from rgpu.checkpoint.manifest.reuse import Base
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.store.collect import collect
from rgpu.checkpoint.store.intents import Announced
from rgpu.checkpoint.store.pace import Pace
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.checkpoint.store.writer import STAGING, CheckpointWriter, manifest_name
from rgpu.session.errors import (
    AlreadyExists,
    Corrupt,
    NotFound,
    RgpuError,
    StoreError,
    StoreMissing,
    UsageError,
    VersionMismatch,
)

__all__ = ["DirectoryStore", "StoredCheckpoint", "CheckpointInfo", "CheckpointStore", "user_key", "user_prefix",
           "user_tag", "write_checkpoint"]

log = structlog.get_logger(__name__)

LOOKERS = 8  #: manifests that are read at a time
_SUFFIX = ".image"
_NAME = re.compile(r"[\w@:+=,./-]{1,150}", re.ASCII)
#: Errors that make a checkpoint unusable, in contrast to those of a store that is not available now.
BAD_CHECKPOINT = (Corrupt, StoreMissing, VersionMismatch, NotFound)


def user_tag(public: str) -> str:
    """Return 16 hexadecimal digits that stand for a user (the public key of its sessions' agents) in a store."""
    return blake3(public.encode(), derive_key_context="rgpu 2026 image store: user").hexdigest(8)


def user_prefix(tag: str) -> str:
    """Return the prefix of a user's checkpoints in a store."""
    return f"users/{tag}/"


def user_key(pool_secret: bytes, tag: str) -> bytes:
    """Derive the key under which a user's chunks are named and manifests sealed; it is stored nowhere.

    Every holder of the pool's secret (its nodes) can derive the keys. Equal pages of
    two users have different names, so the store does not reveal what others hold.
    """
    return blake3(f"rgpu 2026 image store: key of {tag}".encode(), key=pool_secret).digest()


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One line of ``ls``. ``error``: why the manifest cannot be read, else empty; sizes in bytes."""

    name: str
    created: float
    session: str = ""
    position: int = 0
    epoch: int = 0
    memory: int = 0
    pages: int = 0
    stored: int = 0
    manifest_bytes: int = 0
    error: str = ""

    @property
    def age(self) -> tuple[int, int, float]:
        """Sort key, larger is newer: epoch and position; the writer's clock only where these are equal."""
        return self.epoch, self.position, self.created


class CheckpointStore:
    """One namespace. ``key``: 32 secret bytes under which chunks are named and manifests sealed. Thread-safe.

    ``most``: bytes that a checkpoint may add (:class:`CheckpointWriter`); None: no limit.
    """

    def __init__(self, blobs: Blobs, key: bytes = manifests.DEFAULT_KEY, prefix: str = "",
                 most: int | None = None) -> None:
        if len(key) != 32:
            raise UsageError(f"a store's key has 32 bytes, not {len(key)}")
        self.blobs, self.prefix, self.most = blobs, prefix, most
        self._key = key

    # -- writing --------------------------------------------------------------------
    def writer(self, name: str, base: str | None = None, *, others: Iterable[str] = (),
               staging: int = STAGING, pace: Pace | None = None, encoders: Encoders | None = None) -> CheckpointWriter:
        """Begin a checkpoint. ``base``: the previous one of the session; ``others``: checkpoints whose chunks may be
        shared.

        Checkpoints that cannot be read, or whose packs do not all exist, are left out.
        ``staging``: bytes of pages that may wait in memory; ``pace``: limit of the write rate;
        ``encoders``: see :class:`CheckpointWriter`. Raises :class:`AlreadyExists`, :class:`StoreError`.
        """
        if self.blobs.size(self.manifest(name)) is not None:
            raise AlreadyExists(f"checkpoint {name} exists", image=name)
        announced = Announced(self.blobs, self.prefix, name)
        bases: list[Base] = []
        names = [base] if base else []
        names += [other for other in others if other and other != base]
        announced.refer([])
        try:
            for candidate in names:
                with contextlib.suppress(*BAD_CHECKPOINT):
                    found = self._usable_base(candidate, announced)
                    if found is not None:
                        bases.append(found)
        except BaseException:
            with contextlib.suppress(StoreError):
                announced.end()
            raise
        return CheckpointWriter(self.blobs, self.prefix, name, self._key, announced, bases, staging, pace,
                           encoders, self.most)

    def _usable_base(self, name: str, announced: Announced) -> Base | None:
        """Return the checkpoint if all its packs have their length and will stay, else None: damage would spread to
        checkpoints that build on it.
        """
        table = self._load(name, pages_alone=True)
        if announced.refer([pack.name for pack in table.body.packs]):
            return None
        sizes = {found.name: found.size for found in self.blobs.ls(self.prefix + "packs/")}
        for pack in table.body.packs:
            if sizes.get(pack_blob(self.prefix, pack.name)) != pack.size:
                log.warning("an older checkpoint is damaged: the next one does not build on it", image=name,
                            pack=pack.name)
                return None
        return Base(table)

    # -- reading --------------------------------------------------------------------
    def manifest(self, name: str) -> str:
        """Return the name of the blob of a checkpoint's manifest. Raises :class:`UsageError` for an invalid name."""
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise UsageError(f"{name!r} is no name for a checkpoint")
        return manifest_name(self.prefix, name)

    def _load(self, name: str, pages_alone: bool = False) -> manifests.Table:
        blob = self.manifest(name)
        try:
            data = self.blobs.read(blob, manifests.HEADER_SIZE + manifests.MAX_BODY + 1)
        except StoreMissing as error:
            raise NotFound(f"no checkpoint {name} in {self.blobs.where(self.prefix)}", image=name) from error
        table = manifests.decode(data, self._key, name, pages_alone)
        self._check_name(name, table.body.image)
        return table

    def _check_name(self, name: str, found: str) -> None:
        if found != name:
            raise Corrupt(f"checkpoint {name}: holds the manifest of checkpoint {found!r}",
                          offset=manifests.HEADER_SIZE, reason="checkpoint name")

    def open(self, name: str) -> StoredCheckpoint:
        """Open a checkpoint for reading.

        Raises :class:`NotFound`, :class:`Corrupt`, :class:`VersionMismatch`, :class:`StoreError`.
        """
        return StoredCheckpoint(name, self._load(name), self.blobs, self.prefix, self._key)

    def verify(self, name: str) -> dict[str, int]:
        """Check every byte of a checkpoint; see :meth:`Checkpoint.verify`."""
        with self.open(name) as found:
            return found.verify()

    def summary(self, name: str) -> manifests.Summary:
        """Read a checkpoint's summary, without its pages. Raises as :meth:`open` does."""
        blob = self.manifest(name)
        try:
            wanted = manifests.FIRST_READ
            while True:
                data = self.blobs.read(blob, wanted)
                found = manifests.decode_summary(data, self._key, name)
                if isinstance(found, manifests.Summary):
                    self._check_name(name, found.image)
                    return found
                if len(data) < wanted:
                    raise Corrupt(f"checkpoint {name}: the manifest is cut short", offset=len(data), reason="cut short")
                wanted = found
        except StoreMissing as error:
            raise NotFound(f"no checkpoint {name} in {self.blobs.where(self.prefix)}", image=name) from error

    def names(self) -> dict[str, tuple[int, float]]:
        """Return name → (manifest's bytes, when it was written by the store's clock) for every checkpoint."""
        start = len(self.prefix + "images/")
        return {unquote(found.name[start:-len(_SUFFIX)]): (found.size, found.modified)
                for found in self.blobs.ls(self.prefix + "images/") if found.name.endswith(_SUFFIX)}

    def summaries(self) -> Iterator[tuple[str, int, float, manifests.Summary | RgpuError]]:
        """Yield (name, manifest's bytes, when written, summary or read error) of every checkpoint, in no order.

        Raises :class:`StoreError` when the store is not available; a damaged checkpoint does not affect others.
        """
        def look(name: str) -> manifests.Summary | RgpuError | None:
            try:
                return self.summary(name)
            except NotFound:
                return None  # removed meanwhile
            except (Corrupt, VersionMismatch, UsageError) as error:
                return error

        names = self.names()
        with ThreadPoolExecutor(LOOKERS, thread_name_prefix="look") as threads:
            for (name, (size, modified)), found in zip(names.items(), threads.map(look, names), strict=True):
                if found is not None:
                    yield name, size, modified, found

    def ls(self) -> list[CheckpointInfo]:
        """List every checkpoint, newest first; a damaged one has its ``error``."""
        found = []
        for name, size, modified, about in self.summaries():
            if isinstance(about, RgpuError):
                found.append(CheckpointInfo(name, modified, manifest_bytes=size, error=about.message))
            else:
                found.append(CheckpointInfo(name, about.created, about.session, about.position, about.epoch,
                                            about.memory,
                                       about.pages, about.stored, size))
        return sorted(found, key=lambda info: info.created, reverse=True)

    def show(self, name: str) -> dict[str, Any]:
        """Describe the contents of a checkpoint, without its pages. Raises as :meth:`open` does."""
        with self.open(name) as found:
            body, state = found.table.body, found.state
            return {
                "image": name, "created": body.created, "session": state.session, "position": state.position,
                "epoch": state.epoch, "device": state.device, "clock_ns": state.clock, "events": len(state.events),
                "base": body.base, "facts": body.facts,
                "regions": [{"address": f"{region.address:#x}", "size": region.size, "kind": region.kind,
                             "owner": region.owner, "name": region.name} for region in state.regions],
                "chunks": found.table.count, "packs": {pack.name: pack.size for pack in body.packs},
                "statistics": body.statistics}

    def newest_good(self, names: Iterable[str] | None = None, *, session: str = "",
                    warn: Callable[[str, RgpuError], None] | None = None) -> StoredCheckpoint:
        """Open the first of ``names`` (default: the session's, newest first) that verifies whole.

        ``warn(name, error)`` is called for each bad one before it. Raises :class:`NotFound` when none is good,
        :class:`StoreError` when the store is not available.
        """
        if names is None:
            infos = [info for info in self.ls() if info.error or info.session == session]
            names = [info.name for info in sorted(infos, key=lambda info: info.age, reverse=True)]
        for name in names:
            try:
                found = self.open(name)
                found.verify()
                return found
            except BAD_CHECKPOINT as error:
                log.warning("a checkpoint is bad", image=name, error=error.code, reason=error.message)
                if warn is not None:
                    warn(name, error)
        raise NotFound(f"no good checkpoint of {session or 'the session'} in {self.blobs.where(self.prefix)}")

    # -- removing -------------------------------------------------------------------
    def forget(self, name: str) -> int:
        """Remove a checkpoint's manifest; the next collection removes its packs. Returns the bytes freed.

        Raises :class:`NotFound`, :class:`StoreError`.
        """
        blob = self.manifest(name)
        size = self.blobs.size(blob)
        if size is None:
            raise NotFound(f"no checkpoint {name} in {self.blobs.where(self.prefix)}", image=name)
        self.blobs.delete(blob)
        return size

    def rm(self, name: str, grace: float = 0.0) -> int:
        """Remove a checkpoint, and packs that nothing needs any more; returns the bytes freed.

        ``grace``: s for which packs stay (:func:`.collect.collect`), so that readers of the checkpoint can
        finish. Raises :class:`NotFound`, :class:`StoreError`.
        """
        return self.forget(name) + collect(self, grace=grace).freed


class DirectoryStore(CheckpointStore):
    """A namespace that is a directory of its own."""

    def __init__(self, root: str | os.PathLike[str], key: bytes = manifests.DEFAULT_KEY) -> None:
        super().__init__(DirectoryBlobs(root), key)


def write_checkpoint(store: CheckpointStore, name: str, device: Device, state: SessionState, *, base: str | None = None,
                statistics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write a checkpoint of a drained device and the state taken of it; returns the statistics."""
    with store.writer(name, base) as writer:
        for page in cut.pages(device, state, writer.inherit(state)):
            writer.add_page(page)
        return writer.finish(state, statistics)
