"""The directory store: images as files, safe against crashes, damage and full disks.

    ROOT/lock                 flock: shared by writers and readers of packs, exclusive for rm
    ROOT/images/NAME.image    manifests (names percent-encoded)
    ROOT/packs/HEX.pack       immutable packs, shared between images

An image is there exactly when its manifest is; a pack is removed only when no
manifest names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rgpu.checkpoint import chunk, cut, image, pagehash
from rgpu.checkpoint.device import Device
from rgpu.checkpoint.files import TEMPORARY, failing_as
from rgpu.checkpoint.pages import page_size
from rgpu.checkpoint.state import SessionState
from rgpu.checkpoint.writer import ImageWriter
from rgpu.session.errors import AlreadyExists, Corrupt, NotFound, RgpuError, StoreError, UsageError

_SUFFIX = ".image"
_NAME = re.compile(r"[\w@:+=,./-]{1,150}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One line of ``ls``. ``error``: why the manifest cannot be read, else empty; sizes in bytes."""

    name: str
    created: float
    session: str = ""
    position: int = 0
    epoch: int = 0
    memory: int = 0
    pages: int = 0
    manifest_bytes: int = 0
    error: str = ""


class Image:
    """A stored image, its manifest checked; chunks are checked as they are read."""

    def __init__(self, name: str, table: image.Table, packs: Path, key: bytes) -> None:
        self.name = name
        self.table = table
        self._directory, self._key = packs, key
        self._open: dict[int, int] = {}

    @property
    def state(self) -> SessionState:
        return self.table.body.state

    @property
    def statistics(self) -> dict[str, Any]:
        return self.table.body.statistics

    def _descriptor(self, number: int) -> int:
        descriptor = self._open.get(number)
        if descriptor is None:
            pack = self.table.body.packs[number]
            path = self._directory / f"{pack.name}.pack"
            with failing_as(f"image {self.name}: cannot read", path):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._open[number] = descriptor
                size = os.fstat(descriptor).st_size
                header = os.pread(descriptor, chunk.PACK_HEADER, 0)
            if size != pack.size:
                raise Corrupt(f"pack {pack.name} has {size} bytes, {pack.size} wanted", offset=min(size, pack.size),
                              reason="pack length", path=str(path))
            chunk.check_pack_header(header, pack.name)
        return descriptor

    def read_chunk(self, number: int) -> bytes:
        """Raises :class:`Corrupt` or :class:`StoreError`."""
        table = self.table
        offset, length = int(table.offsets[number]), int(table.lengths[number])
        pack = int(table.packs[number])
        descriptor = self._descriptor(pack)
        path = self._directory / f"{table.body.packs[pack].name}.pack"
        with failing_as("cannot read", path):
            data = os.pread(descriptor, length, offset)
        name, raw = chunk.decode(data, self._key, offset)
        if name != table.name(number):
            raise Corrupt(f"pack {path.name}, offset {offset}: another chunk than the manifest names", offset=offset,
                          reason="chunk name", path=str(path))
        return raw

    def read_page(self, region: int, index: int) -> bytes | None:
        """Page ``index`` of the ``region``-th region; None for zeros."""
        number = int(self.table.pages[region][index])
        if number == image.ZERO_PAGE:
            return None
        raw = self.read_chunk(number)
        wanted = page_size(self.state.regions[region].region(), index)
        if len(raw) != wanted:
            raise Corrupt(f"image {self.name}: page {index} of region {region} has {len(raw)} bytes, {wanted} wanted",
                          offset=0, reason="page length")
        return raw

    def pages(self) -> Iterator[tuple[int, int, bytes | None]]:
        """(region address, index, bytes or None) of every page that a fresh device does not have already."""
        for number, region in enumerate(self.state.regions):
            for index in range(pagehash.page_count(region.size)):
                data = self.read_page(number, index)
                if data is not None or region.kind == "global":
                    yield region.address, index, data

    def verify(self) -> dict[str, int]:
        """Read everything, compare every page with its recorded hash. Raises on the first difference."""
        seen: set[int] = set()
        pages = 0
        for number, region in enumerate(self.state.regions):
            hashes = region.page_hashes()
            for index in range(len(hashes)):
                size = page_size(region.region(), index)
                data = self.read_page(number, index)
                found = pagehash.zero_hash(self.state.hash_key, size) if data is None \
                    else pagehash.hash_page(data, self.state.hash_key)
                if found != (int(hashes[index][0]), int(hashes[index][1])):
                    raise Corrupt(f"image {self.name}: page {index} of {region.address:#x} does not have its hash",
                                  offset=index, reason="page hash")
                seen.add(int(self.table.pages[number][index]))
                pages += 1
        for number in range(self.table.count):
            if number not in seen:
                self.read_chunk(number)
        for number in range(len(self.table.body.packs)):
            self._descriptor(number)
        return {"pages": pages, "chunks": self.table.count, "packs": len(self.table.body.packs)}

    def close(self) -> None:
        for descriptor in self._open.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open = {}

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class DirectoryStore:
    """See the module docstring. ``key``: 32 secret bytes under which chunks are named and manifests sealed."""

    def __init__(self, root: str | os.PathLike[str], key: bytes = image.DEFAULT_KEY) -> None:
        if len(key) != 32:
            raise UsageError(f"a store's key has 32 bytes, not {len(key)}")
        self.root = Path(root)
        self._key = key
        self._images, self._packs = self.root / "images", self.root / "packs"

    # -- names and locks ----------------------------------------------------------
    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise UsageError(f"{name!r} is no name for an image")
        return self._images / (quote(name, safe="") + _SUFFIX)

    def _prepare(self) -> None:
        for path in (self.root, self._images, self._packs):
            with failing_as("cannot create", path):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _lock(self, how: int) -> Callable[[], None]:
        path = self.root / "lock"
        with failing_as("cannot lock", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, how)
            except OSError:
                os.close(descriptor)
                raise
        return lambda: os.close(descriptor)

    # -- writing --------------------------------------------------------------------
    def writer(self, name: str, base: str | None = None) -> ImageWriter:
        """Begin an image. ``base``: an image whose chunks may be reused; one that cannot be read is not.

        Raises :class:`AlreadyExists`, :class:`StoreError`.
        """
        path = self._path(name)
        self._prepare()
        release = self._lock(fcntl.LOCK_SH)
        try:
            if path.exists():
                raise AlreadyExists(f"image {name} exists", image=name)
            table = None
            if base is not None:
                with contextlib.suppress(NotFound, Corrupt):
                    table = self._usable_base(base)
            return ImageWriter(name, path, self._packs, self._key, table, release)
        except BaseException:
            release()
            raise

    def _usable_base(self, name: str) -> image.Table | None:
        """The base's table if all its packs are there in their length: a damaged base would damage its heirs."""
        table = self._load(name)
        for pack in table.body.packs:
            path = self._packs / f"{pack.name}.pack"
            if not path.exists() or path.stat().st_size != pack.size:
                return None
        return table

    # -- reading --------------------------------------------------------------------
    def _load(self, name: str) -> image.Table:
        path = self._path(name)
        try:
            with failing_as("cannot read", path), open(path, "rb") as file:
                header = file.read(image.HEADER_SIZE)
                wanted = image.body_length(header, name)
                body = file.read(min(wanted + 1, os.fstat(file.fileno()).st_size))
        except StoreError as error:
            if not path.exists():
                raise NotFound(f"no image {name} in {self.root}", image=name) from error
            raise
        table = image.decode(header + body, self._key, name)
        if table.body.image != name:
            raise Corrupt(f"image {name}: holds the manifest of image {table.body.image!r}", offset=image.HEADER_SIZE,
                          reason="image name")
        return table

    def open(self, name: str) -> Image:
        """Raises :class:`NotFound`, :class:`Corrupt`, :class:`VersionMismatch`, :class:`StoreError`."""
        return Image(name, self._load(name), self._packs, self._key)

    def verify(self, name: str) -> dict[str, int]:
        """Check every byte of an image; see :meth:`Image.verify`."""
        with self.open(name) as found:
            return found.verify()

    def ls(self) -> list[ImageInfo]:
        """Every image, newest first; a damaged one has its ``error``."""
        if not self._images.exists():
            return []
        found = []
        with failing_as("cannot list", self._images):
            paths = [path for path in self._images.iterdir() if path.name.endswith(_SUFFIX)]
            for path in paths:
                found.append(self._info(unquote(path.name[:-len(_SUFFIX)]), path))
        return sorted(found, key=lambda info: info.created, reverse=True)

    def _info(self, name: str, path: Path) -> ImageInfo:
        status = path.stat()
        try:
            body = self._load(name).body
        except RgpuError as error:
            return ImageInfo(name, status.st_mtime, manifest_bytes=status.st_size, error=error.message)
        state = body.state
        memory = sum(region.size for region in state.regions)
        pages = sum(len(column) // 4 for column in body.pages)
        return ImageInfo(name, body.created, state.session, state.position, state.epoch, memory, pages,
                         status.st_size)

    def show(self, name: str) -> dict[str, Any]:
        """What an image holds, without its pages."""
        with self.open(name) as found:
            body, state = found.table.body, found.state
            return {
                "image": name, "created": body.created, "session": state.session, "position": state.position,
                "epoch": state.epoch, "device": state.device, "clock_ns": state.clock, "events": len(state.events),
                "regions": [{"address": f"{region.address:#x}", "size": region.size, "kind": region.kind,
                             "owner": region.owner, "name": region.name} for region in state.regions],
                "chunks": found.table.count, "packs": {pack.name: pack.size for pack in body.packs},
                "statistics": body.statistics}

    # -- removing -------------------------------------------------------------------
    def rm(self, name: str) -> int:
        """Remove an image, and packs and leftovers that nothing names; returns the bytes freed.

        Waits for writers. While any manifest is unreadable no pack is removed:
        it might be one of its. Raises :class:`NotFound`, :class:`StoreError`.
        """
        path = self._path(name)
        if not path.exists():
            raise NotFound(f"no image {name} in {self.root}", image=name)
        release = self._lock(fcntl.LOCK_EX)
        try:
            with failing_as("cannot remove", path):
                freed = path.stat().st_size
                path.unlink()
                return freed + self._collect()
        except FileNotFoundError as error:
            raise NotFound(f"no image {name} in {self.root}", image=name) from error
        finally:
            release()

    def _collect(self) -> int:
        freed = 0
        leftovers = [path for directory in (self._images, self._packs) for path in directory.iterdir()
                     if path.name.endswith(TEMPORARY)]
        used = self._used_packs()
        if used is not None:
            leftovers += [path for path in self._packs.glob("*.pack") if path.stem not in used]
        for path in leftovers:
            freed += path.stat().st_size
            path.unlink()
        return freed

    def _used_packs(self) -> set[str] | None:
        """Packs that some manifest names; None if a manifest cannot be read."""
        used: set[str] = set()
        for manifest in self._images.glob("*" + _SUFFIX):
            try:
                table = self._load(unquote(manifest.name[:-len(_SUFFIX)]))
            except RgpuError:
                return None
            used.update(pack.name for pack in table.body.packs)
        return used


def write_image(store: DirectoryStore, name: str, device: Device, state: SessionState, *, base: str | None = None,
                statistics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Image of a drained device from the state taken of it; returns the statistics."""
    with store.writer(name, base) as writer:
        for page in cut.pages(device, state):
            writer.add_page(page)
        return writer.finish(state, statistics)
