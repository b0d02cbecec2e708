"""Tickets: genuine ones work, anything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.link.data import tickets
from rgpu.session.errors import AuthenticationFailed

POOL = bytes(range(32))


def test_a_ticket_says_what_it_was_made_for() -> None:
    granted = tickets.issue(POOL, "heat/2", "K" * 40, "calls", lifetime=100, now=1000)
    ticket = tickets.verify([POOL], granted.ticket, "calls", now=1099)
    assert (ticket.session, ticket.agent, ticket.expires) == ("heat/2", "K" * 40, 1100)
    assert ticket.secret == granted.secret and len(granted.secret) == 32
    assert granted.secret not in granted.ticket
    assert granted.secret.hex() not in repr(ticket) and repr(granted.secret) not in repr(granted)


def test_no_two_tickets_share_a_secret() -> None:
    one = tickets.issue(POOL, "s", "", "calls", now=1)
    two = tickets.issue(POOL, "s", "", "calls", now=1)
    assert one.secret != two.secret


@pytest.mark.parametrize(("purpose", "now", "pool", "reason"), [
    ("pages", 1000, POOL, "purpose"),
    ("calls", 1000 + 3600 + tickets.LEEWAY + 1, POOL, "expired"),
    ("calls", 1000, bytes(32), "mac"),
])
def test_refused(purpose: str, now: float, pool: bytes, reason: str) -> None:
    granted = tickets.issue(POOL, "s", "", "calls", now=1000)
    with pytest.raises(AuthenticationFailed) as caught:
        tickets.verify([pool], granted.ticket, purpose, now=now)
    assert caught.value.detail["reason"] == reason


@given(st.data())
def test_every_changed_bit_is_noticed(data: st.DataObject) -> None:
    ticket = bytearray(tickets.issue(POOL, "s", "", "calls", now=1000).ticket)
    at = data.draw(st.integers(0, len(ticket) - 1))
    ticket[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(AuthenticationFailed):
        tickets.verify([POOL], bytes(ticket), "calls", now=1000)


@given(st.binary(max_size=1200))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        tickets.verify([POOL], data, "calls", now=1000)


def good_body(**changes: object) -> bytes:
    values = {"v": 1, "session": "s", "agent": "", "purpose": "calls", "expires": 1e12, "id": ""}
    return msgspec.msgpack.encode(values | changes)


@pytest.mark.parametrize("body", [b"\xc0", b"\x80", b"\x93\x01\x02\x03", good_body(v=2),
                                  good_body(expires=float("nan")), good_body(session=7), good_body(more=1)])
def test_a_genuine_mac_does_not_make_sense_of_nonsense(body: bytes) -> None:
    tickets.verify([POOL], *signed(good_body()), now=1000)
    with pytest.raises(AuthenticationFailed):
        tickets.verify([POOL], *signed(body), now=1000)


def signed(body: bytes) -> tuple[bytes, str]:
    return body + tickets._mac(POOL, b"ticket", body), "calls"


def test_while_the_secret_is_rotated_both_count_and_afterwards_the_new_one() -> None:
    new = bytes(range(1, 33))
    old_ticket, new_ticket = (tickets.issue(secret, "s", "", "calls", now=1) for secret in (POOL, new))
    for granted in (old_ticket, new_ticket):
        assert tickets.verify([new, POOL], granted.ticket, "calls", now=2).secret == granted.secret
    assert tickets.verify([new], new_ticket.ticket, "calls", now=2).secret == new_ticket.secret
    for accepted in ([new], []):
        with pytest.raises(AuthenticationFailed) as refused:
            tickets.verify(accepted, old_ticket.ticket, "calls", now=2)
        assert refused.value.detail["reason"] == "mac" and "renew" in refused.value.message
