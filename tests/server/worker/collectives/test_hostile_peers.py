"""A session of the same gang that asks for what there is not: its link ends, and nobody else notices."""

from __future__ import annotations

import pytest

from rgpu.link.messages.ranks import ASK, CONTRIBUTIONS, NEVER, REFILL, Ask, Refill
from rgpu.server.collectives.contributions import Log
from rgpu.server.worker.collectives.answering import Answering
from rgpu.server.worker.collectives.asking import Asking
from rgpu.session.errors import Corrupt
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
