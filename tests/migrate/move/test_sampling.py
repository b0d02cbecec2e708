"""Samples of pages: how they are drawn, and what they say about all pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.migrate.move.sampling import Sampled, choose


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 200), st.integers())
def test_pages_are_drawn_once_from_inside_their_regions(counts: list[int], wanted: int, seed: int) -> None:
    chosen = choose(counts, wanted, random.Random(seed))
    assert len(chosen) == len(counts) and sum(map(len, chosen)) == min(wanted, sum(counts))
    for count, pages in zip(counts, chosen, strict=True):
        assert pages == sorted(set(pages)) and all(0 <= page < count for page in pages)


def test_every_page_has_its_chance() -> None:
    seen = {(region, page) for seed in range(400)
            for region, pages in enumerate(choose([3, 0, 7], 2, random.Random(seed))) for page in pages}
    assert seen == {(0, page) for page in range(3)} | {(2, page) for page in range(7)}


def test_intervals_hold_the_truth() -> None:
    """Of many samples of a known population some 19 of 20 hold the true share; never fewer than were seen differ."""
    chance, pages, wrong = random.Random(5), 100_000, 3_000
    held = 0
    for _ in range(1000):
        differing = sum(chance.random() < wrong / pages for _ in range(512))
        sampled = Sampled(512, differing, pages)
        low, high = sampled.bounds
        held += low <= wrong / pages <= high
        assert sampled.fewest_pages >= differing and 0.0 <= low <= sampled.share <= high <= 1.0
    assert 920 <= held <= 985, held


@pytest.mark.parametrize("sampled, bounds, fewest", [
    (Sampled(0, 0, 100), (0.0, 1.0), 0),
    (Sampled(100, 7, 100), (0.07, 0.07), 7),  # all of them were looked at
    (Sampled(512, 512, 163_840), None, 162_000),
])
def test_what_the_ends_say(sampled: Sampled, bounds: tuple[float, float] | None, fewest: int) -> None:
    assert bounds is None or sampled.bounds == pytest.approx(bounds)
    assert sampled.fewest_pages >= fewest and sampled.fewest_pages <= max(sampled.pages, 1)


def test_it_says_what_it_saw() -> None:
    assert str(Sampled(512, 128, 4096)) == "128 of 512 sampled pages differ, so about 1024 of 4096"
