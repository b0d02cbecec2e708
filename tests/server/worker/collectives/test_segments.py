"""Memory of contributions that two workers share."""

from __future__ import annotations

import gc
import os
import socket

import numpy as np
import pytest

from rgpu.link.local.shared import Channel
from rgpu.link.messages.rank_memory import MEMORY
from rgpu.migrate.transfer.pieces import in_pieces
from rgpu.server.collectives.contributions import Contribution, decode, encode
from rgpu.server.worker.collectives.lanes import Arriving
from rgpu.server.worker.collectives.segments import SMALLEST, Borrower, OwnSegments, PeerSegments
from rgpu.session.errors import RgpuError
from rgpu.session.objects.collectives import DataType, Kind, Reduction


def pair(own: OwnSegments) -> tuple[Borrower, PeerSegments]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    borrower = Borrower(Channel(one))
    own.admit(borrower)
    return borrower, PeerSegments(b"n", Channel(two))


def brought(own: OwnSegments, byte: int, size: int = SMALLEST) -> memoryview:
    room = own.take(size)
    assert room is not None
    room[:] = byte
    return room.data.toreadonly()


def test_nothing_is_lent_without_a_borrower_and_nothing_small() -> None:
    own = OwnSegments()
    assert own.take(SMALLEST - 1) is None
    data, (borrower, _) = brought(own, 1), pair(own)
    own.dismiss(borrower)
    assert own.lend(data, borrower) is None


def test_it_is_written_again_when_nobody_refers_to_it_any_more() -> None:
    own = OwnSegments()
    borrower, peer = pair(own)
    data = brought(own, 1)
    place = own.lend(data, borrower)
    assert place is not None and own.lend(b"x" * SMALLEST, borrower) is None
    view = peer.view(*place)
    part = view[5:9]
    assert bytes(view) == bytes([1]) * SMALLEST and view.readonly
    del data, view
    gc.collect()
    peer.settle()
    second = brought(own, 2)
    assert bytes(part) == bytes([1]) * 4 and own.describe()["segments"] == 2, "a part of the first is referred to"
    del part
    gc.collect()
    peer.settle()
    third = brought(own, 3)
    assert own.describe()["segments"] == 2, "the first one is used again"
    third_place = own.lend(third, borrower)
    assert third_place == place and bytes(peer.view(*third_place))[:1] == b"\3" and second[0] == 2


def test_each_borrower_gives_back_what_it_was_given() -> None:
    own = OwnSegments()
    (one, mine), (two, yours) = pair(own), pair(own)
    data = brought(own, 1)
    views = [peer.view(*(own.lend(data, borrower) or (0, 0))) for borrower, peer in ((one, mine), (one, mine),
                                                                                     (two, yours))]
    del data
    for left in (2, 1):
        del views[0]
        gc.collect()
        mine.settle(), yours.settle()
        brought(own, 9)
        assert bytes(views[-1][:1]) == b"\1", f"{left} views are left"
    assert own.describe()["segments"] == 2


def test_a_borrower_that_goes_without_a_word_may_still_read_it() -> None:
    own = OwnSegments()
    borrower, peer = pair(own)
    data = brought(own, 1)
    view = peer.view(*(own.lend(data, borrower) or (0, 0)))
    pair(own)
    own.dismiss(borrower)
    del data
    gc.collect()
    for byte in (2, 3, 4):
        brought(own, byte)
    assert bytes(view) == bytes([1]) * SMALLEST
    assert own.describe()["segments"] == 1, "the first one is not kept here"


def test_there_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.server.worker.collectives.segments.MOST_SEGMENTS", 2)
    own = OwnSegments()
    pair(own)
    held = [brought(own, number) for number in range(2)]
    assert own.take(SMALLEST) is None
    del held[0]
    gc.collect()
    assert own.take(SMALLEST) is not None


def test_what_nothing_uses_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.server.worker.collectives.segments.MOST_KEPT", 2 * SMALLEST)
    own = OwnSegments()
    data = [brought(own, number) for number in range(5)]
    assert own.describe()["segments"] == 5
    del data
    gc.collect()
    assert own.take(SMALLEST) is not None and own.describe()["segments"] == 2


def test_what_was_brought_outlives_who_brought_it() -> None:
    own = OwnSegments()
    borrower, peer = pair(own)
    view = peer.view(*(own.lend(brought(own, 7), borrower) or (0, 0)))
    own.dismiss(borrower)
    peer.close()
    del own
    gc.collect()
    assert bytes(view) == bytes([7]) * SMALLEST


def test_segments_that_are_free_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.server.worker.collectives.segments.MOST_KEPT", 3 * SMALLEST)
    own = OwnSegments()
    borrower, peer = pair(own)
    many = [brought(own, number) for number in range(6)]
    for data in many:
        peer.view(*(own.lend(data, borrower) or (0, 0)))
    gc.collect()
    peer.settle()
    many.clear()
    del data
    gc.collect()
    large = brought(own, 1, 20 * SMALLEST)
    assert own.describe()["segment_bytes"] == 23 * SMALLEST and len(large) == 20 * SMALLEST
    peer.settle()
    assert len(peer._wholes) == 3, "the borrower unmaps what is not lent any more"


@pytest.mark.parametrize("what", ["unsealed", "short", "twice", "kind", "nothing"])
def test_a_lender_that_lies_ends_the_link(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.server.worker.collectives.segments.ANSWER_SECONDS", 0.1)
    own = OwnSegments()
    borrower, peer = pair(own)
    place = own.lend(brought(own, 1), borrower)
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, SMALLEST)
    if what == "unsealed":
        borrower.channel.send(MEMORY, 77, SMALLEST, fd=fd)
    elif what == "twice":
        borrower.channel.send(MEMORY, 1, SMALLEST, fd=fd)
    elif what == "kind":
        borrower.channel.send(99, 77)
    with pytest.raises(RgpuError):
        peer.view(77, SMALLEST) if what != "short" else peer.view(*(place or (0, 0))[:1], SMALLEST + 1)
    os.close(fd)


def test_what_arrived_keeps_its_memory_until_nothing_refers_to_it() -> None:
    own = OwnSegments()

    def arrived(byte: int) -> Contribution:
        parts = encode({0: Contribution(Kind.ALL_REDUCE, DataType.INT8, Reduction.SUM, -1, SMALLEST, b"",
                                        bytes([byte]) * SMALLEST)})
        arriving = Arriving(sum(map(len, parts)), sum(map(len, parts[:2])), own.take)
        (*_, whole) = [arriving.take(memoryview(last + piece)) for last, piece in in_pieces(*parts)]
        assert whole is not None
        return decode(whole)[0]

    first = arrived(1)
    gc.collect()
    others = [arrived(byte) for byte in (2, 3)]
    assert [bytes(one.data) for one in (first, *others)] == [bytes([byte]) * SMALLEST for byte in (1, 2, 3)]
    assert own.describe()["segments"] == 3
    assert np.frombuffer(first.data, np.uint8).ctypes.data % 64 == 0
    del first, others
    gc.collect()
    arrived(4)
    assert own.describe()["segments"] == 3
