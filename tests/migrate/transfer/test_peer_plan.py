"""Runs of pages to pull: what they cover, how they are cut, and bodies that may hold anything. Pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.device import PAGE, Region
from rgpu.link.messages.pages import RUN_LAYOUT, Grant, Granted, Pulled
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.session.errors import Corrupt

BASE = 0x100000000000
REGION = Region(BASE, 4096 * PAGE, "mapped")


def covered(runs: np.ndarray) -> set[int]:
    return {(address - BASE) // PAGE + number for address, size in runs.tolist() for number in range(size // PAGE)}


@given(st.sets(st.integers(0, 4095), max_size=200), st.integers(0, 20), st.integers(1, 50))
def test_runs_cover_every_page_ascending_and_never_too_many(indices: set[int], gap: int, most: int) -> None:
    wanted = np.array(sorted(indices), np.int64)
    runs = plan.runs_of(REGION, wanted, gap=gap, most=most)
    assert indices <= covered(runs) <= set(range(4096)) and len(runs) <= most
    ends = runs["address"] + runs["bytes"]
    assert (runs["address"][1:] > ends[:-1]).all()
    if len(wanted) <= most:
        assert all((later - earlier) // PAGE > gap for earlier, later in
                   zip(ends.tolist(), runs["address"][1:].tolist(), strict=False)), "a gap that small is copied along"
    assert not len(wanted) or (covered(runs) >= {min(indices), max(indices)} and len(covered(runs)) ==
                               plan.pages_of(runs))


def test_a_whole_region_is_one_run_and_few_pages_are_just_these() -> None:
    assert plan.whole(REGION).tolist() == [(BASE, 4096 * PAGE)]
    assert plan.runs_of(REGION, np.arange(4096)).tolist() == [(BASE, 4096 * PAGE)]
    assert plan.runs_of(REGION, np.array([5, 100])).tolist() == [(BASE + 5 * PAGE, PAGE), (BASE + 100 * PAGE, PAGE)]
    assert not len(plan.runs_of(REGION, np.array([], np.int64)))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), max_size=30), st.integers(1, 64))
def test_pieces_are_the_runs_in_order_and_no_longer_than_asked(rows: list[tuple[int, int]], limit: int) -> None:
    runs = np.array([(BASE + at * PAGE, count * PAGE) for at, count in rows], RUN_LAYOUT)
    parts = list(plan.pieces(runs, limit * PAGE))
    assert all(1 <= plan.pages_of(part) <= limit for part in parts)
    flat = [address + at for part in parts for address, size in part.tolist() for at in range(0, size, PAGE)]
    assert flat == [address + at for address, size in runs.tolist() for at in range(0, size, PAGE)]


def test_a_pull_and_its_hashes_come_back_as_they_were_sent() -> None:
    runs = plan.runs_of(REGION, np.array([1, 50, 51, 4000]))
    tell, read = plan.read_pull(plan.pull(runs, True))
    assert tell and read.tolist() == runs.tolist()
    values = np.random.default_rng(1).integers(0, 2**63, (plan.HASHES_PIECE + 7, 2), np.uint64)
    bodies, left, found = list(plan.hashes(values)), len(values), []
    assert len(bodies) == 2
    for number, body in enumerate(bodies):
        last, some = plan.read_hashes(body, left)
        assert last == (number == 1)
        found.append(some)
        left -= len(some)
    assert np.array_equal(np.concatenate(found), values)


@pytest.mark.parametrize("bad", [
    b"", b"\0", b"\1" + bytes(15), b"\2" + plan.whole(REGION).tobytes(),
    b"\1" + np.array([(BASE, 0)], RUN_LAYOUT).tobytes(), b"\1" + np.array([(BASE + 1, PAGE)], RUN_LAYOUT).tobytes(),
    b"\1" + np.array([(BASE, PAGE + 1)], RUN_LAYOUT).tobytes(),
    b"\0" + np.array([(1 << 63, PAGE)], RUN_LAYOUT).tobytes(),
    b"\0" + np.array([(BASE, 1 << 63)], RUN_LAYOUT).tobytes(), b"\0" + bytes(16 * (plan.MOST_RUNS + 1)),
])
def test_what_are_no_runs_is_refused(bad: bytes) -> None:
    with pytest.raises(Corrupt):
        plan.read_pull(bad)


@pytest.mark.parametrize(("bad", "left"), [(b"", 1), (b"\1", 1), (b"\0" + bytes(16), 1), (b"\1" + bytes(16), 2),
                                           (b"\1" + bytes(32), 1), (b"\1" + bytes(15), 1), (b"\2" + bytes(16), 1)])
def test_hashes_that_are_too_few_or_too_many_are_refused(bad: bytes, left: int) -> None:
    with pytest.raises(Corrupt):
        plan.read_hashes(bad, left)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 5))
def test_no_body_does_more_than_raise_corrupt(body: bytes, left: int) -> None:
    for read in (plan.read_pull, lambda data: plan.read_hashes(data, left), lambda data: plan.decode(data, Grant),
                 lambda data: plan.decode(data, Pulled), lambda data: plan.decode(data, Granted)):
        try:
            read(body)
        except Corrupt:
            pass
