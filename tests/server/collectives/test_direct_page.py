"""How ranks agree to exchange a collective directly: the page's format, and that all decide alike."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.server.collectives import direct_page
from rgpu.server.collectives.direct_page import (
    COMPLETE,
    DECIDED,
    PAGE_SIZE,
    SLOTS,
    Decision,
    Page,
    Post,
    called_of,
    decide,
    value_of,
)
from rgpu.session.errors import Corrupt


def memory() -> np.ndarray[Any, Any]:
    return np.zeros(PAGE_SIZE, np.uint8)


def pages(ranks: int) -> dict[int, Page]:
    return {rank: Page.make(memory(), rank) for rank in range(ranks)}


def post(number: int, every: dict[int, Page], segment: int = 1, known: int = 1, called: int = 7) -> Post:
    return Post(number, called, segment, 256, 4096, 2, tuple(page.identity for page in every.values()),
                (known,) * len(every))


def test_a_post_is_read_as_it_was_written() -> None:
    every = pages(3)
    given = replace(post(5, every), called=(1 << 64) - 1, offset=(1 << 40) + 1, known=(4, 5, 6))
    assert every[1].post(5) is None and not every[1].given(5)
    every[1].gives(5, given)
    found = Page.read(every[1].memory, 3).post(5)
    assert found is not None and replace(found, bound=found.bound[:3], known=found.known[:3]) == given
    assert every[1].given(5) and not every[1].given(6) and every[1].post(5 + SLOTS) is None
    every[1].gives(5 + SLOTS, post(5 + SLOTS, every))
    assert every[1].post(5) is None, "its slot is another's now"


@pytest.mark.parametrize("damage", [(0, 1), (8, 9), (12, 3)])
def test_what_is_no_page_is_refused(damage: tuple[int, int]) -> None:
    """The magic, the version, the rank."""
    page = Page.make(memory(), 1)
    page.memory[damage[0]] = damage[1]
    with pytest.raises(Corrupt):
        Page.read(page.memory, 3)
    with pytest.raises(Corrupt, match="bytes"):
        Page.read(np.zeros(64, np.uint8), 3)


def test_words_of_different_slots_and_ranks_are_apart() -> None:
    offsets = [of(number, index) for number in range(SLOTS) for of, count in (
        (direct_page.offset_of_ready, 8), (direct_page.offset_of_done, 8), (direct_page.offset_of_word, 4))
        for index in range(count)]
    assert len(set(offsets)) == len(offsets) and max(offsets) + 8 <= PAGE_SIZE and min(offsets) >= 40
    page = Page.make(memory(), 0)
    page.set(3, DECIDED)
    assert page.word(3, DECIDED) and not page.word(3, COMPLETE) and not page.word(4, DECIDED)
    assert not page.word(3 + SLOTS, DECIDED), "the slot's next collective waits for a higher value"


def test_a_release_leaves_the_ranks_own_contribution_and_what_is_further() -> None:
    page = Page.make(memory(), 1)
    page._words[direct_page.offset_of_ready(3, 0) // 8] = value_of(3 + SLOTS)
    page.release(3)
    assert page.ready(3, 1) == 0, "its own stream still fills the segment"
    assert page.ready(3, 0) == value_of(3 + SLOTS) and page.ready(3, 2) == value_of(3)
    page.release(3, own=True)
    assert page.ready(3, 1) == value_of(3)


def test_why_a_collective_takes_the_way_through_the_host() -> None:
    every = pages(2)
    assert decide(0, every) == (Decision.OPEN, "ranks [0, 1] have not come to collective 0")
    every[0].gives(0, post(0, every))
    assert decide(0, every)[0] is Decision.OPEN
    every[1].gives(0, post(0, every))
    assert decide(0, every)[0] is Decision.DIRECT
    every[0].gives(1, post(1, every))
    every[1].gives(1, None)
    assert decide(1, every) == (Decision.HOST, "rank 1 gives collective 1 through the host")
    for number, (one, why) in enumerate([
            (post(2, every, called=8), "rank 1 calls another collective than rank 0"),
            (replace(post(3, every), bound=(1, 1)), "rank 1 has another page of rank 0"),
            (post(4, every, known=0), "rank 1 does not map segment 1 of rank 0 yet")], 2):
        every[0].gives(number, post(number, every))
        every[1].gives(number, one)
        assert decide(number, every) == (Decision.HOST, why)
    assert called_of((1, 2)) != called_of((2, 1))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4).flatmap(lambda ranks: st.tuples(
    st.lists(st.sampled_from(["post", "host", "old", "unmapped", "other"]), min_size=ranks, max_size=ranks),
    st.permutations(range(ranks)))))
def test_ranks_that_decide_decide_alike_whenever_they_look(case: tuple[list[str], list[int]]) -> None:
    """From every interrupted prefix: who has decided is not contradicted by who looks later."""
    ways, order = case
    every, number = pages(len(ways)), 9
    decided: dict[int, Decision] = {}
    for rank in order:
        made = post(number, every)
        if ways[rank] == "old":
            made = replace(made, bound=tuple(1 for _ in ways))
        made = replace(made, called=9 if ways[rank] == "other" else made.called,
                       known=(0,) * len(ways) if ways[rank] == "unmapped" else made.known)
        every[rank].gives(number, None if ways[rank] == "host" else made)
        found = decide(number, every)[0]
        for other in order[:order.index(rank) + 1]:
            if found is not Decision.OPEN:
                assert decided.setdefault(other, found) is found
    assert set(decided) == set(range(len(ways)))
    assert (set(decided.values()) == {Decision.DIRECT}) == all(way == "post" for way in ways) \
        or set(ways) == {"other"}, "all that call the same, whatever it is, go directly"


def test_a_rank_that_decides_before_another_has_come_is_not_contradicted() -> None:
    """HOST is told as soon as one rank says so: what the others post then changes nothing."""
    for first, second in itertools.permutations(range(3), 2):
        every = pages(3)
        every[first].gives(0, None)
        assert decide(0, every)[0] is Decision.HOST
        every[second].gives(0, post(0, every))
        assert decide(0, every)[0] is Decision.HOST
