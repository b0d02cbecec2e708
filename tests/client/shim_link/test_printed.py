"""The agent's count of printed text, and its way to the shim; at last the whole agent between a worker and a shim."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from rgpu.client.run.agent import Agent
from rgpu.client.session.delivery import Deliveries
from rgpu.client.shim_link import local
from rgpu.client.shim_link.printed import TextLedger
from rgpu.client.shim_link.returns import Returns
from rgpu.link.messages.shim import HELLO, TEXT, VERSION, WANTS_TEXT
from rgpu.session.errors import Corrupt
from tests.support.agent.fake_pool import FakePool
from tests.support.agent.running import SYNC, start
from tests.support.eventually import eventually


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
    assert data == b"".join(struct.pack("<IIQ", 8 + len(text), TEXT, at) + text
                            for at, text in ((0, b"hello\n"), (3, b"lo\nworld\n")))


def test_hello_says_whether_text_is_wanted() -> None:
    ours, theirs = socket.socketpair()
    with theirs, open("/dev/null", "rb") as null:
        peer = local.LocalPeer(ours)
        for wanted in (0, WANTS_TEXT):
            body = struct.pack("<IIIIQH", VERSION, 1, 1, wanted, 1, 1) + b"x"
            socket.send_fds(theirs, [struct.pack("<II", len(body), HELLO) + body], [null.fileno()])
            (hello,) = peer.receive()
            assert isinstance(hello, local.Hello) and hello.text is bool(wanted)
            hello.close()
        peer.close()


WHOLE = b"".join(b"line %d\n" % number for number in range(40_000))


@pytest.mark.parametrize("ring", [False, True], ids=["socket", "ring"])
def test_through_links_that_break(pool: FakePool, agent: Agent, ring: bool) -> None:  # noqa: F811
    """The worker says everything again that was not confirmed; the shim gets each byte once, ahead of the answer."""
    shim = start(agent, ring=ring, text=True)
    worker, rng, sent = pool.sessions["heat"], random.Random(1), 0
    eventually(lambda: worker.attached == 1)
    for turn in range(1, 8):
        count = rng.randrange(1000, 60_000)
        again = rng.randrange(max(0, sent - 5000), sent + 1)  # some of it may have arrived already
        for at in range(again, sent + count, 9000):
            worker.print_text(at, WHOLE[at:min(at + 9000, sent + count)])
        sent += count
        seq = shim.call(SYNC, bytes(8), awaited=True)
        shim.wait(lambda seq=seq: any(answer[0] == seq for answer in shim.answers))  # type: ignore[misc]
        assert shim.text == WHOLE[:sent]
        worker.drop()
        eventually(lambda turn=turn: worker.attached == turn + 1)  # type: ignore[misc]
        assert worker.printed[-1] == sent
    shim.goodbye()


def test_the_worker_is_told_what_it_may_forget(pool: FakePool, agent: Agent) -> None:  # noqa: F811
    shim = start(agent, text=True)
    worker = pool.sessions["heat"]
    eventually(lambda: worker.attached == 1)
    worker.print_text(0, WHOLE[:200_000])
    shim.wait(lambda: len(shim.text) == 200_000)
    shim.call(SYNC, bytes(8), awaited=True)
    eventually(lambda: worker.confirmed == 200_000)
    shim.goodbye()


def test_a_shim_of_before_takes_none(pool: FakePool, agent: Agent) -> None:  # noqa: F811
    shim = start(agent)
    worker = pool.sessions["heat"]
    eventually(lambda: worker.attached == 1)
    assert worker.printed == [None]
    shim.goodbye()
