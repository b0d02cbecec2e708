"""Which pages a new checkpoint takes over: as a look at each page would say, however regions lie, came, went and
grew.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.reuse import Base
from rgpu.checkpoint.manifest.state import RegionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.pages import page_size
from rgpu.session.addresses import PAGE

KEY, OTHER = bytes(32), bytes(range(32))
AREA = 16 * PAGE  #: of addresses for each region
KINDS = ("mapped", "global")


def pages_of(size: int, contents: list[int]) -> bytes:
    count = pagehash.page_count(size)
    return pagehash.pack(np.array([[contents[n % len(contents)], n] for n in range(count)], np.uint64))


@st.composite
def region(draw: Any, place: int) -> RegionState:
    size = draw(st.sampled_from([1, 256, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 7, 5 * PAGE]))
    contents = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
    hashes = pages_of(size, contents) if draw(st.integers(0, 9)) else b""
    return RegionState(place * AREA, size, draw(st.sampled_from(KINDS)), hashes=hashes)


@st.composite
def regions(draw: Any) -> list[RegionState]:
    return [draw(region(place)) for place in sorted(draw(st.sets(st.integers(0, 7), max_size=8)))]


def table_of(before: list[RegionState], packs: int, zeros: int) -> Any:
    """A checkpoint of these regions, each page a chunk of its own, but for each ``zeros``-th, which is a zero page."""
    columns, count = [], 0
    for item in before:
        pages = pagehash.page_count(item.size)
        column = np.arange(count, count + pages, dtype=np.uint32)
        column[column % zeros == 0] = manifest.ZERO_PAGE
        columns.append(column)
        count += pages
    body = SimpleNamespace(chunks=SimpleNamespace(names=bytes(32 * count)), packs=[SimpleNamespace(size=1)] * packs,
                           state=SimpleNamespace(regions=before, hash_key=KEY))
    return SimpleNamespace(body=body, pages=columns, packs=np.arange(count) % packs, count=count,
                           lengths=np.full(count, PAGE))


def look_at_each(base: Base, before: list[RegionState], columns: list[Any], now: list[RegionState],
                 key: bytes) -> list[list[int | None]]:
    """For each page of ``now`` the number of its chunk, or None where it changed."""
    known = {(item.address, item.kind): (item, column) for item, column in zip(before, columns, strict=True)}
    found: list[list[int | None]] = []
    for item in now:
        old, column = known.get((item.address, item.kind), (None, None))
        found.append([None] * pagehash.page_count(item.size))
        if old is None or key != KEY or not old.hashes or not item.hashes:
            continue
        for index in range(min(len(found[-1]), len(column))):
            number = int(column[index])
            avoided = number != manifest.ZERO_PAGE and base.avoided[base.table.packs[number]]
            if (page_size(item.region(), index) == page_size(old.region(), index) and not avoided
                    and (item.page_hashes()[index] == old.page_hashes()[index]).all()):
                found[-1][index] = number
    return found


@given(regions(), regions(), st.booleans(), st.sampled_from([KEY, KEY, OTHER]), st.integers(1, 3),
       st.sets(st.integers(0, 2)), st.integers(2, 4))
def test_as_a_look_at_each_page_says(before: list[RegionState], other: list[RegionState], same: bool, key: bytes,
                                     packs: int, avoided: set[int], zeros: int) -> None:
    now = before if same else other
    table = table_of(before, packs, zeros)
    base = Base(table)
    base._decided = True
    base.avoided[[pack for pack in avoided if pack < packs]] = True
    found = base.unchanged(key, now)
    wanted = look_at_each(base, before, table.pages, now, key)
    assert found.starts[-1] == len(found.kept) == len(found.numbers) and len(found.starts) == len(now) + 1
    each = [list(zip(found.kept[at:end].tolist(), found.numbers[at:end].tolist(), strict=True))
            for at, end in zip(found.starts, found.starts[1:], strict=False)]
    assert [[number if kept else None for kept, number in row] for row in each] == wanted
    assert all(number == manifest.ZERO_PAGE for row in each for kept, number in row if not kept)
    assert [indices.tolist() for indices in found.changed()] == \
        [[index for index, number in enumerate(row) if number is None] for row in wanted]
    assert found.counts() == [sum(number is not None for number in row) for row in wanted]
