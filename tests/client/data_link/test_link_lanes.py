"""The agent's end of an attachment's lanes: what they lend is known, and what comes is put in its place."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rgpu.client.data_link import agent_lanes as link_lanes
from rgpu.client.data_link.agent_lanes import LinkLanes
from rgpu.client.session.shipping import LANE_CHUNK
from rgpu.link.data.lanes import DEPTH, WORTH, Lane
from rgpu.link.data.sealing import MESSAGE_LIMIT
from rgpu.link.messages.data import LANE, MARK_LAYOUT
from rgpu.session.errors import Corrupt, LinkError
from tests.support.eventually import eventually
from tests.support.worker.lanes import pair, slow_pair

KEY = bytes(range(16))


def opened(count: int = 2) -> tuple[LinkLanes, list[Any]]:
    """An attachment's lanes, and the connections at the worker's end."""
    found, theirs, ours = LinkLanes({"key": KEY, "most": count}, count), [], []
    for _ in range(found.claim()):
        here, there = pair()
        ours.append(here)
        theirs.append(there)
    found.opened(ours, lambda: None)
    assert found.use() == count
    return found, theirs


@pytest.mark.parametrize("offer", [None, {}, {"key": KEY}, {"most": 4}, {"key": 5, "most": 4},
                                   {"key": KEY, "most": "4"}, {"key": KEY, "most": -1}, "lanes"])
def test_an_offer_that_is_none(offer: Any) -> None:
    assert LinkLanes(offer, 4).wanted == 0


def test_the_smaller_number_counts_and_they_are_opened_once() -> None:
    assert LinkLanes({"key": KEY, "most": 2}, 4).wanted == 2
    found = LinkLanes({"key": KEY, "most": 9}, 3)
    assert (found.claim(), found.claim()) == (3, 0)


def test_memory_is_lent_until_it_was_sealed_and_sent() -> None:
    found, theirs = opened(1)
    message = memoryview(bytearray(4 << 20))
    for _ in range(DEPTH):
        assert found.ready
        found.send(2, (message,), len(message) + 1)
    assert not found.ready and not found.settled(found.given)
    reader = Lane(theirs[0])
    for _ in range(DEPTH):
        assert len(reader.take(len(message) + 1, 30)[1]) == len(message)
    assert eventually(lambda: found.settled(found.given) and found.ready)
    found.close()
    reader.close()


def test_what_a_lane_is_given_fits_a_frame() -> None:
    assert 1 + 8 + LANE_CHUNK <= MESSAGE_LIMIT  # type, place in the stream


def test_lanes_that_end_lend_nothing_any_more() -> None:
    found, theirs = opened(1)
    for _ in range(DEPTH):
        found.send(2, (memoryview(bytearray(4 << 20)),), (4 << 20) + 1)
    given = found.given
    found.close()
    assert eventually(lambda: found.settled(given))
    theirs[0].close()


def test_what_is_marked_comes_in_its_place() -> None:
    found, theirs = opened(2)
    writers = [Lane(connection) for connection in theirs]
    bodies = [bytes([number]) * (WORTH + number) for number in range(4)]
    for number in (1, 3, 0, 2):  # those of the second lane are there first
        writers[number % 2].send(17, bodies[number])
        if number == 3:
            time.sleep(0.05)
    for number in range(4):
        found.marked(MARK_LAYOUT.pack(number % 2, len(bodies[number]) + 1))
        assert found.awaited == len(bodies[number]) + 1
        message = None
        while message is None:
            message = found.next()
        assert message == (17, bodies[number]) and not found.awaited
    found.close()
    for writer in writers:
        writer.close()


def test_a_message_on_a_slow_lane_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_lanes, "WAIT_SECONDS", 0.3)
    here, there, stopped = slow_pair(600_000)
    found, writer, body = LinkLanes({"key": KEY, "most": 1}, 1), Lane(here), bytes(WORTH)
    found.opened([there], lambda: None)
    found.use()
    for _ in range(2):
        writer.send(17, body)
    found.marked(MARK_LAYOUT.pack(0, len(body) + 1))
    message, began = None, time.monotonic()
    while message is None:
        message = found.next()
        time.sleep(0.001)
    assert message == (17, body) and time.monotonic() - began > 0.3, "not slow: nothing was tested"
    stopped.set()
    found.marked(MARK_LAYOUT.pack(0, len(body) + 1))
    with pytest.raises(LinkError, match="does not come"):
        while found.next() is None:
            time.sleep(0.01)
    found.close()
    writer.close()


def test_a_mark_of_a_lane_that_is_not_there() -> None:
    found, theirs = opened(1)
    with pytest.raises(Corrupt):
        found.marked(MARK_LAYOUT.pack(1, 5))
    theirs[0].close()
    found.marked(MARK_LAYOUT.pack(0, 5))
    with pytest.raises(LinkError):
        while found.next() is None:
            time.sleep(0.01)
    found.close()


def test_what_is_opened_for_a_link_that_has_gone_is_closed() -> None:
    found, (here, there) = LinkLanes({"key": KEY, "most": 1}, 1), pair()
    found.claim()
    found.close()
    here.send(LANE, b"hello")
    found.opened([here], lambda: None)
    assert there.recv(30) == (LANE, b"hello")
    with pytest.raises(LinkError):
        there.recv(30)
    assert not found.fresh and not found.lanes
