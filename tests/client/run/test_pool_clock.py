"""The pool's time as a client learns it, whatever its own clock says and however it is set meanwhile."""

from __future__ import annotations

import time

from rgpu.client.run.pool_clock import PoolClock
from rgpu.client.run.pool_requests import PoolRequests
from rgpu.client.session.attachment import Owner
from rgpu.link.data import proofs, tickets
from rgpu.link.keys import KeyPair

NODE, AGENT = KeyPair.create("node", "node-a"), KeyPair.create("user", "anna")


def test_the_clock_goes_by_the_answers_and_no_more_by_its_own() -> None:
    steady, own = [100.0], [5000.0]
    clock = PoolClock(lambda: steady[0], lambda: own[0])
    assert clock.now() == 5000.0
    clock.learn(8600.0)
    steady[0], own[0] = 110.0, 1.0
    assert clock.now() == 8610.0
    for nothing in (None, "noon", True, -1.0, 0):
        clock.learn(nothing)
    assert clock.now() == 8610.0


def test_tickets_are_made_and_renewed_by_the_pools_time() -> None:
    """An answer of a pool an hour and a half ahead: its ticket is neither old at once nor good for too long."""
    ahead = time.time() + 5400
    granted = tickets.issue(bytes(32), "heat", AGENT.public, "calls", now=ahead)
    answer = {"time": ahead, "ticket": granted.ticket, "secret": granted.secret, "expires": granted.expires}
    requests = PoolRequests(AGENT, [], make=lambda keys, endpoints: Answers(answer))
    try:
        grant = requests.renew("heat")
    finally:
        requests.close()
    assert grant is not None and tickets.LIFETIME - 60 < grant.seconds_left <= tickets.LIFETIME + 1
    ticket, _ = grant.at(Owner("node-a", ("127.0.0.1", 1), 1, True, NODE.public), "heat")
    assert abs(proofs.check(NODE, ticket, "calls").expires - ahead - proofs.SECONDS) < 60


class Answers:
    """A node that gives one answer to every verb."""

    def __init__(self, answer: dict[str, object]) -> None:
        self.answer = answer

    def refresh(self, endpoints: object) -> None:
        """Take other nodes: there are none."""

    def call(self, verb: str, args: object, timeout: float) -> dict[str, object]:
        """Return the answer."""
        return self.answer

    def close(self) -> None:
        """End nothing."""
