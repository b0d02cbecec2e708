"""Invitation tokens: whole or refused."""

from __future__ import annotations

import base64
import time
import zlib

import msgspec
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


def test_one_for_a_user_says_so_and_one_of_before_is_for_a_host() -> None:
    made = token()
    assert (made.role, made.member) == ("node", "")
    ours = msgspec.structs.replace(made, role="operator", member="anna")
    assert decode(encode(ours)) == ours
    old = msgspec.to_builtins(made)
    del old["role"], old["member"]
    plain = msgspec.msgpack.encode(old)
    packed = zlib.crc32(plain).to_bytes(4, "big") + zlib.compress(plain, 9)
    assert decode(PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")) == made


def test_the_invited_may_join_and_nothing_else() -> None:
    assert {check(verb, "invited").name for verb in ("pool.join", "pool.login")} == {"pool.join", "pool.login"}
    for verb in ("pool.ping", "node.list", "session.list", "node.command", "pool.stop", "keys.invite"):
        with pytest.raises(AuthenticationFailed):
            check(verb, "invited")
    for role in ("user", "node", "operator"):
        for verb in ("pool.join", "pool.login"):
            with pytest.raises(RgpuError):
                check(verb, role)
