"""A replay of random programs that race computes what they did: see :mod:`tests.support.worker.racing`."""

from __future__ import annotations

import os
import random
import struct
from typing import Any

import pytest

from rgpu.server.worker.apply import ordering
from rgpu.server.worker.apply.runtime import SessionRuntime
from tests.support.fake_driver.support import SLOW, Agent, Journal, linked
from tests.support.worker.racing import CELLS, Program

EVER = 1 << 40


@pytest.mark.parametrize("seed", range(600 if os.environ.get("RGPU_SWEEP") else 30))
def test_a_replay_computes_what_the_program_did(device: Any, journal: Journal, seed: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "STALL", 60.0)  # a machine that stands still for a second is not the subject
    program = Program(random.Random(seed), journal,
                      lambda microseconds, stream: journal.launch(SLOW, struct.pack("<I", microseconds), stream))
    data = program.whole(journal.opened())
    runtime = SessionRuntime("s", 1, device)
    link, connection = linked(runtime, EVER)
    try:
        agent = Agent(connection)
        agent.send(data, program.chance.choice([100, 1000, 1 << 20]))
        for call in range(journal.seq - CELLS + 1, journal.seq + 1):
            program.compare(call, agent.answer(call)[2])
        for call, (_, _, reply) in list(agent.answers.items()):  # of those not observed at once
            program.compare(call, reply)
        said = runtime.order.describe()
        assert said["stalls"] == 0 and runtime.executor.bugs == 0, said
        assert not device.host_gates.open
    finally:
        link.finish(10)  # its thread reads answers in the device's memory
        runtime.stop()
