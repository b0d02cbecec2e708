"""Which operations belong together, whatever the order in which their streams come to them."""

from __future__ import annotations

from rgpu.server.collectives.matching import Meeting, Posting
from rgpu.session.objects.collectives import DataType, Kind, Operation, Reduction
from tests.support.collectives.ranks import NoMemory

UNUSED = NoMemory()


def pair(kind: Kind, peer: int) -> Operation:
    return Operation(kind, DataType.FLOAT32, Reduction.SUM, peer, 40, 18, 1 << 40, 1 << 41, 4)


def test_sends_and_receives_keep_their_order_when_a_later_one_comes_first() -> None:
    """Two streams of a rank send to the same peer: the later send's turn comes before the earlier one's."""
    done: list[list[Posting]] = []
    meeting = Meeting(2, done.append)
    sends = [meeting.post(0, pair(Kind.SEND, 1), UNUSED) for _ in range(2)]
    receives = [meeting.post(1, pair(Kind.RECEIVE, 0), UNUSED) for _ in range(2)]
    for late in (sends[1], receives[1], sends[0]):
        meeting.arrive([late])
        assert not done
    meeting.arrive([receives[0]])
    assert done == [[sends[0], receives[0]], [sends[1], receives[1]]]
    assert all(posting.complete for posting in (*sends, *receives))


def test_numbers_of_a_pair_go_on() -> None:
    meeting = Meeting(2, lambda together: None)
    for number in range(3):
        sent, received = meeting.post(0, pair(Kind.SEND, 1), UNUSED), meeting.post(1, pair(Kind.RECEIVE, 0), UNUSED)
        assert (sent.number, received.number) == (number, number)
        meeting.arrive([sent])
        meeting.arrive([received])
    assert [figure["number"] for figure in meeting.figures()] == [2, 2]
