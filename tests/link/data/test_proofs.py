"""Tickets that agents make: taken by the node that they are for, from the agent that they name, and by nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rgpu.link.data import proofs, tickets
from rgpu.link.data.agreement import Share
from rgpu.link.data.opening import Opening
from rgpu.link.keys import KeyPair
from rgpu.link.messages.data import CLIENT_HEAD_LAYOUT, MAGIC, PREAMBLE, PURPOSE_CALLS, PURPOSE_PAGES
from rgpu.session.errors import AuthenticationFailed

AGENT, OTHER, NODE, SECOND = (KeyPair.create(role, name) for role, name in (
    ("user", "ada"), ("user", "bob"), ("node", "node-a"), ("node", "node-b")))
POOL = bytes(range(32))


def test_both_ends_compute_the_same_secret() -> None:
    made = proofs.prove(AGENT, NODE.public, "heat/2")
    found = proofs.check(NODE, made.ticket, "calls")
    assert (found.session, found.agent, found.purpose, found.secret) == ("heat/2", AGENT.public, "calls", made.secret)
    assert found.proven and not tickets.verify([POOL], tickets.issue(POOL, "s", "", "calls").ticket, "calls").proven
    assert proofs.prove(AGENT, NODE.public, "heat/2").secret != made.secret


@pytest.mark.parametrize(("ticket", "reason"), [
    (lambda: proofs.prove(AGENT, SECOND.public, "s"), "mac"),  # for another node
    (lambda: proofs.prove(replace(OTHER, public=AGENT.public), NODE.public, "s"), "mac"),  # in the agent's name
    (lambda: proofs.prove(replace(SECOND, public=AGENT.public), NODE.public, "s"), "mac"),  # by another node's key
    (lambda: tickets.issue(POOL, "s", AGENT.public, "calls", version=tickets.BY_AGENT), "mac"),  # by the pool's secret
    (lambda: tickets.issue(POOL, "s", "no key", "calls", version=tickets.BY_AGENT), "key"),
    (lambda: tickets.issue(POOL, "s", "0" * 40, "calls", version=tickets.BY_AGENT), "key"),  # a point of low order
], ids=["another node", "another user", "another node's key", "the pool's secret", "no key", "low order"])
def test_nobody_else_makes_one(ticket: object, reason: str) -> None:
    with pytest.raises(AuthenticationFailed) as refused:
        proofs.check(NODE, ticket().ticket, "calls")  # type: ignore[operator]
    assert refused.value.detail["reason"] == reason


def test_what_is_changed_expired_or_no_ticket_is_refused() -> None:
    made = proofs.prove(AGENT, NODE.public, "s").ticket
    for index in range(len(made)):
        with pytest.raises(AuthenticationFailed):
            proofs.check(NODE, made[:index] + bytes([made[index] ^ 1]) + made[index + 1:], "calls")
    for data in (b"", made[:20], made[:32], made[:-1], bytes(tickets.LIMIT), bytes(tickets.LIMIT + 1)):
        with pytest.raises(AuthenticationFailed):
            proofs.check(NODE, data, "calls")
    with pytest.raises(AuthenticationFailed):
        proofs.check(NODE, made, "pages")


def opened(ticket: bytes, purpose: int) -> Opening:
    """What a node with the pool's secret makes of a preamble with that ticket."""
    opening = Opening([POOL], lambda found: 7, NODE)
    opening.take(CLIENT_HEAD_LAYOUT.pack(MAGIC, PREAMBLE, purpose, len(ticket)))
    opening.take(ticket + Share().data)
    return opening


def test_a_move_s_ticket_is_the_destination_s_own() -> None:
    own = tickets.issue(proofs.own_secret(NODE), "s", "m", "pages")
    assert opened(own.ticket, PURPOSE_PAGES).handover is not None
    for secret in (POOL, proofs.own_secret(SECOND)):
        forged = opened(tickets.issue(secret, "s", "m", "pages").ticket, PURPOSE_PAGES)
        assert isinstance(forged.error, AuthenticationFailed) and forged.handover is None


def test_agents_of_the_previous_version_show_a_ticket_of_the_pool_s_secret() -> None:
    older = opened(tickets.issue(POOL, "s", AGENT.public, "calls").ticket, PURPOSE_CALLS).handover
    newer = opened(proofs.prove(AGENT, NODE.public, "s").ticket, PURPOSE_CALLS).handover
    assert older is not None and newer is not None and older.agent == newer.agent == AGENT.public
    assert opened(tickets.issue(bytes(32), "s", AGENT.public, "calls").ticket, PURPOSE_CALLS).error is not None
