"""The budget of a node's checkpoints, with a virtual clock: never more than it says, and a fair part for each."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.checkpoint.store.budget import BURST_SECONDS, UNLIMITED, TokenBucket, need, shares
from rgpu.checkpoint.store.pace import Pace
from tests.support.eventually import eventually

MIB = float(1 << 20)


@given(budget=st.floats(1, 1e12), needs=st.dictionaries(
    st.text(min_size=1, max_size=4), st.one_of(st.floats(0, 1e12), st.just(UNLIMITED)), min_size=1, max_size=8))
def test_shares_are_max_min_fair(budget: float, needs: dict[str, float]) -> None:
    found = shares(budget, needs)
    assert found.keys() == needs.keys() and sum(found.values()) == pytest.approx(budget)
    equal = budget / len(needs)
    for name, share in found.items():
        assert share >= min(needs[name], equal) * (1 - 1e-9), "nobody gets less than an equal part unless it needs less"
    hungry = [found[name] for name in needs if found[name] < needs[name] * (1 - 1e-9)]
    assert not hungry or max(hungry) - min(hungry) <= 1e-6 * budget, "those who lack have the same"


def test_what_one_does_not_need_goes_to_the_others() -> None:
    assert shares(100, {}) == {}
    assert shares(90, {"a": UNLIMITED, "b": 10, "c": UNLIMITED}) == {"a": 40, "b": 10, "c": 40}
    assert shares(90, {"a": 10, "b": 10}) == {"a": 45, "b": 45}
    assert need(7 * MIB, waited=True) == UNLIMITED and need(0, waited=False) > 0


class Writer:
    """A checkpoint in virtual time: ``size`` bytes a piece as soon as it may, ``speed`` bytes/s at most."""

    def __init__(self, size: int, speed: float = UNLIMITED) -> None:
        self.size, self.speed, self.bucket = size, speed, TokenBucket()
        self.written, self.ticket, self.ready, self.waited = 0, 0.0, 0.0, False

    def run(self, now: float) -> None:
        while True:
            if not self.ticket:
                if self.ready > now:
                    return
                self.ticket = self.bucket.take(self.size, now)
            if self.bucket.wait(self.ticket, now) > 0:
                self.waited = True
                return
            self.written += self.size
            self.ticket, self.ready = 0.0, max(self.ready, now - 0.01) + self.size / self.speed


def simulate(budget: float, writers: dict[str, Writer], seconds: float, start: float = 0.0, step: float = 0.01) -> None:
    """The daemon divides the budget anew each second, by what the writers report."""
    before: dict[str, int] = {}
    for number in itertools.count():
        now = start + number * step
        if now >= start + seconds:
            return
        if number % 100 == 0:
            needs = {name: need(writer.written - before.get(name, -10**15), writer.waited or name not in before)
                     for name, writer in writers.items()}
            for name, rate in shares(budget, needs).items():
                writers[name].bucket.set_rate(rate, now)
                before[name], writers[name].waited = writers[name].written, False
        for writer in writers.values():
            writer.run(now)


def test_several_checkpoints_stay_within_the_budget_and_share_it() -> None:
    writers = {"small": Writer(64 << 10), "large": Writer(4 << 20), "slow": Writer(256 << 10, 5 * MIB)}
    simulate(100 * MIB, writers, 30)
    total = sum(writer.written for writer in writers.values())
    assert total <= 100 * MIB * 30 + 3 * (4 << 20), "never more than the budget, but for one piece of each"
    assert total >= 0.9 * 100 * MIB * 30, "and it is used"
    assert writers["slow"].written == pytest.approx(5 * MIB * 30, rel=0.1), "who needs less has all that it needs"
    assert writers["small"].written == pytest.approx(writers["large"].written, rel=0.05), "whatever its pieces"


def test_one_that_ends_leaves_its_part() -> None:
    first, second = Writer(1 << 20), Writer(1 << 20)
    simulate(50 * MIB, {"first": first, "second": second}, 10)
    half = second.written
    assert first.written == pytest.approx(half, rel=0.05)
    simulate(50 * MIB, {"second": second}, 10, start=10.0)
    assert second.written - half == pytest.approx(500 * MIB, rel=0.05)


def test_an_idle_writer_saves_no_more_than_a_burst() -> None:
    bucket = TokenBucket()
    bucket.set_rate(MIB, 0.0)
    bucket.take(0, 1000.0)
    ticket = bucket.take(int(MIB), 1000.0)
    assert bucket.wait(ticket, 1000.0) == pytest.approx(1 - BURST_SECONDS)
    bucket.set_rate(4 * MIB, 1000.0)
    assert bucket.wait(ticket, 1000.0) == pytest.approx((1 - BURST_SECONDS) / 4)
    bucket.set_rate(0, 1000.0)
    assert bucket.wait(ticket, 1000.0) == 0
    bucket.take(10 << 20, 1000.0)
    bucket.set_rate(MIB, 1000.0)
    assert bucket.wait(bucket.take(int(MIB), 1000.0), 1000.0) == pytest.approx(1.0), "no debt from a time without limit"


def test_threads_wait_and_are_let_go() -> None:
    pace = Pace(1000.0)
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(pace.wait(100_000))) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: pace.report()[1], within=20)
    assert done == []
    with pace.exempt():  # a session stands still
        assert pace.wait(5)
        for thread in threads:
            thread.join(5)
    assert done == [True] * 3
    late = threading.Thread(target=lambda: done.append(pace.wait(100_000)))
    late.start()
    pace.stop()
    late.join(5)
    assert done[3:] == [False] and not pace.wait(1)
