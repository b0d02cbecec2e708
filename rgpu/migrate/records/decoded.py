"""Cache of decoded records: a listing is decoded anew only where it changed.

A leader reads every session once a second and for each placement. With ten thousand of them,
decoding and checking takes most of that time, and nearly all records are unchanged.
An unchanged record is returned as the same object as before, so that
:mod:`rgpu.migrate.scheduling.following.kept` finds differences by identity.
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
    """Results of ``decode`` for the entries of one prefix; ``what`` names such a record in the log."""

    def __init__(self, what: str, decode: Callable[[Entry], T]) -> None:
        self._what, self._decode = what, decode
        #: key: (mod revision, bytes, record; None: it cannot be read). The bytes are compared, too: a registry that was
        #: restored from a backup assigns the same revisions again.
        self._known: dict[str, tuple[int, bytes, T | None]] = {}
        self._last: tuple[T, ...] = ()

    def read(self, entries: Iterable[Entry]) -> tuple[T, ...]:
        """Return all readable records, in the order of the entries; the same tuple as last time if none changed.

        A damaged record is logged once for each change of it, and left out.
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
