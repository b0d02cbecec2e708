"""The chunks of a checkpoint being written: the number of each, and where it lies. Pure.

Every operation handles many chunks at once, since it competes for the GIL with the thread that applies the session's
calls.
"""

from __future__ import annotations

import numpy as np

from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.reuse import Array, Base
from rgpu.checkpoint.native.names import NameIndex

_UNKNOWN = 0xFFFFFFFF
_FEWEST = 1 << 10  #: rows, to begin with


class ChunkTable:
    """Table of chunks, numbered in the order of first use. Not thread-safe.

    ``bases``: checkpoints whose chunks may be referred to. ``adopted``: number of chunks of theirs that are used.
    ``count``: number of chunks.
    """

    def __init__(self, bases: list[Base]) -> None:
        self._bases = bases
        self._own = [np.full(base.table.count, _UNKNOWN, np.uint32) for base in bases]  #: number here, by number there
        self._known = NameIndex()  #: names of the new chunks
        self._new = np.zeros(_FEWEST, np.uint32)  #: numbers of the new chunks
        self._names = np.zeros((_FEWEST, 32), np.uint8)
        self._packs, self._lengths = np.zeros(_FEWEST, np.uint32), np.zeros(_FEWEST, np.uint32)
        self._offsets = np.zeros(_FEWEST, np.uint64)
        self._names_of_packs: list[manifest.Pack] = []  #: packs of the bases
        self._pack_numbers: dict[str, int] = {}
        self.count = self.adopted = 0

    def number(self, name: bytes) -> tuple[int, bool]:
        """Return the chunk's number, and whether it must be stored (and then placed with :meth:`place_many`)."""
        numbers, fresh = self.number_many(np.frombuffer(name, np.uint8).reshape(1, 32))
        return int(numbers[0]), bool(fresh[0])

    def number_many(self, names: Array) -> tuple[Array, Array]:
        """Do :meth:`number` for each row of (n, 32) ``names``: u32 numbers, and bool: which must be stored."""
        found = self._known.find(names)
        missing = np.flatnonzero(found < 0)
        numbers, fresh = self._new[found], np.zeros(len(names), bool)
        for which, base in enumerate(self._bases):
            if not len(missing):
                break
            there = base.find_many(names[missing])
            hits = there >= 0
            if hits.any():
                numbers[missing[hits]] = self.adopt(which, there[hits].astype(np.uint32))
                missing = missing[~hits]
        if len(missing):
            mine = names[missing]
            before = self._known.count
            found, new = self._known.add(mine)
            rows = self._more(self._known.count - before)
            self._names[rows] = mine[new]
            if self._known.count > len(self._new):
                self._new = np.concatenate([self._new, np.zeros(self._known.count, np.uint32)])
            self._new[before:self._known.count] = np.arange(rows.start, rows.stop)
            numbers[missing], fresh[missing] = self._new[found], new
        return numbers, fresh

    def _more(self, count: int) -> slice:
        """Add ``count`` rows."""
        rows = slice(self.count, self.count + count)
        if rows.stop > len(self._packs):
            more = max(rows.stop, 2 * len(self._packs)) - len(self._packs)
            for name in ("_names", "_packs", "_lengths", "_offsets"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))
        self.count = rows.stop
        return rows

    def place_many(self, numbers: Array, pack: int, offset: int, lengths: Array) -> None:
        """Set the places of new chunks: of these ``lengths``, one behind the other from ``offset`` on in the writer's
        pack number ``pack``.
        """
        self._packs[numbers], self._lengths[numbers] = pack, lengths
        self._offsets[numbers] = offset + np.cumsum(lengths) - lengths

    def adopt(self, which: int, numbers: Array) -> Array:
        """Add the chunks ``numbers`` of base ``which``; return their numbers in this table. ZERO_PAGE stays."""
        table, own = self._bases[which].table, self._own[which]
        used = np.unique(numbers[numbers != manifest.ZERO_PAGE])
        used = used[own[used] == _UNKNOWN]
        if len(used):
            rows = self._more(len(used))
            own[used] = np.arange(rows.start, rows.stop, dtype=np.uint32)
            self._names[rows] = self._bases[which].names[used]
            self._offsets[rows], self._lengths[rows] = table.offsets[used], table.lengths[used]
            packs = table.packs[used]
            mine = np.zeros(len(table.body.packs), np.uint32)
            for pack in np.unique(packs):
                mine[pack] = self._pack_number(table.body.packs[pack])
            self._packs[rows] = mine[packs]
            self.adopted += len(used)
        result = np.full(len(numbers), manifest.ZERO_PAGE, np.uint32)
        real = numbers != manifest.ZERO_PAGE
        result[real] = own[numbers[real]]
        return result

    def _pack_number(self, pack: manifest.Pack) -> int:
        number = self._pack_numbers.get(pack.name)
        if number is None:
            number = self._pack_numbers[pack.name] = len(self._names_of_packs)
            self._names_of_packs.append(pack)
        return number

    def result(self, written: list[manifest.Pack]) -> tuple[list[manifest.Pack], manifest.Chunks]:
        """Return packs and columns for the manifest; ``written``: the writer's own packs."""
        packs = self._packs[:self.count].astype("<u4")
        packs[self._new[:self._known.count]] += np.uint32(len(self._names_of_packs))
        columns = manifest.Chunks(self._names[:self.count].tobytes(), packs.tobytes(),
                               self._offsets[:self.count].astype("<u8").tobytes(),
                               self._lengths[:self.count].astype("<u4").tobytes())
        return [*self._names_of_packs, *written], columns
