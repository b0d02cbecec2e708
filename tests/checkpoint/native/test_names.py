"""Numbers by name agree with a dict, whatever is asked for together; the columns of pages with a dict of regions."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.manifest.columns import PageColumns
from rgpu.checkpoint.manifest.manifest import ZERO_PAGE
from rgpu.checkpoint.native import names
from rgpu.checkpoint.native.names import NameIndex
from rgpu.checkpoint.pages.pages import PageList

#: Names that begin alike, end alike, and all sorts.
SOME = [bytes([first]) * 31 + bytes([last]) for first in range(6) for last in range(6)]
NAMES = st.lists(st.one_of(st.sampled_from(SOME), st.binary(min_size=32, max_size=32)), max_size=40)


def rows(some: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(some), np.uint8).reshape(-1, 32)


@given(st.lists(st.tuples(st.booleans(), NAMES), max_size=8))
def test_like_a_dict(batches: list[tuple[bool, list[bytes]]]) -> None:
    index, known = NameIndex(), dict[bytes, int]()
    for add, some in batches:
        if not add:
            assert index.find(rows(some)).tolist() == [known.get(name, -1) for name in some]
            continue
        new = []
        for name in some:
            new.append(name not in known)
            known.setdefault(name, len(known))
        found, fresh = index.add(rows(some))
        assert found.tolist() == [known[name] for name in some] and fresh.tolist() == new
        assert index.count == len(known) and index.names().tobytes() == b"".join(known)


def test_many() -> None:
    """Past several sizes of the table; each is found again, and nothing else is."""
    index, some = NameIndex(), rows([os.urandom(32) for _ in range(20_000)])
    for at in range(0, len(some), 700):
        found, fresh = index.add(some[at:at + 700])
        assert found.tolist() == list(range(at, min(at + 700, len(some)))) and fresh.all()
    assert index.find(some).tolist() == list(range(len(some)))
    assert (index.find(rows([os.urandom(32) for _ in range(500)])) == -1).all()
    assert (index.find(some[::2]) == np.arange(0, len(some), 2)).all()  # rows that do not lie side by side


def test_names_that_were_chosen_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in one word only, whichever: a table that trusted one word would look at all for each."""
    factors = np.random.default_rng(7).integers(0, 1 << 63, 4, np.uint64) * np.uint64(2) + np.uint64(1)
    monkeypatch.setattr(names, "_FACTORS", factors)
    for word in range(4):
        chosen = np.zeros((4000, 4), np.uint64)
        chosen[:, word] = np.arange(1, 4001, dtype=np.uint64) << np.uint64(40)
        index = NameIndex()
        index.add(chosen.view(np.uint8))
        taken = index._places != names._EMPTY
        free = np.flatnonzero(~taken)
        assert taken.sum() == 4000 and np.diff(free).max() < 200, "they stand one behind the other"


REGIONS = [Region(0x2000_0000_0000 + number * (64 << 20), size, "mapped")
           for number, size in enumerate([PAGE, 3 * PAGE, 40 * PAGE, 100, 2000 * PAGE])]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1999)), max_size=60), st.permutations(range(5)))
def test_columns_like_a_dict(pages: list[tuple[int, int]], order: list[int]) -> None:
    columns, said = PageColumns(), dict[tuple[int, int], int]()
    counts = [-(-region.size // PAGE) for region in REGIONS]
    pages = [(owner, index % counts[owner]) for owner, index in pages]
    for number, (owner, index) in enumerate(pages[:20]):
        at = columns.place(REGIONS[owner], index)
        columns.numbers[at] = said[owner, index] = number
    owners = np.array([owner for owner, _ in pages[20:]], np.int64)
    indices = np.array([index for _, index in pages[20:]], np.int64)
    listed = PageList.at(REGIONS, owners, indices, np.zeros((len(owners), 2), np.uint64))
    half = len(listed) // 2
    for part, start in ((listed.part(0, half), 20), (listed.part(half, len(listed)), 20 + half)):
        at = columns.places(part)
        columns.numbers[at] = np.arange(start, start + len(part))
    said.update({page: number + 20 for number, page in enumerate(pages[20:])})
    at = columns.whole([REGIONS[number] for number in order])
    wanted = [said.get((number, index), ZERO_PAGE) for number in order for index in range(counts[number])]
    assert columns.numbers[at].tolist() == wanted
    assert len(columns.whole([])) == 0
