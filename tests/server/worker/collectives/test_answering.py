"""What one worker tells another that asks."""

from __future__ import annotations

from rgpu.link.messages.ranks import ASK, ASK_ID_LAYOUT, CONTRIBUTIONS, HOLDS, Ask
from rgpu.server.collectives.contributions import Contribution, Key, Log, Unique, encode
from rgpu.server.worker.collectives.answering import Answering
from rgpu.server.worker.collectives.asking import Asking
from tests.fuzz.gangs import BROUGHT, HERE, UNIQUE, SharedStub, Told, packed


def test_what_might_be_dropped_before_it_is_used_is_not_had() -> None:
    """It came with another member's log, ahead of this session's ranks."""
    log, client = Log(most=1), Told()
    answering = Answering(log)
    answering._clients.add(client)
    answering.opened(UNIQUE, SharedStub())
    log.put(UNIQUE, HERE, {1: BROUGHT[0]})
    answering._take(client, ASK, packed(Ask(5, UNIQUE, HERE, [], [1])))
    assert not client.told and client.pending
    log.hold(UNIQUE, HERE)
    log.put(UNIQUE, HERE, {0: BROUGHT[0]})
    assert [kind for kind, _ in client.told] == [HOLDS] and not client.pending


class InBetween(Log):
    """Has a second rank ask just before what came is put there."""

    def put(self, unique: Unique, key: Key, came: dict[int, Contribution], seq: int = 0) -> None:
        self.asking.ask(UNIQUE, HERE, [1], [])
        super().put(unique, key, came, seq)

    asking: Asking


def test_what_came_is_not_asked_for_by_a_second_rank() -> None:
    """It would be told that it is not kept any more, where the first one's answer was the last thing missing."""
    log = InBetween()
    log.asking = asking = Asking("a", log, lambda session, epoch: None, lambda: False)
    asking.opened(UNIQUE, SharedStub())
    asking.ask(UNIQUE, HERE, [1], [])
    (question,) = asking._questions.of("b")
    body = ASK_ID_LAYOUT.pack(question.id) + b"\1" + b"".join(encode({1: BROUGHT[1]}))
    asking._take(CONTRIBUTIONS, memoryview(body), {})
    assert 1 in log.get(UNIQUE, HERE) and not asking._questions.open
