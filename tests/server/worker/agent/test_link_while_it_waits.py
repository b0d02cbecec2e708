"""A worker's link while no call is applied: what it receives then, and when it gives a sign of life."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from rgpu.checkpoint.device import GRANULE
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.data import LANED, LANES, MARK_LAYOUT, PONG
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.worker import session_text
from rgpu.server.worker.agent import answer_sender
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE
from rgpu.session.errors import TimedOut
from rgpu.session.journal.record import pack_record
from tests.support.cpu import stub
from tests.support.eventually import eventually
from tests.support.worker.journal import Journal
from tests.support.worker.links import End, linked, linked_with_lanes

SIGN = 0.05  #: seconds of silence after which a sign of life is due in these tests


@pytest.fixture
def runtime() -> Iterator[SessionRuntime]:
    device = CpuDevice(0, 64 << 20, 1, engine=stub, host="test")  # type: ignore[arg-type]
    yield SessionRuntime("s", 1, device)
    device.close()


def printing(count: int) -> list[bytes]:
    """Records of a program that prints ``count`` lines, and waits for them."""
    journal = Journal()
    records = [journal("session_open", version=1, pid=1, environment=b""),
               journal("context_create", context=16, device=0, flags=0, primary=1),
               journal("memory_map", address=DEVICE_BASE, size=GRANULE, device=0),
               journal("memory_allocate", address=DEVICE_BASE, size=1 << 20),
               journal("module_load", stub.text(), module=17, context=16, library=0, options=b"")]
    records += [journal("launch", module=17, function=stub.INDEX["print"], grid_x=1, grid_y=1, grid_z=1, block_x=1,
                        block_y=1, block_z=1, shared=0, flags=0, stream=0,
                        parameters=struct.pack("<QQ", DEVICE_BASE, number), attributes=b"") for number in range(count)]
    return [pack_record(record) for record in (*records, journal("context_synchronize", context=16))]


def test_lanes_that_are_announced_while_a_call_waits(runtime: SessionRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for the program to take text; meanwhile lanes are announced, and calls come over one of them."""
    monkeypatch.setenv("RGPU_LANES", "1")
    monkeypatch.setattr(session_text, "LIMIT", 100)
    agent, (lane,) = linked_with_lanes(runtime, 1, printed=0)
    end, records = End(agent), printing(400)
    early, late = b"".join(records[:300]), b"".join(records[300:])
    end.send(early)
    eventually(lambda: runtime.text.crowded and runtime.applied < 300, "no call waits for the program to take text")
    agent.send(LANES, bytes([1]))
    agent.send(LANED, MARK_LAYOUT.pack(0, 1 + 8 + len(late)))
    lane.send(2, struct.pack("<Q", len(early)), late)
    eventually(lambda: (end.confirm(), len(records) in end.answers)[1], "what came over a lane is not applied")
    assert end.text.count(b"\n") == 400


def signs(agent: SealedConnection, seconds: float) -> int:
    """How many signs of life come within that time, five at most."""
    count, until = 0, time.monotonic() + seconds
    while count < 5 and (left := until - time.monotonic()) > 0:
        try:
            count += agent.recv(left)[0] == PONG
        except TimedOut:
            break
    return count


def test_a_session_held_to_its_share_gives_signs_of_life(runtime: SessionRuntime, monkeypatch: pytest.MonkeyPatch
                                                         ) -> None:
    """The pauses of its limiter end by themselves; that of a move may be one whose end the worker never learns."""
    monkeypatch.setattr(answer_sender, "SIGN_OF_LIFE", SIGN)
    _, agent = linked(runtime)
    assert signs(agent, 10) == 5
    runtime.pause(brief=True)
    assert signs(agent, 10) == 5
    runtime.pause()
    signs(agent, 4 * SIGN)  # those under way
    assert signs(agent, 10 * SIGN) == 0
    runtime.resume()
    assert signs(agent, 10) == 5
    runtime.resume(brief=True)
    assert signs(agent, 10) == 5
