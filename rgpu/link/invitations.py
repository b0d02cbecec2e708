"""Invitations: how a host or a user without any key of the pool is let in, once (OWNERSHIP 8).

An invitation is a CURVE key pair of the role ``invited``, which may call two
verbs only: ``pool.join`` and ``pool.login``, as its record says. Its public half,
its expiry and its recipient are in the pool's registry; the secret half, the pool's addresses and their keys
make up the *token*, which the operator hands over. The token is worth a
key until it is used or has expired: protect it like one.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib

import msgspec

from rgpu.link.keys import Endpoint, KeyPair, check_public
from rgpu.session.errors import Corrupt, UsageError

PREFIX = "rgpu-join-"
MAX_TOKEN = 16 * 1024  #: characters
MAX_PLAIN = 64 * 1024  #: bytes


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """The content of an invitation. ``expires``: Unix time, s.

    ``expires``, ``role`` and ``member`` are for messages only: the pool's own record decides.
    """

    pool: str
    name: str
    public: str
    secret: str
    endpoints: list[Endpoint]
    expires: float
    v: int = 1
    role: str = "node"
    member: str = ""

    def __repr__(self) -> str:
        return f"Token(pool={self.pool!r}, name={self.name!r})"

    def keys(self) -> KeyPair:
        """Return the key pair by which the invited host is let in once."""
        return KeyPair("invited", self.name, self.public, self.secret)


def new_pair() -> KeyPair:
    """Return a key pair for one invitation, under a unique name."""
    return KeyPair.create("invited", f"invited-{secrets.token_hex(6)}")


def encode(token: Token) -> str:
    """Return the invitation as one word without white space, with a checksum against bad copies."""
    plain = msgspec.msgpack.encode(token)
    packed = zlib.crc32(plain).to_bytes(4, "big") + zlib.compress(plain, 9)
    return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(text: str) -> Token:
    """Read an invitation. Raises :class:`UsageError` for anything that is no complete one."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TOKEN:
        raise UsageError(f"an invitation begins with {PREFIX!r}: print one with `rgpu keys invite`")
    body = text[len(PREFIX):]
    try:
        packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        reader = zlib.decompressobj()
        plain = reader.decompress(packed[4:], MAX_PLAIN)
        if not reader.eof or reader.unused_data or zlib.crc32(plain) != int.from_bytes(packed[:4], "big"):
            raise ValueError("it is not whole")
        token = msgspec.msgpack.decode(plain, type=Token)
        for key in (token.public, *(endpoint.public for endpoint in token.endpoints)):
            check_public(key)
    except (binascii.Error, zlib.error, msgspec.MsgspecError, ValueError, Corrupt) as error:
        raise UsageError(f"the invitation cannot be read, it may be cut: {error}") from None
    if token.v != 1 or not token.endpoints:
        raise UsageError("the invitation is of another version of rgpu, or names no address of the pool")
    return token
