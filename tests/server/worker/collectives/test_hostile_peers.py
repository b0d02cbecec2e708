"""A session of the same gang that asks for what there is not: its link ends, and nobody else notices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rgpu.link.data import lanes
from rgpu.link.messages.ranks import (
    ASK,
    CONTRIBUTIONS,
    GO_BACK,
    MARK_LAYOUT,
    NEVER,
    REFILL,
    Ask,
    GoBack,
    Lane,
    Offer,
    Refill,
)
from rgpu.server.collectives.contributions import Log
from rgpu.server.worker.agent.link_lanes import LinkLanes
from rgpu.server.worker.collectives.answering import Answering, Asker
from rgpu.server.worker.collectives.asking import MOST_BACK, Asking
from rgpu.server.worker.collectives.lanes import Arriving, AskerLanes
from rgpu.server.worker.collectives.questions import Question
from rgpu.session.errors import Corrupt, Fenced, LinkError
from tests.fuzz.gangs import BROUGHT, HERE, UNIQUE, SharedStub, Told, packed


@pytest.mark.parametrize("ask", [
    Ask(-1, UNIQUE, HERE, [0], []), Ask(1, UNIQUE, HERE, [-2], []),
    Ask(1, UNIQUE, HERE, [], [1 << 40]), Ask(1, UNIQUE, (-7, -1, 3), [0], []), Refill(-1, UNIQUE)])
def test_impossible_questions_end_the_link(ask: Ask | Refill) -> None:
    answering, client = Answering(Log()), Told()
    answering.opened(UNIQUE, SharedStub())
    with pytest.raises(Corrupt):
        answering._take(client, ASK if isinstance(ask, Ask) else REFILL, packed(ask))


def test_ranks_that_the_communicator_has_not_are_told_so_once_it_is_made() -> None:
    """Its question came first; that it is looked at again is the thread's that brings something here."""
    log, client = Log(), Told()
    answering = Answering(log)
    answering._clients.add(client)
    answering._take(client, ASK, packed(Ask(5, UNIQUE, HERE, [7], [])))
    answering.opened(UNIQUE, SharedStub())
    log.put(UNIQUE, HERE, {0: BROUGHT[0]})
    assert [kind for kind, _ in client.told] == [NEVER] and not client.pending
    assert b"3 ranks" in client.told[0][1]


def test_pieces_of_what_was_not_asked_are_not_kept() -> None:
    asking, pieces = Asking("a", Log(), lambda session, epoch: None, lambda: False), {}  # type: ignore[var-annotated]
    for number in range(50):
        asking._take(CONTRIBUTIONS, memoryview(number.to_bytes(8, "little") + b"\0" + bytes(1000)), pieces)
    assert not pieces


@pytest.mark.parametrize(("asker", "times"), [(Asker("b", 1), 1), (Asker("b", 1, True), 0), (Asker("d", 1), 0)])
def test_only_an_owner_in_the_communicator_has_another_go_back(asker: Asker, times: int) -> None:
    """Neither a worker that a move makes nor a session without a rank; nor for what would not be brought again."""
    back: list[str] = []
    answering, client = Answering(Log(), back.append), Told()
    client.asker = asker
    answering.opened(UNIQUE, SharedStub())
    for number in (3, 4):  # of the second its checkpoint is past
        answering._take(client, GO_BACK, packed(GoBack(UNIQUE, (-1, -1, number), "it is gone")))
    assert len(back) == times and all("session b" in why and "it is gone" in why for why in back)


def test_one_worker_has_another_session_go_back_three_times_at_most() -> None:
    """Once for each of that one's epochs; who answers that nothing is kept, again and again, costs it no more."""
    asking = Asking("a", Log(), lambda session, epoch: None, lambda: False)
    asking._shared[UNIQUE] = SharedStub()
    link: Any = SimpleNamespace(epoch=0, send=lambda kind, body: sent.append(kind))
    sent: list[int] = []
    asking._links["b"] = link
    question = Question(1, "b", UNIQUE, HERE, ("a", "b", "c"), (1,), (), 0.0)
    for link.epoch in range(1, MOST_BACK + 1):
        assert asking._send_back(question, "b") and asking._send_back(question, "b")
    link.epoch += 1
    assert not asking._send_back(question, "b")
    assert sent == [GO_BACK] * 3


@pytest.mark.parametrize("size", [0, (1 << 32) + 1])
def test_an_impossible_length_ends_the_link(size: int) -> None:
    with pytest.raises(Corrupt, match=f"{size} bytes are announced"):
        Arriving(size, 0, lambda size: None)


def test_pieces_have_the_length_that_was_announced() -> None:
    for pieces in ((b"\0abc", b"\1"), (b"\0abc", b"\1de", ), (b"\0abcde",), (b"",)):
        arriving = Arriving(4, 1, lambda size: None)
        with pytest.raises(Corrupt, match="4 were announced"):
            for piece in pieces:
                assert arriving.take(memoryview(piece)) is None
    whole = Arriving(4, 3, lambda size: np.zeros(size, np.uint8))
    assert whole.take(memoryview(b"\0abc")) is None and bytes(whole.take(memoryview(b"\1d")) or b"") == b"abcd"
    assert whole._whole[3:].ctypes.data % 64 == 0


def test_marks_of_lanes_that_there_are_not_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "wanted", lambda: 2)
    here = AskerLanes()
    with pytest.raises(LinkError, match="not offered"):
        here.opened([])
    assert here.offered(packed(Offer(b"key", 16))) == 2
    with pytest.raises(Corrupt, match="lane 0 of 0"):
        here.message(memoryview(MARK_LAYOUT.pack(0, 5)))
    with pytest.raises(Corrupt, match="twice"):
        here.offered(packed(Offer(b"key", 16)))


def test_a_lane_with_another_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "wanted", lambda: 2)
    answering, client = Answering(Log()), Told()
    client.lanes = LinkLanes(None)
    answering._clients.add(client)
    with pytest.raises(Fenced, match="no rank link here"):
        answering._join(Told(), Lane(b"x" * 16, 0))
