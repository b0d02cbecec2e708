"""Tokens: handles that other processes open, as the 64 bytes that programs pass to each other. Pure.

Layout, little-endian: docs/developers/objects/shared-memory.md. A token names a session by a digest and proves by
``secret`` that its holder was given it. The exporting session's worker and its daemon check the secret and the holder's
permission; the token itself grants nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import blake3

from rgpu.session.errors import Corrupt

SIZE = 64  #: CU_IPC_HANDLE_SIZE
SECRET_BYTES = 16
MAGIC = b"RGPUIPC1"
_LAYOUT = struct.Struct("<8sQ16s8sQQ8s")
_SUM_BYTES = 8


class TokenKind(IntEnum):
    """Kind of the object that a token opens."""

    MEMORY = 1
    EVENT = 2


@dataclass(frozen=True, slots=True)
class Token:
    """Contents of a token. ``session``: :func:`session_digest` of its name. ``number``: the allocation's address, or
    the event's number; ``size``: bytes of the allocation, 0 for an event."""

    kind: TokenKind
    secret: bytes
    session: bytes
    number: int
    size: int = 0


def session_digest(name: str) -> bytes:
    """Return the eight bytes by which a token names a session."""
    return blake3.blake3(b"rgpu ipc session " + name.encode()).digest(8)


def encode(token: Token) -> bytes:
    """Return the 64 bytes of a token. Raises :class:`ValueError` for a secret or digest of another length."""
    if len(token.secret) != SECRET_BYTES or len(token.session) != 8:
        raise ValueError(f"a secret of {len(token.secret)} and a session digest of {len(token.session)} bytes")
    body = _LAYOUT.pack(MAGIC, token.kind, token.secret, token.session, token.number, token.size, bytes(_SUM_BYTES))
    return body[:-_SUM_BYTES] + _sum(body[:-_SUM_BYTES])


def decode(data: Any, kind: TokenKind) -> Token:
    """Decode a handle from a program. Raises :class:`Corrupt` unless it is a whole token of that kind."""
    found = bytes(data)
    if len(found) != SIZE:
        raise Corrupt(f"a handle of {len(found)} bytes instead of {SIZE}", reason="size")
    magic, number_of_kind, secret, session, number, size, check = _LAYOUT.unpack(found)
    if magic != MAGIC or check != _sum(found[:-_SUM_BYTES]):
        raise Corrupt("the handle was made by no session, or was damaged", reason="checksum")
    if number_of_kind != kind:
        raise Corrupt(f"the handle is of kind {number_of_kind}, not {kind.name.lower()}", reason="kind")
    return Token(kind, secret, session, number, size)


def session_of(data: bytes) -> bytes:
    """Return the digest of the session that a token of 64 bytes names; nothing else is checked."""
    return data[32:40]


def _sum(data: bytes) -> bytes:
    return blake3.blake3(data).digest(_SUM_BYTES)
