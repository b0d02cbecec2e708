"""Errors of the hardware: whoever judges them is asked before the program is told anything."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rgpu.server.device import hardware
from rgpu.server.worker.apply.runtime import SessionRuntime
from tests.support.fake_driver.support import Agent as AgentEnd
from tests.support.fake_driver.support import driver, linked


class Judge:
    """As a worker's: of what the hardware did wrong nobody hears."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.guilty = threading.Event()
        self.released = threading.Event()

    def __call__(self, result: int) -> None:
        self.told.append(result)
        if hardware.fault(result, lambda: ""):
            self.guilty.set()
            self.released.wait(30)


@pytest.mark.parametrize("result", [214, 226])
def test_an_error_of_the_hardware_reaches_nobody(device: Any, journal: Any, result: int) -> None:
    runtime = SessionRuntime("s", 1, device)
    judge = runtime.judge = Judge()
    link, connection = linked(runtime)
    agent = AgentEnd(connection)
    agent.send(journal.opened() + journal.add_one() + journal("stream_synchronize", stream=18))
    assert agent.answer(5)[0] == agent.answer(journal.seq)[0] == 0 and judge.told == []
    good = journal.seq
    driver().fake_inject(result)
    agent.send(journal.add_one() + journal("stream_synchronize", stream=18) + journal.read(64))
    assert judge.guilty.wait(20) and judge.told[-1] == result
    time.sleep(0.3)
    assert agent.sticky == 0 and agent.done <= good + 1 and not agent.answers, "nothing was said since"
    judge.released.set()
    link.close()


def test_an_error_of_the_program_is_told_after_it_was_judged(device: Any, journal: Any) -> None:
    runtime = SessionRuntime("s", 1, device)
    judge = runtime.judge = Judge()
    link, connection = linked(runtime)
    agent = AgentEnd(connection)
    driver().fake_inject(0)
    agent.send(journal.opened() + journal.launch(2, b"") + journal("stream_synchronize", stream=18))
    assert agent.answer(journal.seq)[:2] == (700, 1) and agent.sticky == 700
    assert set(judge.told) == {700} and not judge.guilty.is_set()
    link.close()
