"""Admission by an invitation, without a key of the pool: the request is repeated until the pool accepts its key."""

from __future__ import annotations

import time
from typing import Any

from rgpu.link.control.control_client import ControlClient
from rgpu.link.invitations import Token
from rgpu.session.errors import AuthenticationFailed

#: A node may read of an invitation a moment after it was made.
LET_IN_SECONDS = 10.0
AGAIN_SECONDS = 0.5


def ask(token: Token, verb: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the pool's answer to ``verb`` under the invitation's key.

    Raises :class:`AuthenticationFailed` (used, expired, unknown, for another host), :class:`PoolUnavailable`, and the
    errors that the pool answers.
    """
    deadline = time.monotonic() + LET_IN_SECONDS
    with ControlClient(token.keys(), token.endpoints) as client:
        while True:
            try:
                return dict(client.call(verb, args, timeout=30))
            except AuthenticationFailed as error:
                # Only "this key is not known" may be temporary; an invitation that was used stays used.
                if "address" not in error.detail:
                    raise
                if time.monotonic() > deadline:
                    raise AuthenticationFailed("the pool knows no such invitation: it has expired, was used, or was "
                                               "withdrawn; ask for another one (`rgpu keys invite`)") from error
                time.sleep(AGAIN_SECONDS)
