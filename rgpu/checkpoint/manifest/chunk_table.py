"""The chunks of a checkpoint being written: which number each has, and where it lies. Pure.

Everything is done for many chunks at once: it is done beside the thread that applies the session's calls, which needs
the same interpreter.
"""

from __future__ import annotations

import numpy as np

from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.reuse import Array, Base
from rgpu.checkpoint.native.names import NameIndex

_UNKNOWN = 0xFFFFFFFF
_FEWEST = 1 << 10  #: rows, to begin with


class ChunkTable:
    """Numbers are given in the order of first use. Not thread-safe.

    ``bases``: where chunks may be referred to. ``adopted``: how many were. ``count``: how many chunks there are.
    """

    def __init__(self, bases: list[Base]) -> None:
        self._bases = bases
        self._own = [np.full(base.table.count, _UNKNOWN, np.uint32) for base in bases]  #: number here, by number there
        self._known = NameIndex()  #: of the new ones
        self._new = np.zeros(_FEWEST, np.uint32)  #: their numbers
        self._names = np.zeros((_FEWEST, 32), np.uint8)
        self._packs, self._lengths = np.zeros(_FEWEST, np.uint32), np.zeros(_FEWEST, np.uint32)
        self._offsets = np.zeros(_FEWEST, np.uint64)
        self._names_of_packs: list[manifest.Pack] = []  #: of the bases
        self._pack_numbers: dict[str, int] = {}
        self.count = self.adopted = 0

    def number(self, name: bytes) -> tuple[int, bool]:
        """The chunk's number, and whether it must be stored (and then told with :meth:`place_many`)."""
        numbers, fresh = self.number_many(np.frombuffer(name, np.uint8).reshape(1, 32))
        return int(numbers[0]), bool(fresh[0])

    def number_many(self, names: Array) -> tuple[Array, Array]:
        """:meth:`number` for each row of (n, 32) ``names``: u32 numbers, and bool: which must be stored."""
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
        """So many rows more."""
        rows = slice(self.count, self.count + count)
        if rows.stop > len(self._packs):
            more = max(rows.stop, 2 * len(self._packs)) - len(self._packs)
            for name in ("_names", "_packs", "_lengths", "_offsets"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))
        self.count = rows.stop
        return rows

    def place_many(self, numbers: Array, pack: int, offset: int, lengths: Array) -> None:
        """New chunks of these ``lengths``, one behind the other from ``offset`` on in ``pack`` of the writer's own."""
        self._packs[numbers], self._lengths[numbers] = pack, lengths
        self._offsets[numbers] = offset + np.cumsum(lengths) - lengths

    def adopt(self, which: int, numbers: Array) -> Array:
        """Numbers here of the chunks ``numbers`` of a base; ZERO_PAGE stays."""
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
        """Packs and columns for the manifest; ``written``: the writer's own packs."""
        packs = self._packs[:self.count].astype("<u4")
        packs[self._new[:self._known.count]] += np.uint32(len(self._names_of_packs))
        columns = manifest.Chunks(self._names[:self.count].tobytes(), packs.tobytes(),
                               self._offsets[:self.count].astype("<u8").tobytes(),
                               self._lengths[:self.count].astype("<u4").tobytes())
        return [*self._names_of_packs, *written], columns
