"""A replay of random programs that race computes what they did: see :mod:`tests.support.worker.racing`."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.apply import ordering
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.journal.record import pack_record
from tests.support.worker.journal import Journal
from tests.support.worker.racing import CELLS, Program

EVER = 1 << 40
FAR = DEVICE_BASE + 4096  #: no program's cell
BYTES_PER_MICROSECOND = 4000  #: about what a memset does


def opened(record: Any) -> bytes:
    return record("session_open", version=1, pid=1, environment=b"") \
        + record("context_create", context=16, device=0, flags=0, primary=1) \
        + record("memory_map", address=DEVICE_BASE, size=8 * GRANULE, device=0) \
        + record("memory_allocate", address=DEVICE_BASE, size=8 * GRANULE) \
        + record("stream_create", stream=18, context=16, flags=1, priority=0) \
        + record("stream_create", stream=19, context=16, flags=1, priority=0) \
        + record("event_create", event=20, context=16, flags=2)


class Packed(Journal):
    """Packed records."""

    def __call__(self, name: str, payload: bytes = b"", **args: Any) -> bytes:  # type: ignore[override]
        return pack_record(super().__call__(name, payload, **args))


@pytest.mark.parametrize("seed", range(400 if os.environ.get("RGPU_SWEEP") else 40))
def test_a_replay_computes_what_the_program_did(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "STALL", 60.0)  # a machine that stands still for a second is not the subject
    record = Packed()
    program = Program(random.Random(seed), record, lambda microseconds, stream: record(
        "memset", destination=FAR, pitch=0, width=min(microseconds * BYTES_PER_MICROSECOND, 4 * GRANULE), height=1,
        element=1, value=0, stream=stream))
    data = program.whole(opened(record))
    device, answers = CpuDevice(memory=64 << 20), dict[int, bytes]()
    runtime = SessionRuntime("s", 1, device)
    try:
        runtime.attach(lambda seq, result, reply, payload: answers.update({seq: bytes(payload)}), EVER)
        runtime.open_stream()(data)
        assert device.drain(20)
        assert runtime.applied == record.seq and answers.keys() >= set(range(record.seq - CELLS + 1, record.seq + 1))
        for call, payload in answers.items():
            if len(payload) == 4:
                program.compare(call, payload)
        said = runtime.order.describe()
        assert said["stalls"] == 0 and runtime.executor.bugs == 0, said
    finally:
        runtime.stop()
        device.close()
