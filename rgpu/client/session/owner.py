"""The pool's answers about a session's owner, as events for an attachment.

Each carries ``now``, monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of the session, as the pool reports it. ``address``: (host, port) of the data port.

    ``public``: the node's key, for tickets of the agent's own; empty for a node of the previous version.
    """

    host: str
    address: tuple[str, int]
    epoch: int
    alive: bool = True
    public: str = ""


@dataclass(frozen=True, slots=True)
class OwnerKnown:
    """Event: the pool named the owner."""

    owner: Owner
    now: float


@dataclass(frozen=True, slots=True)
class OwnerUnknown:
    """Event: no node answered, or the session has no owner at present."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """Event: the pool reported that the session is over."""

    reason: str
    now: float
