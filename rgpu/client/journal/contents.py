"""Places of the module binaries in the journal: the payloads that may be named by hash on the data link."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol

from rgpu.client.journal.cursor import Cursor
from rgpu.link.data.module_refs import SMALLEST, is_content
from rgpu.session.journal.record import HEADER, HEADER_SIZE, MAGIC, padded


class Readable(Protocol):
    """The part of a journal run's interface that this module uses."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """Bytes of the run."""

    def read(self, offset: int, limit: int) -> list[Any]:
        """Return pieces of at most ``limit`` bytes from ``offset`` on."""


@dataclass(slots=True)
class Content:
    """A payload in the journal: run number and offset in the run (as a Cursor), length in bytes."""

    number: int
    offset: int
    length: int
    digest: bytes = b""  #: computed at the first use

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.offset


class Contents:
    """The module binaries that the journal holds, in its order."""

    def __init__(self) -> None:
        self._found: list[Content] = []

    def note(self, number: int, run: Readable) -> None:
        """Note a run that was added to the journal; only a run of one record can hold a module binary."""
        if run.first != run.last or run.size < SMALLEST:
            return
        magic, call, _, _, _, args, payload, _, _ = HEADER.unpack(b"".join(run.read(0, HEADER_SIZE)))
        offset = HEADER_SIZE + padded(args)
        if magic == MAGIC and is_content(call, payload) and offset + payload <= run.size:
            self._found.append(Content(number, offset, payload))

    def forget(self, number: int) -> None:
        """Forget the module binaries of runs before ``number``, which are not kept any more."""
        if self._found and self._found[0].number < number:
            del self._found[:bisect_left(self._found, (number, 0), key=_place)]

    def after(self, cursor: Cursor) -> Content | None:
        """Return the first module binary whose payload begins at the cursor or behind it; None: there is none."""
        if not self._found or self._found[-1].place < (cursor.number, cursor.offset):
            return None
        return self._found[bisect_left(self._found, (cursor.number, cursor.offset), key=_place)]

    def all_after(self, cursor: Cursor) -> list[Content]:
        """Return the module binaries whose payload begins at the cursor or behind it."""
        return self._found[bisect_left(self._found, (cursor.number, cursor.offset), key=_place):]


def _place(content: Content) -> tuple[int, int]:
    return content.place
