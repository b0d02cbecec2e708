"""The keys of a data connection: both ends agree on new ones each time, and no stored secret decrypts a recording.

::

    share = X25519 public key of this connection, 32 bytes; it stands where older preambles have a random salt
    key   = HKDF-SHA256(secret of the ticket ‖ X25519 of both, salt = client's share ‖ node's share,
                        info = "rgpu data link 3" ‖ direction ‖ session ‖ u64 epoch)

The ticket's secret authenticates the ends; the private shares, which are not stored, keep the key secret. With an end
of an older preamble the shares are salts (:func:`rgpu.link.data.sealing.derive_key`). A node marks the salt that it
sends to such an end: two newer ends that an attacker between them downgraded detect it, because the salts enter the
keys, too.
"""

from __future__ import annotations

import secrets
import struct

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rgpu.link.data.sealing import derive_key
from rgpu.link.messages.data import FROM_NODE, SALT, TO_NODE
from rgpu.session.errors import AuthenticationFailed

AGREES = 3  #: the first preamble in which both ends agree on keys
OLDER = b"rgpu<3.."  #: ends the salt that a node gives to an end of an older preamble


class Share:
    """One end's key share of one connection. ``data``: its public part, for the other end. The rest stays in here."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.data = self._private.public_key().public_bytes_raw()

    def shared(self, other: bytes) -> bytes:
        """Return 32 bytes that only the two ends can compute. Raises :class:`AuthenticationFailed` for a bad share."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:  # a point of low order: it would make a publicly known key
            raise AuthenticationFailed("the other end of a data link showed no key", reason="share") from error


def salt_for_older() -> bytes:
    """Return a node's salt for an end of an older preamble."""
    return secrets.token_bytes(SALT - len(OLDER)) + OLDER


def keys_of_node(share: Share | None, salt: bytes, client: bytes, secret: bytes, session: str,
                 epoch: int) -> list[bytes]:
    """Return the keys to the node and from it, at the node. ``share``: None for an end of an older preamble.

    Raises :class:`AuthenticationFailed`.
    """
    return _keys(secret, client, salt, None if share is None else share.shared(client), session, epoch)


def keys_of_client(share: Share, node: bytes, preamble: int, secret: bytes, session: str, epoch: int) -> list[bytes]:
    """Return the same keys at the client. ``preamble``: the number that the node answered with.

    Raises :class:`AuthenticationFailed`, also where both ends were downgraded to an older preamble.
    """
    if preamble >= AGREES:
        return _keys(secret, share.data, node, share.shared(node), session, epoch)
    if node.endswith(OLDER):
        raise AuthenticationFailed("somebody between the two ends of a data link made both speak an older preamble",
                                   reason="downgrade")
    return _keys(secret, share.data, node, None, session, epoch)


def _keys(secret: bytes, client: bytes, node: bytes, shared: bytes | None, session: str, epoch: int) -> list[bytes]:
    if shared is None:
        return [derive_key(secret, client, node, direction, session, epoch) for direction in (TO_NODE, FROM_NODE)]
    tail = session.encode() + struct.pack("<Q", epoch)
    return [HKDF(hashes.SHA256(), 32, client + node, b"rgpu data link 3" + bytes([direction]) + tail).derive(
        secret + shared) for direction in (TO_NODE, FROM_NODE)]
