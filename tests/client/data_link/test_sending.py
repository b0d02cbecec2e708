"""Frames leave whole and in order, whoever sends them."""

from __future__ import annotations

import random
import select
import socket
import threading
import time

import pytest

from rgpu.client.data_link import sending
from rgpu.client.data_link.sending import FrameSender
from rgpu.session.errors import LinkError


def pair() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    one.setblocking(False)
    return one, other


@pytest.mark.parametrize("overlap", [False, True])
def test_frames_arrive_in_order(overlap: bool) -> None:
    one, other = pair()
    sender, told = FrameSender(one, overlap), threading.Event()
    sender.sent = told.set
    received = bytearray()

    def read() -> None:
        while data := other.recv(1 << 20):
            received.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    chance, sent = random.Random(1), b""
    poller = select.poll()
    poller.register(one, select.POLLOUT)
    for _ in range(200):
        deadline = time.monotonic() + 10
        while not sender.ready:
            assert time.monotonic() < deadline
            if sender.wants_write:
                poller.poll(100)
            sender.flush()
        size = chance.choice([5, 100, sending.LONG - 1, sending.LONG, 2 * sending.LONG])
        frame = chance.randbytes(size)
        buffer = sender.buffer(size)
        buffer[:] = frame
        sent += frame
        sender.send(buffer)
    sender.drain(10)
    sender.close()
    one.shutdown(socket.SHUT_RDWR)
    reader.join(10)
    assert received == sent
    assert told.is_set() == overlap


def test_at_most_two_long_frames_wait() -> None:
    one, _other = pair()
    sender = FrameSender(one, True)
    for _ in range(2):
        assert sender.ready
        sender.send(sender.buffer(4 * sending.LONG))
    assert not sender.ready and not sender.wants_write
    sender.close()
    one.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_broken_connection_is_told(overlap: bool) -> None:
    one, other = pair()
    sender, told = FrameSender(one, overlap), threading.Event()
    sender.sent = told.set
    other.close()
    with pytest.raises(LinkError):
        sender.send(sender.buffer(2 * sending.LONG))
        assert told.wait(10)
        sender.flush()
    sender.close()
