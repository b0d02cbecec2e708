"""Logins of the web page of one node: one-time codes, and the grants that they are exchanged for. Pure: time is given.

The web page runs as a process of its own with a key of role ``web``, which may redeem codes and nothing else. A user
requests a code from the node with the user's own key; a browser that presents it to the page is that user's. The page
redeems the code for a *grant*, and sends it with each request: the node then handles that as a request of the user's
key, for the verbs that pages may call (:attr:`rgpu.link.control.verbs.Verb.web`), as long as that key is accepted.
Codes and grants are in the memory of the node's daemon, which alone makes, checks and deletes them: other clocks and
nodes do not matter.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from rgpu.session.errors import AuthenticationFailed, LimitReached

CODE_SECONDS = 300.0  #: in which a code must be used
GRANT_SECONDS = 8 * 3600.0  #: for which a login holds
CODES_A_KEY, GRANTS_A_KEY = 8, 16  #: at once; a further grant replaces the oldest one, a further code is refused
MOST = 4096  #: codes, and grants, of all keys


@dataclass(frozen=True, slots=True)
class _Held:
    """The key that a code or a grant stands for. ``until``: seconds, of the clock that is given."""

    public: str
    until: float


def _digest(secret: str) -> str:
    """The digest of a secret that is kept in memory, so that the time of a lookup reveals nothing."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


class Grants:
    """Codes and grants of one node, each of a public key (Z85)."""

    def __init__(self) -> None:
        self._codes: dict[str, _Held] = {}
        self._grants: dict[str, _Held] = {}

    def code(self, public: str, now: float) -> str:
        """Return a new one-time code for that key. Raises :class:`LimitReached`."""
        self._forget(now)
        own = sum(1 for held in self._codes.values() if held.public == public)
        if own >= CODES_A_KEY or len(self._codes) >= MOST:
            raise LimitReached(f"{own} login links of this key wait to be used, {CODES_A_KEY} may: use one, or wait "
                               f"{CODE_SECONDS / 60:.0f} minutes")
        code = secrets.token_urlsafe(32)
        self._codes[_digest(code)] = _Held(public, now + CODE_SECONDS)
        return code

    def redeem(self, code: str, now: float) -> tuple[str, str]:
        """Return (grant, public key) for a code, which is used up by it. Raises :class:`AuthenticationFailed`."""
        self._forget(now)
        held = self._codes.pop(_digest(code), None)
        if held is None:
            raise AuthenticationFailed("this login link was used before, is older than "
                                       f"{CODE_SECONDS / 60:.0f} minutes, or is none of this node: `rgpu web login` "
                                       "makes another", reason="code")
        own = [key for key, one in self._grants.items() if one.public == held.public]
        for oldest in [*own[:max(0, len(own) - GRANTS_A_KEY + 1)], *list(self._grants)[:len(self._grants) - MOST + 1]]:
            self._grants.pop(oldest, None)
        grant = secrets.token_urlsafe(32)
        self._grants[_digest(grant)] = _Held(held.public, now + GRANT_SECONDS)
        return grant, held.public

    def holder(self, grant: str, now: float) -> str:
        """Return the public key that a grant stands for. Raises :class:`AuthenticationFailed`."""
        held = self._grants.get(_digest(grant))
        if held is None or held.until <= now:
            self._grants.pop(_digest(grant), None)
            raise AuthenticationFailed("this login is over: `rgpu web login` makes a link for another", reason="grant")
        return held.public

    def end(self, grant: str) -> None:
        """Delete a grant; an unknown one is no error."""
        self._grants.pop(_digest(grant), None)

    def _forget(self, now: float) -> None:
        for kept in (self._codes, self._grants):
            for key in [key for key, held in kept.items() if held.until <= now]:
                del kept[key]
