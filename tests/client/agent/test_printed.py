"""The agent's count of printed text, and its way to the shim."""

from __future__ import annotations

import socket
import struct

import pytest

from rgpu.client import local
from rgpu.client.delivery import Deliveries
from rgpu.client.printed import TextLedger
from rgpu.client.returns import Returns
from rgpu.session.errors import Corrupt


def piece(position: int, text: bytes) -> memoryview:
    return memoryview(struct.pack("<Q", position) + text)


def test_a_piece_that_came_again_is_passed_over() -> None:
    ledger = TextLedger()
    assert ledger.take(piece(0, b"abcdef"))
    assert not ledger.take(piece(0, b"abc")) and not ledger.take(piece(6, b""))
    assert ledger.take(piece(4, b"efgh")) and ledger.given == 8


@pytest.mark.parametrize("body", [b"", b"1234567", struct.pack("<Q", 1) + b"x", b"\xff" * 20])
def test_holes_and_short_pieces_are_refused(body: bytes) -> None:
    with pytest.raises(Corrupt):
        TextLedger().take(body)


def test_what_is_confirmed() -> None:
    ledger = TextLedger()
    ledger.take(piece(0, b"abcdef"))
    assert ledger.unconfirmed == 6
    assert ledger.confirm() == 6 and ledger.unconfirmed == 0


def test_without_a_ring_text_goes_over_the_socket() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        peer = local.LocalPeer(ours)
        returns = Returns("s", peer, None, Deliveries())
        for body in (piece(0, b"hello\n"), piece(0, b"hello\n"), piece(3, b"lo\nworld\n")):
            returns.printed(body)
        data = theirs.recv(4096)
        peer.close()
    assert data == b"".join(struct.pack("<IIQ", 8 + len(text), local.TEXT, at) + text
                            for at, text in ((0, b"hello\n"), (3, b"lo\nworld\n")))


def test_hello_says_whether_text_is_wanted() -> None:
    ours, theirs = socket.socketpair()
    with theirs, open("/dev/null", "rb") as null:
        peer = local.LocalPeer(ours)
        for wishes in (0, local.WANTS_TEXT):
            body = struct.pack("<IIIIQH", local.PROTOCOL, 1, 1, wishes, 1, 1) + b"x"
            socket.send_fds(theirs, [struct.pack("<II", len(body), local.HELLO) + body], [null.fileno()])
            (hello,) = peer.receive()
            assert isinstance(hello, local.Hello) and hello.text is bool(wishes)
            hello.close()
        peer.close()
