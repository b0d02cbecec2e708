"""Writes one image: pages in, packs out, the manifest last.

Nothing is held in memory but one write buffer and the table of chunks. Until
:meth:`ImageWriter.finish` has returned, the image does not exist; leaving the
``with`` block by an exception removes everything that was written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

from rgpu.checkpoint import chunk, image, pagehash
from rgpu.checkpoint.files import NewFile
from rgpu.checkpoint.pages import Page
from rgpu.checkpoint.state import SessionState
from rgpu.session.errors import StoreError

PACK_LIMIT = 256 << 20  #: bytes after which a new pack is begun


class ImageWriter:
    """Made by :meth:`rgpu.checkpoint.store.DirectoryStore.writer`.

    ``base``: the table of an older image of the same store; chunks that it
    holds are not stored again.
    """

    def __init__(self, name: str, manifest: Path, packs: Path, key: bytes, base: image.Table | None,
                 release: Any) -> None:
        self.name = name
        self._manifest_path, self._pack_directory, self._key = manifest, packs, key
        self._release = release
        self._started = time.time()
        self._known: dict[bytes, int] = {}
        self._names = bytearray()
        self._pack_of, self._offsets, self._lengths = array("I"), array("Q"), array("I")
        self._packs: list[list[Any]] = []  #: [name, size]
        self._pack_numbers: dict[str, int] = {}
        self._own: list[Path] = []  #: packs of this image, already under their names
        self._pack: NewFile | None = None
        self._pages: dict[int, array[int]] = {}
        self._base = _BaseChunks(base) if base is not None else None
        self.counts = dict.fromkeys(("pages", "zero_pages", "new_chunks", "reused_chunks", "raw_bytes",
                                     "stored_bytes"), 0)
        self._open = True

    # -- pages ------------------------------------------------------------------
    def add_page(self, page: Page) -> None:
        """Store a page; pages never added count as zeros. Raises :class:`StoreError`."""
        column = self._pages.get(page.region.address)
        if column is None:
            count = pagehash.page_count(page.region.size)
            column = self._pages[page.region.address] = array("I", [image.ZERO_PAGE]) * count
        self.counts["pages"] += 1
        if page.data is None:
            self.counts["zero_pages"] += 1
            return
        column[page.index] = self._chunk(page.data)

    def _chunk(self, raw: bytes) -> int:
        name = chunk.chunk_name(raw, self._key)
        number = self._known.get(name)
        if number is not None:
            return number
        number = self._known[name] = len(self._known)
        place = self._base.find(name) if self._base is not None else None
        if place is None:
            place = self._store(chunk.encode(raw, name))
            self.counts["new_chunks"] += 1
            self.counts["raw_bytes"] += len(raw)
            self.counts["stored_bytes"] += place[3]
        else:
            self.counts["reused_chunks"] += 1
        pack_name, pack_size, offset, length = place
        self._names += name
        self._pack_of.append(self._pack_number(pack_name, pack_size))
        self._offsets.append(offset)
        self._lengths.append(length)
        return number

    def _pack_number(self, name: str, size: int) -> int:
        number = self._pack_numbers.get(name)
        if number is None:
            number = self._pack_numbers[name] = len(self._packs)
            self._packs.append([name, size])
        return number

    def _store(self, encoded: bytes) -> tuple[str, int, int, int]:
        if self._pack is None:
            name = secrets.token_hex(16)
            self._pack = NewFile(self._pack_directory / f"{name}.pack")
            self._pack.write(chunk.pack_header(name))
        name = self._pack.path.stem
        place = (name, 0, self._pack.write(encoded), len(encoded))
        if self._pack.size >= PACK_LIMIT:
            # The chunk just stored may be the pack's first: its entry is made now, so the size finds it.
            self._pack_number(name, 0)
            self._end_pack()
        return place

    def _end_pack(self) -> None:
        if self._pack is None:
            return
        pack, self._pack = self._pack, None
        self._own.append(pack.path)  # before: a failed commit may leave it under its name
        pack.commit()
        self._packs[self._pack_number(pack.path.stem, 0)][1] = pack.size

    # -- end ---------------------------------------------------------------------
    def finish(self, state: SessionState, statistics: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the image exist; returns its statistics. ``state`` must hold the page hashes."""
        self._end_pack()
        seconds = time.time() - self._started
        facts = {**self.counts, "seconds": round(seconds, 3), **(statistics or {})}
        body = image.Body(
            image=self.name, created=self._started, state=state, statistics=facts,
            pages=[self._column(region.address, region.size) for region in state.regions],
            packs=[image.Pack(name, size) for name, size in self._packs],
            chunks=image.Chunks(bytes(self._names), self._pack_of.tobytes(), self._offsets.tobytes(),
                                self._lengths.tobytes()))
        manifest = NewFile(self._manifest_path)
        try:
            manifest.write(image.encode(body, self._key))
            if self._manifest_path.exists():
                raise StoreError(f"image {self.name} exists", path=str(self._manifest_path), reason="exists")
            manifest.commit()
        except BaseException:
            manifest.discard()
            raise
        self._open = False
        self._release()
        return facts

    def _column(self, address: int, size: int) -> bytes:
        column = self._pages.get(address)
        if column is None:
            column = array("I", [image.ZERO_PAGE]) * pagehash.page_count(size)
        return column.tobytes()

    def abort(self) -> None:
        """Remove what was written. Harmless after :meth:`finish`."""
        if not self._open:
            return
        self._open = False
        if self._pack is not None:
            self._pack.discard()
        if not self._manifest_path.exists():  # a rename whose directory flush failed may have made the image exist
            for path in self._own:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._release()

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.abort()


class _BaseChunks:
    """Where the chunks of an older image lie."""

    def __init__(self, table: image.Table) -> None:
        self._table = table
        self._numbers = {table.name(number): number for number in range(table.count)}

    def find(self, name: bytes) -> tuple[str, int, int, int] | None:
        number = self._numbers.get(name)
        if number is None:
            return None
        pack = self._table.body.packs[int(self._table.packs[number])]
        return pack.name, pack.size, int(self._table.offsets[number]), int(self._table.lengths[number])
