"""Tickets: credentials with which an agent or a node opens a data link for one session.

::

    ticket = body ‖ keyed BLAKE3(pool secret, "ticket" ‖ body)     32 bytes of MAC
    secret =        keyed BLAKE3(pool secret, "secret" ‖ body)     32 bytes
    body   = msgpack {v: 1, session, agent, purpose, expires, id}

Any node of the pool can check one, and derive its secret, without a
request; while the pool's secret is rotated, tickets made with the old one and
with the new one are valid (:mod:`rgpu.link.secrets`). A ticket names
no epoch and no owner: it stays valid when the session moves. The secret travels
only over the control link, never with the ticket.

These tickets are for ends of the previous version, and for moves, whose destination makes and checks them with a secret
of its own. An agent makes its own tickets (v 2): :mod:`rgpu.link.data.proofs`.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import blake3
import msgspec

from rgpu.session.errors import AuthenticationFailed

MAC_BYTES = 32
LIMIT = 1024  #: longest ticket, bytes
PURPOSES = ("calls", "pages", "ranks")
LIFETIME = 3600.0  #: seconds; agents renew at half of it
BY_NODE, BY_AGENT = 1, 2  #: versions: made by a node with a secret; by the agent that it names, with its own key
LEEWAY = 30.0  #: seconds that clocks of two hosts may differ


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    session: str
    agent: str
    purpose: str
    expires: float
    id: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """A verified ticket. ``agent``: public key (Z85) of the end it was given to; ``proven``: that end made it."""

    session: str
    agent: str
    purpose: str
    expires: float  #: unix seconds
    id: str
    secret: bytes = field(repr=False, default=b"")
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """A new ticket as sent over the control link."""

    ticket: bytes
    secret: bytes = field(repr=False)
    expires: float


def issue(pool_secret: bytes, session: str, agent: str, purpose: str, *, lifetime: float = LIFETIME,
          now: float | None = None, version: int = BY_NODE) -> Granted:
    """Return a ticket for one session and purpose (of :data:`PURPOSES`), and its secret."""
    if purpose not in PURPOSES:
        raise ValueError(f"purpose {purpose!r}")
    expires = (time.time() if now is None else now) + lifetime
    body = msgspec.msgpack.encode(_Body(version, session, agent, purpose, expires, secrets.token_hex(8)))
    if len(body) + MAC_BYTES > LIMIT:
        raise ValueError("the session's name is too long for a ticket")
    return Granted(body + _mac(pool_secret, b"ticket", body), _mac(pool_secret, b"secret", body), expires)


def verify(pool_secrets: Sequence[bytes], data: bytes, purpose: str, *, now: float | None = None,
           version: int = BY_NODE) -> Ticket:
    """Return the ticket with its secret, if one of ``pool_secrets`` made it, it is not expired, and for ``purpose``.

    Raises :class:`AuthenticationFailed`. The MAC is checked, in constant time,
    before anything inside the body is read.
    """
    if not MAC_BYTES < len(data) <= LIMIT:
        raise AuthenticationFailed("the ticket has an impossible length", reason="length")
    body, mac = bytes(data[:-MAC_BYTES]), bytes(data[-MAC_BYTES:])
    maker = [secret for secret in pool_secrets if hmac.compare_digest(mac, _mac(secret, b"ticket", body))]
    if not maker:
        raise AuthenticationFailed("the ticket was not made by this pool, or with a secret that counts no more: renew "
                                   "it", reason="mac")
    found = _read(body)
    if found.v != version:
        raise AuthenticationFailed(f"ticket version {found.v}, not {version}", reason="version")
    if found.purpose != purpose:
        raise AuthenticationFailed(f"the ticket is for {found.purpose}, not for {purpose}", reason="purpose")
    if not found.expires + LEEWAY > (time.time() if now is None else now):
        raise AuthenticationFailed("the ticket has expired: renew it", reason="expired")
    return Ticket(found.session, found.agent, found.purpose, found.expires, found.id,
                  _mac(maker[0], b"secret", body), version == BY_AGENT)


def version_of(data: bytes) -> int:
    """Return the version that a ticket names, unchecked; 0: it names none."""
    try:
        return _read(bytes(data[:-MAC_BYTES])).v
    except AuthenticationFailed:
        return 0


def claimed_agent(data: bytes) -> str:
    """Return the agent that a ticket names, unchecked. Raises :class:`AuthenticationFailed`."""
    if not MAC_BYTES < len(data) <= LIMIT:
        raise AuthenticationFailed("the ticket has an impossible length", reason="length")
    return _read(bytes(data[:-MAC_BYTES])).agent


def _read(body: bytes) -> _Body:
    try:
        return msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AuthenticationFailed(f"the ticket cannot be read: {error}", reason="format") from None


def _mac(pool_secret: bytes, label: bytes, body: bytes) -> bytes:
    return blake3.blake3(label + body, key=pool_secret).digest()
