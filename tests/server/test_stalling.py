"""What is stuck, and what only takes long."""

from __future__ import annotations

import pytest

from rgpu.server import stalling
from rgpu.server.stalling import LOOK_SECONDS, SOME, STUCK_SECONDS, Stall, stuck


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The module's time; waits take theirs of it."""
    made = Clock()
    monkeypatch.setattr(stalling, "time", made)
    monkeypatch.setattr(Device, "clock", made)
    return made


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Device:
    """A queue of calls; those of ``ends`` end, each after ``takes`` seconds."""

    clock = Clock()

    def __init__(self, *calls: tuple[int, str], ends: int = 0, takes: float = 0.01) -> None:
        self.calls, self.ends, self.takes = list(calls), ends, takes
        self.waited: list[float] = []

    def unfinished(self) -> tuple[int, str] | None:
        return self.calls[0] if self.calls else None

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        assert timeout is not None and seq == self.calls[0][0]
        self.waited.append(timeout)
        done = len(self.waited) <= self.ends and self.takes <= timeout
        self.clock.now += self.takes if done else timeout
        if done:
            self.calls.pop(0)
        return done


def test_nothing_and_a_long_queue_that_gets_shorter_are_not_stuck() -> None:
    assert stuck(Device()) == ""
    queue = Device(*((seq, "kernel k") for seq in range(5, 900)), ends=900)
    assert stuck(queue) == "" and len(queue.waited) == SOME and len(queue.calls) == 895 - SOME


def test_a_call_that_does_not_end_is_named() -> None:
    device = Device((12, "kernel spin"), (13, ""))
    assert stuck(device).startswith("kernel spin (call 12) has not ended for 3.0 s")
    assert device.clock.now == STUCK_SECONDS < 5
    assert stuck(Device((7, ""))).startswith("call 7 has not ended")


def test_what_does_not_end_may_stand_behind_what_does() -> None:
    device = Device((8, "kernel ends"), (9, "kernel spin"), ends=1, takes=1.0)
    assert stuck(device).startswith("kernel spin (call 9) has not ended for 3.0 s") and device.clock.now == 4.0


def test_slow_work_that_ends_is_looked_at_for_a_bounded_time() -> None:
    device = Device(*((seq, "kernel slow") for seq in range(9)), ends=9, takes=2.0)
    assert stuck(device) == "" and device.clock.now == LOOK_SECONDS < 5


def test_a_stall_is_counted_from_when_the_oldest_became_it() -> None:
    device = Device((1, "a"), (2, "b"))
    stall = Stall(device)
    assert not stall.look(0.0) and not stall.look(2.9)
    device.calls.pop(0)
    assert not stall.look(2.95) and not stall.look(5.9)
    assert stall.look(5.96).startswith("b (call 2) has not ended for 3.0 s")
    device.calls.clear()
    assert not stall.look(20.0)
