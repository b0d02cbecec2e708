"""What a session and its checkpoint hold follows what is alive, not how many calls there were (DESIGN, decision 9).

The whole way, with shim, agent and a million calls, is ``bench/checkpoint/flat.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, write_checkpoint
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.journal.record import Record
from tests.support.worker.journal import Answers, Journal, opened

CALLS = 200_000 if os.environ.get("RGPU_SWEEP") else 12_000
PARTS = 6


def turn(journal: Journal, number: int) -> Iterator[Record]:
    """Objects made, used, destroyed; one of a few that stay is replaced now and then; answers are observed."""
    stream, event, address = 1000 + 2 * number, 1001 + 2 * number, DEVICE_BASE + GRANULE
    yield journal("stream_create", stream=stream, context=16, flags=1, priority=0)
    yield journal("event_create", event=event, context=16, flags=0)
    yield journal("memory_map", address=address, size=GRANULE, device=0)
    yield journal("memory_allocate", address=address, size=4096)
    yield journal("memset", destination=address, pitch=4096, width=4096, height=1, element=1, value=number % 251,
                  stream=stream)
    yield journal("event_record", event=event, stream=stream, flags=0)
    yield journal("memcpy_d2h", source=address, size=16, stream=stream)
    yield journal("completed", observed=journal.seq)
    yield journal("memory_free", address=address)
    yield journal("memory_unmap", address=address, size=GRANULE)
    yield journal("event_destroy", event=event)
    yield journal("stream_destroy", stream=stream)


def test_size_follows_what_is_alive(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    device = CpuDevice(memory=64 << 20)
    request.addfinalizer(device.close)
    journal, answers = Journal(), Answers()
    runtime = SessionRuntime("s", 1, device)
    runtime.attach(answers, 0)
    runtime.feed(opened(journal))
    store, number, found = DirectoryStore(tmp_path), 0, []
    for part in range(1, PARTS + 1):
        while journal.seq < CALLS * part // PARTS:
            runtime.feed(turn(journal, number))
            number += 1
        assert device.drain(20) and runtime.executor.error == 0 and runtime.executor.bugs == 0
        found.append(sizes(runtime, store, f"image-{part}"))
    first, last = found[0], found[-1]
    assert last["position"] >= CALLS and last["regions"] == first["regions"] == 1
    for name in ("objects", "answers", "manifest", "unanswered"):
        assert last[name] <= first[name] * 1.02 + 64, f"{name} grows: {[one[name] for one in found]}"


def sizes(runtime: SessionRuntime, store: DirectoryStore, name: str) -> dict[str, Any]:
    state = cut.take(runtime.device, session="s", epoch=1, position=runtime.applied, hash_key=runtime.hash_key,
                     live=runtime.objects(), answers=runtime.answers())
    write_checkpoint(store, name, runtime.device, state)
    return {"position": state.position, "regions": len(state.regions), "manifest": store.names()[name][0],
            "objects": len(msgspec.msgpack.encode(state.live)), "answers": len(msgspec.msgpack.encode(state.answers)),
            "unanswered": len(runtime.kept.unanswered)}
