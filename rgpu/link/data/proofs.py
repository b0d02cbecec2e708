"""Tickets that an agent makes for one session and one node with its own key, so that no other process can make any.

::

    key    = BLAKE3 derive_key("rgpu 2026 data link: agent and node", X25519(agent's key, node's key)
             ‖ agent's public key ‖ node's public key)
    ticket = as in :mod:`rgpu.link.data.tickets` with v 2, and ``key`` in place of the pool's secret

Both ends compute the key from their own secret half and the other's public half: the agent receives the node's with the
owner of its session, the node reads the agent's from the session's record, which names the agent that may attach. So
neither the pool's secret nor the key of another node makes a ticket for a session, and a ticket that one node was shown
is invalid at another. Tickets of the pool's secret (v 1) are for agents and nodes of the previous version.
"""

from __future__ import annotations

import blake3
import zmq.utils.z85
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from rgpu.link.data.tickets import BY_AGENT, Granted, Ticket, claimed_agent, issue, verify
from rgpu.link.keys import KeyPair, check_public
from rgpu.session.errors import AuthenticationFailed, Corrupt

SECONDS = 120.0  #: lifetime: a ticket is made for the connection that it opens

_PAIR = "rgpu 2026 data link: agent and node"
_OF_NODE = "rgpu 2026 data link: a node's own tickets"


def prove(agent: KeyPair, node: str, session: str, *, now: float | None = None) -> Granted:
    """Return a ticket for ``calls`` of one session at the node with that public key (Z85).

    ``now``: unix seconds by the node's clock, which checks the lifetime (default: this machine's).
    Raises :class:`AuthenticationFailed` for an invalid key.
    """
    key = _pair_key(agent, node, agent.public, node)
    return issue(key, session, agent.public, "calls", lifetime=SECONDS, now=now, version=BY_AGENT)


def check(node: KeyPair, data: bytes, purpose: str) -> Ticket:
    """Return the ticket, if the agent that it names made it for this node. Raises :class:`AuthenticationFailed`.

    Whether that agent is the session's is not checked here: the session's record names it.
    """
    agent = claimed_agent(data)
    return verify([_pair_key(node, agent, agent, node.public)], data, purpose, version=BY_AGENT)


def own_secret(node: KeyPair) -> bytes:
    """Return the secret of tickets that a node makes and checks itself; the same after a restart."""
    return blake3.blake3(_raw(node.secret), derive_key_context=_OF_NODE).digest()


def _pair_key(own: KeyPair, other: str, agent: str, node: str) -> bytes:
    try:
        shared = X25519PrivateKey.from_private_bytes(_raw(own.secret)).exchange(
            X25519PublicKey.from_public_bytes(_raw(check_public(other))))
    except (Corrupt, ValueError) as error:  # no key, or a point of low order: it would make a publicly known key
        raise AuthenticationFailed("the other end of a data link has no key that can be", reason="key") from error
    return blake3.blake3(shared + _raw(agent) + _raw(node), derive_key_context=_PAIR).digest()


def _raw(key: str) -> bytes:
    return bytes(zmq.utils.z85.decode(key.encode("ascii")))
