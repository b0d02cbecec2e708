"""Tokens: what a program brings is read as hostile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.session.errors import Corrupt
from rgpu.session.objects import handle_tokens
from rgpu.session.objects.handle_tokens import SIZE, Token, TokenKind

KINDS = st.sampled_from(list(TokenKind))
TOKENS = st.builds(Token, KINDS, st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8),
                   st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@given(TOKENS)
def test_a_token_says_what_it_was_made_of(token: Token) -> None:
    data = handle_tokens.encode(token)
    assert len(data) == SIZE
    assert handle_tokens.decode(data, token.kind) == token
    assert handle_tokens.session_of(data) == token.session


@given(TOKENS, st.integers(0, 8 * SIZE - 1))
def test_one_bit_makes_it_no_token(token: Token, bit: int) -> None:
    data = bytearray(handle_tokens.encode(token))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        handle_tokens.decode(data, token.kind)


@given(st.binary(max_size=2 * SIZE), KINDS)
def test_other_bytes_are_refused(data: bytes, kind: TokenKind) -> None:
    with pytest.raises(Corrupt):
        handle_tokens.decode(data, kind)


@given(TOKENS)
def test_a_handle_of_an_event_opens_no_memory(token: Token) -> None:
    other = TokenKind.EVENT if token.kind is TokenKind.MEMORY else TokenKind.MEMORY
    with pytest.raises(Corrupt, match="kind"):
        handle_tokens.decode(handle_tokens.encode(token), other)


def test_sessions_are_told_apart_and_lengths_are_checked() -> None:
    assert handle_tokens.session_digest("s") != handle_tokens.session_digest("s/2")
    for secret, session in ((bytes(15), bytes(8)), (bytes(16), bytes(9))):
        with pytest.raises(ValueError, match="bytes"):
            handle_tokens.encode(Token(TokenKind.MEMORY, secret, session, 1))
