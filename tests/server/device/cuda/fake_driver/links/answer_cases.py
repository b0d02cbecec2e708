"""Answers of several calls under way at once: nothing of one stands between the pieces of another."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import pytest

from rgpu.server.worker.agent import answer_sender
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import LinkError
from tests.support.eventually import eventually
from tests.support.fake_driver.support import Agent as AgentEnd
from tests.support.fake_driver.support import Journal, linked


@pytest.mark.parametrize("other", ["stream_synchronize", "event_synchronize"])
def test_short_answers_beside_a_long_one(device: Any, journal: Journal, monkeypatch: pytest.MonkeyPatch,
                                         other: str) -> None:
    """A program of several threads: two read 3 MiB, others wait for what is complete; the sender is slow.

    JAX got the head of another answer 256 KiB into its data. The thread that receives sends some of the short ones
    itself; others are Python's (``event_synchronize`` of an event that was never recorded).
    """
    monkeypatch.setattr(answer_sender, "SPIN", 0.003)
    runtime = SessionRuntime("s", 1, device)
    link, connection = linked(runtime)
    agent = AgentEnd(connection)
    place = answer_sender.AnswerSender._place

    def slowly(self: answer_sender.AnswerSender, piece: Any) -> bytes:
        if piece.size:
            time.sleep(0.0002 if piece.more else 0.01)  # the next one is another answer's
        return place(self, piece)

    data = random.Random(4).randbytes(3 << 20)
    agent.send(journal.opened() + journal.write(data) + journal("stream_synchronize", stream=18))
    assert agent.answer(journal.seq)[0] == 0
    arguments = {"stream": 19} if other == "stream_synchronize" else {"event": 20}
    monkeypatch.setattr(answer_sender.AnswerSender, "_place", slowly)
    for _ in range(6):
        agent.send(journal.read(len(data)) + journal.read(len(data), stream=19))
        long, short = (journal.seq - 1, journal.seq), []
        for _ in range(12):
            agent.send(journal(other, **arguments))
            short.append(journal.seq)
            time.sleep(0.002)
        for seq in long:
            assert agent.answer(seq) == (0, 0, data)
        for seq in short:
            assert agent.answer(seq) == (0, 0, b"")
    link.close()


def test_a_bug_in_the_sending_ends_the_link_and_loses_no_answer(device: Any, journal: Journal,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, calls = SessionRuntime("s", 1, device), journal.opened() + journal("stream_synchronize", stream=18)
    with monkeypatch.context() as broken:
        broken.setattr(device.engine, "take", lambda seconds: 1 / 0)
        link, connection = linked(runtime)
        with contextlib.suppress(LinkError):  # the link may be gone before: nothing is sent on it, whatever comes
            AgentEnd(connection).send(calls)
        eventually(lambda: connection._closed, "the link stands although nothing is sent any more", 10)
    link.close()
    link, connection = linked(runtime)
    agent = AgentEnd(connection)
    agent.send(calls)  # those that were applied are skipped
    assert agent.answer(journal.seq) == (0, 0, b"")
    link.close()
