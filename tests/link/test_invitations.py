"""Invitation tokens: whole or refused."""

from __future__ import annotations

import time

import pytest

from rgpu.link.control.access import check
from rgpu.link.invitations import PREFIX, Token, decode, encode, new_pair
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.session.errors import AuthenticationFailed, RgpuError, UsageError


def token() -> Token:
    pair = new_pair()
    node = KeyPair.create("node", "a")
    return Token(pool="0123", name=pair.name, public=pair.public, secret=pair.secret, expires=time.time() + 60,
                 endpoints=[Endpoint("tcp://10.0.0.1:4000", node.public, "a")])


def test_it_comes_back_and_shows_no_secret() -> None:
    made = token()
    text = encode(made)
    assert text.startswith(PREFIX) and not set(text) & set(" \n\t'\"$")
    assert decode(f" {text}\n") == made
    assert made.secret not in repr(made) and decode(text).keys().secret == made.secret


def test_every_cut_and_every_changed_character_is_noticed() -> None:
    text = encode(token())
    for at in range(len(text)):
        with pytest.raises(UsageError):
            decode(text[:at])
        other = "A" if text[at] != "A" else "B"
        try:
            assert decode(text[:at] + other + text[at + 1:]) == decode(text)  # bits that base64 does not use
        except UsageError:
            pass


@pytest.mark.parametrize("text", ["", "x", PREFIX, PREFIX + "!!!", PREFIX + "A" * 20000, PREFIX + "AAAAeJwDAAAAAAE"])
def test_what_is_no_invitation(text: str) -> None:
    with pytest.raises(UsageError, match="invitation"):
        decode(text)


def test_the_invited_may_do_one_thing() -> None:
    assert check("pool.join", "invited").name == "pool.join"
    for verb in ("pool.ping", "node.list", "session.list", "node.command", "pool.stop", "keys.invite"):
        with pytest.raises(AuthenticationFailed):
            check(verb, "invited")
    for role in ("user", "node", "operator"):
        with pytest.raises(RgpuError):
            check("pool.join", role)
