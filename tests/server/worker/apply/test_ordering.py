"""A worker's link and its order: when a backlog begins and ends, by what the agent says and by what does not come."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from rgpu.link.data.published import Issued, Ping, read_pong
from rgpu.link.messages.data import ISSUED
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker import pulse
from rgpu.server.worker.apply import ordering
from rgpu.server.worker.apply.ordering import LONG, SAMPLES, UNKNOWN, Distance
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.pulse import Pulse
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal import issue_order
from rgpu.session.journal.issue_order import UNBOUNDED
from rgpu.session.journal.record import pack
from tests.support.eventually import eventually
from tests.support.worker.links import linked

PING, CALLS, PONG = 4, 2, 20


class Agent:
    """The agent's end, which has published ``published`` calls."""

    def __init__(self, published: int) -> None:
        self.device = CpuDevice(0, 64 << 20)
        self.runtime = SessionRuntime("s", 1, self.device)
        self.link, self.connection = linked(self.runtime, published)
        self.seq = self.offset = 0

    @property
    def state(self) -> str:
        return str(self.runtime.order.describe()["state"])

    def call(self) -> None:
        self.seq += 1
        name, args = ("session_open", dict(version=1, pid=1, environment=b"")) if self.seq == 1 else \
            ("context_create", dict(context=16 + self.seq, device=0, flags=0, primary=0))
        data = pack(self.seq, BY_NAME[name].id, decoders.encode_args(name, **args))
        self.connection.send(CALLS, self.offset.to_bytes(8, "little"), data)
        self.offset += len(data)

    def ping(self, published: int, late: float = 0.0, usual: int = 0, stood: bool = False) -> tuple[int, int | None]:
        sent = time.monotonic_ns() - int(late * 1e9)
        self.connection.send(PING, Ping(self.seq, published, usual, sent, stood).pack())
        while True:
            kind, body = self.connection.recv(10)
            if kind == PONG:
                return read_pong(body)

    def issued(self, published: int, late: float = 0.0, kept: float = 0.0) -> None:
        """``late``: seconds on the way; ``kept``: by the agent before."""
        sent = time.monotonic_ns() - int(late * 1e9)
        self.connection.send(ISSUED, Issued(sent, sent - int(kept * 1e9), published).pack())

    def close(self) -> None:
        self.link.close()
        self.device.close()


@pytest.fixture
def make() -> Any:
    agents: list[Agent] = []

    def one(published: int) -> Agent:
        agents.append(Agent(published))
        return agents[-1]

    yield one
    for agent in agents:
        agent.close()


def test_an_attachment_with_a_backlog_ends_when_all_of_it_is_applied(make: Any) -> None:
    agent = make(3)
    eventually(lambda: agent.state == "ordered", "no catch-up began")
    agent.call()
    agent.call()
    time.sleep(0.1)
    assert agent.state == "ordered", "nothing is waiting to be read, but something is published"
    agent.call()
    eventually(lambda: agent.state == "live", "the catch-up does not end")


def test_what_the_agent_says_goes_on(make: Any) -> None:
    """More was published since: what is read dry is no end, until that is applied, too."""
    agent = make(1)
    agent.call()
    eventually(lambda: agent.state == "live", "the catch-up does not end")
    agent.runtime.stood_still("this worker", 1.0)
    agent.ping(3)
    time.sleep(0.1)
    assert agent.state == "ordered"
    agent.call()
    agent.call()
    eventually(lambda: agent.state == "live", "the catch-up does not end")


def test_a_late_word_is_a_gap_of_the_link(make: Any) -> None:
    agent = make(0)
    agent.call()
    agent.ping(1)
    assert agent.state == "live"
    agent.ping(9, late=1.0)
    eventually(lambda: agent.state == "ordered", "a link that stood still is no gap")
    assert "the link" in agent.runtime.order.describe()["reason"]


def test_an_agent_that_stood_still_says_so(make: Any) -> None:
    agent = make(0)
    agent.call()
    agent.ping(9, stood=True)
    eventually(lambda: agent.state == "ordered", "an agent that stood still is no gap")
    assert "agent" in agent.runtime.order.describe()["reason"]


