"""Lanes: long messages side by side, in the order of their marks; a lane that breaks is told, and nobody hangs."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from rgpu.link.data import lanes
from rgpu.link.data.lanes import DEPTH, Lane
from rgpu.link.data.sealing import MESSAGE_LIMIT
from rgpu.link.messages.data import MARK_LAYOUT
from rgpu.session.errors import Corrupt, LinkError, TimedOut
from tests.support.eventually import eventually
from tests.support.worker.lanes import pair, slow_pair

WAIT = 30.0


def lane_pair(**how: Any) -> tuple[Lane, Lane]:
    """Two ends of a lane; ``how``: of the second one."""
    one, other = pair()
    return Lane(one), Lane(other, **how)



def test_messages_of_any_length_come_in_order_over_three_lanes() -> None:
    chance = random.Random(4)
    blob = chance.randbytes(MESSAGE_LIMIT)
    sizes = [chance.choice((0, 1, 60_000, lanes.WORTH, 1 << 20, MESSAGE_LIMIT - 1)) for _ in range(60)]
    pairs = [lane_pair() for _ in range(3)]
    marks, sent = [], 0

    def send() -> None:
        nonlocal sent
        for number, size in enumerate(sizes):
            lane = pairs[number % 3][0]
            lane.wait_ready(WAIT)
            if number % 2:
                lane.send_run(b"\x09" + blob[:size])
            else:
                lane.send(9, memoryview(blob)[:size // 2], memoryview(blob)[size // 2:size])
            marks.append(MARK_LAYOUT.pack(number % 3, size + 1))
            sent += 1

    sender = threading.Thread(target=send)
    sender.start()
    for number, size in enumerate(sizes):
        assert eventually(lambda wanted=number: len(marks) > wanted)
        which, length = lanes.mark(marks[number], 3)
        kind, body = pairs[which][1].take(length, WAIT)
        assert (kind, bytes(body)) == (9, blob[:size]), number
    sender.join(WAIT)
    for one, other in pairs:
        one.close()
        other.close()


def test_a_slow_reader_holds_the_writer_back() -> None:
    one, other = lane_pair()
    done: list[int] = []
    with pytest.raises(TimedOut):
        for number in range(64):
            one.wait_ready(1.0)
            one.send(9, bytes(1 << 20), done=lambda number=number: done.append(number))
    assert number < 63, "what is sent is bounded by what is taken"
    for _ in range(number):
        assert len(other.take(1 + (1 << 20), WAIT)[1]) == 1 << 20
    assert eventually(lambda: done == list(range(number)))
    one.close()
    other.close()


def test_a_slow_lane_is_not_a_dead_one() -> None:
    """A message takes several times as long as may pass without a byte, for who sends and who receives."""
    here, there, stopped = slow_pair(400_000)
    one, other = Lane(here), Lane(there)
    for _ in range(DEPTH):
        one.send(9, bytes(400_000))
    began = time.monotonic()
    one.wait_ready(0.4)
    assert len(other.take(400_001, 0.4)[1]) == 400_000
    assert len(other.take(400_001, 0.4)[1]) == 400_000
    assert time.monotonic() - began > 0.8, "not slow: nothing was tested"
    one.send(9, bytes(400_000))
    stopped.set()
    with pytest.raises(TimedOut):
        other.take(400_001, 0.4)
    one.send(9, bytes(400_000))
    with pytest.raises(TimedOut):
        one.wait_ready(0.4)
    one.close()
    other.close()


def test_a_message_goes_where_its_room_is_and_what_nobody_takes_is_dropped() -> None:
    rooms = [memoryview(bytearray(1 << 20)) for _ in range(2 * DEPTH + 2)]
    free, dropped = list(rooms), []

    def room(size: int) -> memoryview | None:
        return free.pop()[:size] if free else None

    one, other = lane_pair(room=room, drop=lambda body: dropped.append(bytes(body[:1])))
    for number in range(DEPTH + 1):
        one.wait_ready(WAIT)
        one.send(9, bytes([number]) * 100_000)
    assert bytes(other.take(100_001, WAIT)[1]) == bytes(100_000)
    assert eventually(lambda: len(free) <= len(rooms) - DEPTH - 1)
    other.close()
    # by either thread
    assert eventually(lambda: sorted(dropped) == [bytes([number]) for number in range(1, DEPTH + 1)])
    one.close()


def test_a_frame_that_does_not_open_gives_its_room_back() -> None:
    dropped: list[int] = []
    one, there = pair()
    other = Lane(there, room=lambda size: memoryview(bytearray(size)), drop=lambda body: dropped.append(len(body)))
    frame = one.sealer.seal(9, (bytes(100_000),))
    frame[40] ^= 1
    one.sock.sendall(frame)
    with pytest.raises(LinkError, match="frame 0 does not open"):
        other.take(100_001, WAIT)
    assert dropped == [100_001]
    one.close()
    other.close()


def test_another_length_than_the_mark_said() -> None:
    dropped: list[int] = []
    one, other = lane_pair(drop=lambda body: dropped.append(len(body)))
    one.send(9, b"abc")
    with pytest.raises(Corrupt, match="4 bytes, its mark said 5"):
        other.take(5, WAIT)
    assert dropped == [3]
    one.close()
    other.close()


@pytest.mark.parametrize("body", [b"", MARK_LAYOUT.pack(0, 5)[:-1], MARK_LAYOUT.pack(0, 5) + b"\0",
                                  MARK_LAYOUT.pack(2, 5)])
def test_marks_that_mean_nothing(body: bytes) -> None:
    with pytest.raises(Corrupt):
        lanes.mark(body, 2)


@pytest.mark.parametrize("who", ["the other end", "this end"])
def test_who_waits_hears_of_the_end(who: str) -> None:
    came = threading.Event()
    one, other = lane_pair(came=came.set)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            other.take(10)
        except LinkError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    (one if who == "the other end" else other).close()
    waiting.join(WAIT)
    assert len(found) == 1 and came.wait(WAIT)
    with pytest.raises(LinkError):
        other.next(10)
    assert eventually(lambda: _refuses(other))
    one.close()
    other.close()
    other.close()


def _refuses(lane: Lane) -> bool:
    try:
        lane.send(9, b"x")
    except LinkError:
        return True
    return False


def test_done_is_called_though_the_lane_broke() -> None:
    """Whoever lent the bytes gets them back."""
    one, other = lane_pair()
    other.close()
    done = threading.Event()
    try:
        for _ in range(50):
            one.send(9, bytes(1 << 20), done=done.set)
            assert done.wait(WAIT)
            done.clear()
    except LinkError:
        pass
    else:
        raise AssertionError("nothing told of the break")
    one.close()


def test_no_thread_stays() -> None:
    before = set(threading.enumerate())
    ends = [end for _ in range(3) for end in lane_pair()]
    for end in ends:
        end.close()
    assert eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("asked, count", [("", 0), ("3", 3), ("0", 0), ("99", 16), ("many", 0), ("-1", 0)])
def test_how_many_are_wanted(monkeypatch: pytest.MonkeyPatch, asked: str, count: int) -> None:
    monkeypatch.setenv("RGPU_LANES", asked)
    assert lanes.wanted() == count
