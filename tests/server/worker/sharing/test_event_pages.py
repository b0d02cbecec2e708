"""Pages by which other workers learn of events: which record is waited for, and when it counts as complete."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.server.worker.sharing.event_pages import SIZE, SLOTS, EventPage, EventWatch, SharedEvent
from rgpu.session.errors import DeviceError


def both() -> tuple[EventPage, SharedEvent]:
    page = EventPage()
    fd = page.descriptor()
    try:
        return page, SharedEvent(fd)
    finally:
        os.close(fd)


def test_a_record_is_complete_when_it_is_said_to_be_and_no_later_one_stands_for_it() -> None:
    page, event = both()
    assert event.newest() == 0 and event.is_complete(0)
    first, second = page.record(), page.record()
    assert (first, second, event.newest()) == (1, 2, 2)
    page.complete(second)
    assert event.is_complete(second) and not event.is_complete(first)
    page.complete(first)
    assert event.is_complete(first)
    page.close()
    assert event.is_complete(first) and event.newest() == 2, "it outlives the exporter's"


@given(st.integers(0, 2**32), st.integers(1, 3 * SLOTS - 1))
def test_in_whatever_order_records_complete_none_counts_before_it_is(seed: int, asked: int) -> None:
    """More records than the page has places for: later ones are told late, never early."""
    page, event = both()
    order = list(range(1, 3 * SLOTS))
    random.Random(seed).shuffle(order)
    for _ in order:
        page.record()
    done = set()
    for number in order:
        page.complete(number)
        done.add(number)
        if event.is_complete(asked):
            assert asked in done
            break
    for number in order[len(done):]:
        page.complete(number)
    assert all(event.is_complete(number) for number in order)
    page.close()


def test_an_importer_cannot_write_and_takes_no_other_memory() -> None:
    page = EventPage()
    fd = page.descriptor()
    with pytest.raises(OSError):
        mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    os.close(fd)
    page.close()
    plain = os.memfd_create("plain")
    os.ftruncate(plain, SIZE)
    reader, writer = os.pipe()
    for one in (plain, reader):
        with pytest.raises(DeviceError, match="no event's page"):
            SharedEvent(one)
    for one in (plain, reader, writer):
        os.close(one)


def test_who_waits_is_told_once_each_and_at_once_where_it_is_complete() -> None:
    page, event = both()
    watch, told = EventWatch(), list[int]()
    came = threading.Semaphore(0)

    def tell(number: int) -> Callable[[], None]:
        def then() -> None:
            told.append(number)
            came.release()
        return then

    for _ in range(3):
        page.record()
    for number in (1, 2, 3, 3):
        watch.when_complete(event, number, tell(number))
    page.complete(2)
    assert came.acquire(timeout=10) and told == [2]
    watch.when_complete(event, 2, tell(-2))
    assert came.acquire(timeout=10) and told == [2, -2]
    page.complete(3)
    assert came.acquire(timeout=10) and came.acquire(timeout=10)
    event.over = True  # its session ended: the rest never completes, and nobody waits for it for ever
    assert came.acquire(timeout=10) and sorted(told) == [-2, 1, 2, 3, 3]
    page.close()