@pytest.mark.parametrize("late, kept", [(0.3, 0.0), (0.0, 0.3), (0.15, 0.15)])
def test_calls_that_come_late_are_a_backlog_whoever_kept_them(make: Any, late: float, kept: float) -> None:
    """In milliseconds; here by more than two processors are late at times where all tests share them."""
    agent = make(0)
    agent.call()
    for _ in range(20):
        agent.issued(1)
        time.sleep(0.005)
    agent.runtime.order.machine.handle(issue_order.Dry(1, 1))  # a busy machine may have been late just now
    agent.call()
    agent.issued(9, late, kept)
    eventually(lambda: agent.runtime.order.describe()["state"] == "ordered", "calls that come late are no backlog")
    reason = agent.runtime.order.describe()["reason"]
    assert "late" in reason and float(re.findall(r"([0-9.]+) ms", reason)[0]) >= 280, reason
    agent.issued(2)
    eventually(lambda: agent.state == "live", "the catch-up does not end")


def test_a_busy_program_is_told_from_worker_to_worker(make: Any) -> None:
    """How far it usually is ahead: this worker has not seen it yet, the one before had."""
    agent = make(5)
    agent.call()
    assert agent.ping(9, usual=UNBOUNDED)[0] == 1
    assert agent.ping(9, usual=UNBOUNDED) == (1, UNBOUNDED)
    assert agent.state == "ordered", "the backlog at the attachment is applied first"
    for _ in range(4):
        agent.call()
    agent.ping(1 << 40, usual=UNBOUNDED)
    eventually(lambda: agent.state == "live", "it is never less ahead than that")
    agent.ping(1 << 41, usual=UNBOUNDED, stood=True)
    assert agent.state == "live"


def test_the_usual_distance_is_the_least_of_the_last_seconds() -> None:
    distance = Distance()
    distance.told = 7
    for index in range(SAMPLES - 1):
        distance.look(index * 0.05, 50)
    assert distance.usual == 7
    distance.look(1.0, UNBOUNDED)
    assert distance.usual == 50
    distance.look(1.05, 2)
    assert distance.usual == 2
    for index in range(100):
        distance.look(1.1 + index * 0.05, UNBOUNDED)
    assert distance.usual == UNBOUNDED


def test_a_pulse_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once, by whichever thread looks first."""
    now, late = [0.0], []
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    one = Pulse(late.append, lambda at, beats: False)
    now[0] = 0.3
    one.look()
    assert late == []
    now[0] = 2.5
    one.look()
    one.look()
    assert late == [2.5]


def test_a_call_that_the_driver_keeps_is_a_gap_and_a_wait_for_work_is_none(make: Any) -> None:
    agent = make(0)
    agent.call()
    eventually(lambda: agent.runtime.applied == 1, "the call is not applied")
    runtime, slow = agent.runtime, ordering.SLOW * 1.5

    def waits(data: Any) -> int:
        until = time.monotonic() + slow
        runtime.boundary.wait(lambda: time.monotonic() > until)
        return 0

    runtime.applying(waits, b"")
    assert agent.state == "live"
    runtime.applying(lambda data: int(time.sleep(slow) or 0), b"")
    assert "the driver" in runtime.order.describe()["reason"] and runtime.order.describe()["catch_ups"] == 1


def test_how_far_a_program_mostly_is_ahead() -> None:
    """Nearly always, in half a minute; of a successor what the one before saw, before it has looked itself."""
    distance = Distance()
    assert distance.mostly == UNBOUNDED
    distance.earlier = True
    assert distance.mostly == UNKNOWN
    distance.tell(100)
    assert distance.mostly == 100
    for beat in range(2 * SAMPLES):
        distance.look(beat * 0.05, beat % 8)
    assert distance.mostly == 7 and distance.usual == 0
    distance.forget(2.0)
    distance.look(2.05, 500)
    assert distance.mostly == UNBOUNDED
    for beat in range(2 * SAMPLES):
        distance.look(2.0 + LONG + beat * 0.05, 500)
    assert distance.mostly == 500


def test_what_a_program_mostly_keeps_to_is_that_of_all_looks() -> None:
    """What is kept of one look for the next is what sorting them anew gives; a look may count for several."""
    kept, plain, chance = Distance(), Distance(), random.Random(7)
    now, calls = 0.0, 0
    for _ in range(4000):
        looks = chance.choice((1, 1, 3))
        now += 0.05 * looks * chance.choice((1, 1, 1, 40))
        calls = chance.choice((calls, calls, calls, calls, chance.randrange(4), UNBOUNDED))
        kept.look(now, calls, looks)
        for _ in range(looks):
            plain.look(now, calls)
        plain._mostly = None
        assert (kept.mostly, kept.usual) == (plain.mostly, plain.usual)
