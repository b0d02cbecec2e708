"""Records as they were decoded last: a listing is decoded anew only where it changed.

A leader looks at every session once a second and for each placement. With ten thousand of them
decoding and checking is most of that look, and nearly all of it is what the look before had, too.
A record that has not changed is the very same object as before, which is what
:mod:`rgpu.migrate.scheduling.following.kept` finds its differences by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import structlog

from rgpu.migrate.registry.base import Entry
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Decoded(Generic[T]):
    """What ``decode`` made of each entry of one prefix; ``what`` names such a record in the log."""

    def __init__(self, what: str, decode: Callable[[Entry], T]) -> None:
        self._what, self._decode = what, decode
        #: key: (mod revision, bytes, record; None: it cannot be read). The bytes count, too: a registry that was
        #: restored from a backup gives revisions out again.
        self._known: dict[str, tuple[int, bytes, T | None]] = {}
        self._last: tuple[T, ...] = ()

    def read(self, entries: Iterable[Entry]) -> tuple[T, ...]:
        """All that can be read, in their order. The same tuple as last time where nothing changed.

        One damaged record must not stop the others: it is logged once for each change of it, and left out.
        """
        known: dict[str, tuple[int, bytes, T | None]] = {}
        found, same = [], True
        for entry in entries:
            before = self._known.get(entry.key)
            if before is None or before[0] != entry.mod_revision or before[1] != entry.value:
                before, same = (entry.mod_revision, entry.value, self._read(entry)), False
            known[entry.key] = before
            if before[2] is not None:
                found.append(before[2])
        if not same or len(known) != len(self._known):
            self._last = tuple(found)
        self._known = known
        return self._last

    def _read(self, entry: Entry) -> T | None:
        try:
            return self._decode(entry)
        except RgpuError as error:
            log.error(f"{self._what} record cannot be read", key=entry.key, reason=error.message)
            return None
