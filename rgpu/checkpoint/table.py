"""The chunks of an image being written: which number each has, and where it lies. Pure."""

from __future__ import annotations

from array import array

import numpy as np

from rgpu.checkpoint import image
from rgpu.checkpoint.base import Array, Base

_UNKNOWN = 0xFFFFFFFF


class ChunkTable:
    """Numbers are given in the order of first use. Not thread-safe.

    ``bases``: where chunks may be referred to. ``adopted``: how many were.
    """

    def __init__(self, bases: list[Base]) -> None:
        self._bases = bases
        self._own = [np.full(base.table.count, _UNKNOWN, np.uint32) for base in bases]  #: number here, by number there
        self._known: dict[bytes, int] = {}  #: new chunks by name
        self._names = bytearray()
        self._offsets, self._lengths, self._packs = array("Q"), array("I"), array("I")
        self._names_of_packs: list[image.Pack] = []  #: of the bases
        self._pack_numbers: dict[str, int] = {}
        self._new: list[int] = []  #: numbers of new chunks; their pack is an index into the writer's own packs
        self.adopted = 0

    def number(self, name: bytes) -> tuple[int, bool]:
        """The chunk's number, and whether it must be stored (and then told with :meth:`place`)."""
        number = self._known.get(name)
        if number is not None:
            return number, False
        for which, base in enumerate(self._bases):
            there = base.find(name)
            if there is not None:
                return int(self.adopt(which, np.array([there], np.uint32))[0]), False
        number = self._known[name] = len(self._lengths)
        self._names += name
        self._append(0, 0, 0)
        self._new.append(number)
        return number, True

    def number_many(self, names: Array) -> tuple[Array, Array]:
        """:meth:`number` for each row of (n, 32) ``names``: u32 numbers, and bool: which must be stored."""
        data, count = names.tobytes(), len(names)
        rows = [data[at:at + 32] for at in range(0, 32 * count, 32)]
        known = [self._known.get(name, _UNKNOWN) for name in rows]
        numbers, fresh = np.array(known, np.uint32), np.zeros(count, bool)
        for which, base in enumerate(self._bases):
            missing = np.flatnonzero(numbers == _UNKNOWN)
            if not len(missing):
                break
            there = base.find_many(names[missing])
            numbers[missing[there >= 0]] = self.adopt(which, there[there >= 0].astype(np.uint32))
        missing = np.flatnonzero(numbers == _UNKNOWN)
        if len(missing):
            unknown = [rows[index] for index in missing.tolist()]
            first, new = len(self._lengths), list(dict.fromkeys(unknown))
            self._known.update(zip(new, range(first, first + len(new)), strict=True))
            self._names += b"".join(new)
            self._new.extend(range(first, first + len(new)))
            for column in (self._offsets, self._lengths, self._packs):
                column.frombytes(bytes(column.itemsize * len(new)))
            numbers[missing] = list(map(self._known.__getitem__, unknown))
            fresh[missing[np.unique(numbers[missing], return_index=True)[1]]] = True
        return numbers, fresh

    def place_many(self, numbers: Array, pack: int, offset: int, lengths: Array) -> None:
        """New chunks of these ``lengths``, stored one behind the other from ``offset`` on."""
        offsets = offset + np.concatenate([[0], np.cumsum(lengths)])
        for number, at, length in zip(numbers.tolist(), offsets.tolist(), lengths.tolist(), strict=False):
            self._packs[number], self._offsets[number], self._lengths[number] = pack, at, length

    def _append(self, pack: int, offset: int, length: int) -> None:
        self._packs.append(pack)
        self._offsets.append(offset)
        self._lengths.append(length)

    def place(self, number: int, pack: int, offset: int, length: int) -> None:
        """Where a new chunk was stored: ``pack`` counts the writer's own."""
        self._packs[number], self._offsets[number], self._lengths[number] = pack, offset, length

    def adopt(self, which: int, numbers: Array) -> Array:
        """Numbers here of the chunks ``numbers`` of a base; ZERO_PAGE stays."""
        table, own = self._bases[which].table, self._own[which]
        used = np.unique(numbers[numbers != image.ZERO_PAGE])
        used = used[own[used] == _UNKNOWN]
        if len(used):
            first = len(self._lengths)
            own[used] = np.arange(first, first + len(used), dtype=np.uint32)
            self._names += self._bases[which].names[used].tobytes()
            self._offsets.frombytes(table.offsets[used].astype("=u8").tobytes())
            self._lengths.frombytes(table.lengths[used].astype("=u4").tobytes())
            packs = table.packs[used]
            mine = np.zeros(len(table.body.packs), np.uint32)
            for pack in np.unique(packs):
                mine[pack] = self._pack_number(table.body.packs[pack])
            self._packs.frombytes(mine[packs].astype("=u4").tobytes())
            self.adopted += len(used)
        result = np.full(len(numbers), image.ZERO_PAGE, np.uint32)
        real = numbers != image.ZERO_PAGE
        result[real] = own[numbers[real]]
        return result

    def _pack_number(self, pack: image.Pack) -> int:
        number = self._pack_numbers.get(pack.name)
        if number is None:
            number = self._pack_numbers[pack.name] = len(self._names_of_packs)
            self._names_of_packs.append(pack)
        return number

    def result(self, written: list[image.Pack]) -> tuple[list[image.Pack], image.Chunks]:
        """Packs and columns for the manifest; ``written``: the writer's own packs."""
        packs = np.frombuffer(self._packs, np.uint32).astype("<u4")
        packs[self._new] += len(self._names_of_packs)
        columns = image.Chunks(bytes(self._names), packs.tobytes(),
                               np.frombuffer(self._offsets, np.uint64).astype("<u8").tobytes(),
                               np.frombuffer(self._lengths, np.uint32).astype("<u4").tobytes())
        return [*self._names_of_packs, *written], columns
