"""What an agent says about how far the program is, so that a worker knows a backlog (SEMANTICS 20)."""

from __future__ import annotations

import time

from rgpu.client.run.agent import Agent
from rgpu.link import versions
from tests.support.agent.fake_pool import FakePool
from tests.support.agent.running import busy, start
from tests.support.eventually import eventually


def test_pings_say_what_is_published_and_the_next_worker_hears_what_this_one_saw(pool: FakePool, agent: Agent) -> None:  # noqa: F811
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.usual = 1234
    busy(shim, 100)
    eventually(lambda: worker.pings and worker.pings[-1][1].published == 100)
    assert not worker.issued, "a worker that says nothing of protocol 2"
    assert all(ping.shipped <= (ping.published or 0) and not ping.stood for _, ping in worker.pings)
    eventually(lambda: agent._shippers["heat"].shipping.usual == 1234)
    assert worker.connection is not None
    worker.connection.close()
    eventually(lambda: worker.attached == 2)
    assert worker.told == [0, 1234]
    busy(shim, 10)
    eventually(lambda: worker.pings[-1][1].usual == 1234)


def test_calls_that_piled_up_go_behind_a_word_about_it(pool: FakePool, agent: Agent) -> None:  # noqa: F811
    """The agent's process stood still: the worker hears of it before it gets the first of them."""
    shim = start(agent)
    worker = pool.sessions["heat"]
    busy(shim, 50)
    eventually(lambda: worker.applied == 50)
    shipper = agent._shippers["heat"]

    def freeze() -> None:
        busy(shim, 100)
        shipper.shipping.last_round -= 3.0  # as if it had been stopped when it last looked

    shipper.post(freeze)
    eventually(lambda: worker.applied == 150)
    (applied, ping), = [(applied, ping) for applied, ping in worker.pings if ping.stood]
    assert applied == 50 and 50 < (ping.published or 0) <= 150


def test_calls_that_were_kept_for_milliseconds_say_since_when(pool: FakePool, agent: Agent) -> None:  # noqa: F811
    """The shim's stamps tell it, however long this process stood still. A worker of protocol 1 is not told."""
    pool.attached_more = {"versions": versions.ours()}
    shim = start(agent, ring=True)
    ring, worker = shim.ring, pool.sessions["heat"]
    assert ring is not None
    busy(shim, 50)
    eventually(lambda: worker.applied == 50)
    at = time.monotonic_ns()

    def rest() -> None:
        ring.stamp(51, at - 40_000_000)
        ring.stamp(52, at - 15_000_000)
        busy(shim, 100)

    agent._shippers["heat"].post(rest)
    eventually(lambda: worker.applied == 150)
    (applied, came, issued), = [each for each in worker.issued if each[0] == 50]
    assert issued.since == at - 40_000_000 <= issued.sent <= came and 50 < issued.published <= 150
