"""Pages and GPU memory that workers of one node lend each other for direct collectives."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from rgpu.link.local.shared import Channel, Message
from rgpu.link.messages.rank_memory import GPU_MEMORY, PAGE
from rgpu.server.collectives.direct_page import DECIDED, PAGE_SIZE, Page, digest_of
from rgpu.server.worker.collectives.direct import MOST_SEGMENTS, Direct
from rgpu.server.worker.collectives.segments import PeerSegments
from rgpu.session.errors import Corrupt

UNIQUE, MEMBERS = b"u" * 128, ["a", "b"]


class Worker:
    """One worker's memory; ``epochs``: at which other sessions were seen."""

    def __init__(self) -> None:
        self.epochs: dict[str, int] = {}
        self.gone: set[str] = set()
        self.incoming = False
        self.back: list[str] = []
        self.direct = Direct(lambda session: self.epochs.get(session, 0), self.gone.__contains__, self.back.append,
                             self.back.append, lambda: self.incoming)

    def borrow(self, lender: Worker, session: str, epoch: int = 1) -> PeerSegments:
        """Make a link to the lender's worker, and read what it sends."""
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.setblocking(False)
        borrowed = self.direct.borrowed(session, epoch)
        lent = PeerSegments(b"n", Channel(two), lambda message: self.direct.take(borrowed, message))
        borrowed.refresh = lent.refresh
        self.epochs[session] = max(epoch, self.epochs.get(session, 0))
        lender.direct.admit(Channel(one))
        return lent


def memory(size: int = 4096) -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    return fd


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    yield Worker(), Worker()


def test_what_is_made_before_and_after_a_link_is_lent(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    theirs = b.direct.page(UNIQUE, 1)
    assert theirs is not None and b.direct.segment(memory(), 4096) == 1
    assert a.direct.peers(UNIQUE, MEMBERS, "a") == {}
    a.borrow(b, "b")
    (peer,) = a.direct.peers(UNIQUE, MEMBERS, "a").values()
    mapped = Page.read(peer.pages[digest_of(UNIQUE)], 2)
    assert mapped.identity == theirs.identity and [size for _, size in peer.segments] == [4096]
    mapped.set(4, DECIDED)
    assert theirs.word(4, DECIDED), "it is the same memory"
    assert b.direct.segment(memory(8192), 8192) == 2 and b.direct.page(b"v" * 128, 1) is not None
    a.direct.peers(UNIQUE, MEMBERS, "a")
    assert [size for _, size in peer.segments] == [4096, 8192] and len(peer.pages) == 2
    assert a.direct.peers(b"w" * 128, MEMBERS, "a") == {}, "it has no page of that communicator"


def test_another_link_to_the_same_worker_changes_nothing(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    b.direct.page(UNIQUE, 1), b.direct.segment(memory(), 4096)
    a.borrow(b, "b")
    (peer,) = a.direct.peers(UNIQUE, MEMBERS, "a").values()
    a.borrow(b, "b")
    assert list(a.direct.peers(UNIQUE, MEMBERS, "a").values()) == [peer] and len(peer.segments) == 1
    assert not a.direct.over(peer)


def test_memory_of_a_worker_whose_epoch_is_over_is_not_used(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    b.direct.page(UNIQUE, 1)
    a.borrow(b, "b")
    (peer,) = a.direct.peers(UNIQUE, MEMBERS, "a").values()
    a.epochs["b"] = 2
    assert a.direct.over(peer) and a.direct.peers(UNIQUE, MEMBERS, "a") == {}
    after = Worker()
    after.direct.page(UNIQUE, 1)
    a.borrow(after, "b", 2)
    (new,) = a.direct.peers(UNIQUE, MEMBERS, "a").values()
    assert new is not peer and a.direct.over(peer) and not a.direct.over(new)
    a.gone.add("b")
    assert a.direct.gone("b")


def test_a_move_s_destination_takes_no_part(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    b.direct.page(UNIQUE, 1)
    a.borrow(b, "b")
    a.incoming = True
    assert a.direct.peers(UNIQUE, MEMBERS, "a") == {}


def test_messages_that_make_no_sense(pair: tuple[Worker, Worker]) -> None:
    a, _ = pair
    peer = a.direct.borrowed("b", 1)
    for message in (Message(PAGE, 0, PAGE_SIZE, b"short", memory(PAGE_SIZE)),
                    Message(PAGE, 0, PAGE_SIZE, bytes(16), memory(64)),
                    Message(PAGE, 0, 1 << 40, bytes(16), memory(PAGE_SIZE))):
        with pytest.raises(Corrupt, match="no page"):
            a.direct.take(peer, message)
    for number, size in ((2, 4096), (0, 4096), (1, 0), (1, 1 << 60)):
        a.direct.take(peer, Message(GPU_MEMORY, number, size, b"", memory()))
    assert not peer.segments and not peer.pages


def test_a_communicator_that_is_over_is_not_lent_or_kept(pair: tuple[Worker, Worker]) -> None:
    a, b = pair
    a.direct.page(UNIQUE, 0), b.direct.page(UNIQUE, 1)
    a.borrow(b, "b")
    (peer,) = a.direct.peers(UNIQUE, MEMBERS, "a").values()
    a.direct.ended(UNIQUE)
    assert a.direct.peers(UNIQUE, MEMBERS, "a") == {} and not peer.pages
    b.borrow(a, "a")
    assert b.direct.peers(UNIQUE, MEMBERS, "b") == {}


def test_segments_are_bounded(pair: tuple[Worker, Worker]) -> None:
    a, _ = pair
    assert [a.direct.segment(memory(), 4096) for _ in range(MOST_SEGMENTS + 1)][-2:] == [MOST_SEGMENTS, 0]
    assert a.direct.describe() == {"gpu_segments": MOST_SEGMENTS, "gpu_segment_bytes": MOST_SEGMENTS * 4096}
