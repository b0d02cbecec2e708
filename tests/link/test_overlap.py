"""Frames sealed and opened beside the socket's work: the same messages in the same order, and no thread left behind."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest

from rgpu.link.frames import SealedConnection
from rgpu.link.overlap import LONG, Helper, Reading
from rgpu.link.sealing import FROM_NODE, MESSAGE_LIMIT, TO_NODE, Opener, Sealer
from rgpu.session.errors import LinkError

KEYS = bytes(32), bytes(range(32))
WAIT = 30.0


def pair(helpers: bool = True) -> tuple[SealedConnection, SealedConnection]:
    """Both ends of a connection."""
    ends = []
    for sock, here, there in zip(socket.socketpair(), (TO_NODE, FROM_NODE), (FROM_NODE, TO_NODE), strict=True):
        ends.append(SealedConnection(sock, Sealer(KEYS[here], here, 1, "s"), Opener(KEYS[there], there, 1, "s"),
                                     session="s", epoch=1, purpose="calls", helpers=helpers))
    return ends[0], ends[1]


BEFORE: set[threading.Thread] = set()  #: threads that other tests may have left


@pytest.fixture(autouse=True)
def before() -> None:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in BEFORE]


def none_left() -> bool:
    deadline = time.monotonic() + WAIT
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads()


def test_long_and_short_messages_keep_their_order() -> None:
    chance = random.Random(4)
    sizes = [chance.choice((0, 5, 3000, LONG - 30, LONG, LONG + 1, 1 << 20, MESSAGE_LIMIT - 1)) for _ in range(120)]
    blob = chance.randbytes(MESSAGE_LIMIT)
    one, other = pair()

    def send() -> None:
        for number, size in enumerate(sizes):
            start = number % 7
            message = memoryview(blob)[start:start + size] if size < MESSAGE_LIMIT - 1 else memoryview(blob)[1:]
            if number % 3:
                one.send_whole(b"\x09" + bytes(message), more=number % 2 == 0)
            else:
                one.send(9, message)

    sender = threading.Thread(target=send)
    sender.start()
    for number, size in enumerate(sizes):
        kind, body = other.recv(WAIT)
        start = number % 7 if size < MESSAGE_LIMIT - 1 else 1
        assert kind == 9 and body == blob[start:start + size if size < MESSAGE_LIMIT - 1 else None], number
    sender.join(WAIT)
    one.close()
    other.close()
    assert none_left()


def test_a_lone_long_message_arrives_though_more_was_promised() -> None:
    one, other = pair()
    one.send_whole(b"\x09" + bytes(LONG), more=True)
    assert len(other.recv(WAIT)[1]) == LONG
    one.send(4, b"and on")
    assert other.recv(WAIT) == (4, b"and on")
    one.close()
    other.close()


def test_a_break_is_told_at_the_next_message() -> None:
    one, other = pair()
    one.send_whole(b"\x09" + bytes(MESSAGE_LIMIT - 1), more=True)  # more than the socket takes
    other.close()
    with pytest.raises(LinkError, match="while sending"):
        one.send(4, b"")
    with pytest.raises(LinkError):
        one.send(4, b"")
    one.close()
    assert none_left()


def test_closing_ends_a_send_and_a_receive_under_way() -> None:
    one, other = pair()
    one.send_whole(b"\x09" + bytes(MESSAGE_LIMIT - 1), more=True)
    told: list[str] = []

    def receive() -> None:
        try:
            other.recv()
            other.recv()
        except LinkError as error:
            told.append(error.message)

    receiver = threading.Thread(target=receive)
    receiver.start()
    time.sleep(0.05)
    one.close()
    other.close()
    receiver.join(WAIT)
    assert told and none_left()
    with pytest.raises(LinkError):
        one.send_whole(b"\x09" + bytes(LONG), more=True)


def test_a_frame_that_does_not_open_ends_it_with_the_next_one_half_received() -> None:
    one, other = pair()
    frame = one.sealer.seal(9, [bytes(LONG)])
    frame[len(frame) // 2] ^= 1
    data = bytes(frame) + bytes(one.sealer.seal(9, [b"x" * LONG]))

    def send() -> None:
        with contextlib.suppress(OSError):  # the other end closes when it has seen the first
            one.sock.sendall(data)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(LinkError, match="does not open"):
        other.recv(WAIT)
    sender.join(WAIT)
    one.close()
    other.close()
    assert none_left()


def test_reading_stops_when_it_is_enough_and_when_nothing_fits() -> None:
    here, there = socket.socketpair()
    helper, room = Helper("link-test"), memoryview(bytearray(100))
    there.sendall(b"a" * 60)
    with Reading(helper, here, room) as reading:
        time.sleep(0.1)
    assert reading.count == 60 and room[:60] == b"a" * 60
    there.sendall(b"b" * 150)
    with Reading(helper, here, room) as reading:
        time.sleep(0.1)
    assert reading.count == 100
    with Reading(helper, here, room[:0]) as reading:
        pass
    assert reading.count == 0 and len(here.recv(100)) == 50
    helper.close()
    with pytest.raises(OSError), Reading(helper, here, room):
        pass
    here.close()
    there.close()
    assert none_left()
