"""Immutable sorted tables of address ranges.

A change makes a new table (copy on write), so that a running kernel keeps the
table of its launch while the program allocates. Neighbouring ranges are merged:
fewer to search, and an access that runs from one into the next is valid, as
on a GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class RangeTable:
    """Disjoint ``[base, end)`` ranges in ascending order."""

    __slots__ = ("_bases", "_ends")

    def __init__(self, bases: list[int] | None = None, ends: list[int] | None = None) -> None:
        self._bases = bases or []
        self._ends = ends or []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._bases, self._ends, strict=True))

    def __len__(self) -> int:
        return len(self._bases)

    def contains(self, base: int, size: int) -> bool:
        """Whether every byte of ``[base, base+size)`` is in the table (an empty range: always)."""
        if size <= 0:
            return size == 0
        i = bisect_right(self._bases, base) - 1
        return i >= 0 and base + size <= self._ends[i]

    def overlaps(self, base: int, size: int) -> bool:
        """Tell whether any byte of [base, base+size) lies in a range."""
        i = bisect_right(self._bases, base + size - 1) - 1
        return i >= 0 and self._ends[i] > base

    def added(self, base: int, size: int) -> RangeTable:
        """Return a table with ``[base, base+size)``, which must not overlap."""
        end = base + size
        i = bisect_right(self._bases, base)
        bases, ends = self._bases.copy(), self._ends.copy()
        joins_left = i > 0 and ends[i - 1] == base
        joins_right = i < len(bases) and bases[i] == end
        if joins_left and joins_right:
            ends[i - 1] = ends.pop(i)
            bases.pop(i)
        elif joins_left:
            ends[i - 1] = end
        elif joins_right:
            bases[i] = base
        else:
            bases.insert(i, base)
            ends.insert(i, end)
        return RangeTable(bases, ends)

    def removed(self, base: int, size: int) -> RangeTable:
        """Return a table without ``[base, base+size)``, which must be in the table."""
        end = base + size
        i = bisect_right(self._bases, base) - 1
        bases, ends = self._bases.copy(), self._ends.copy()
        old_base, old_end = bases[i], ends[i]
        kept = [(b, e) for b, e in ((old_base, base), (end, old_end)) if b < e]
        bases[i:i + 1] = [b for b, _ in kept]
        ends[i:i + 1] = [e for _, e in kept]
        return RangeTable(bases, ends)
