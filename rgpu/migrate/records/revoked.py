"""``revoked/KEY``: a key that no node lets in any more, whatever lies in its folder. Written once, never taken back."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rgpu.migrate.records.schema import SCHEMA, Record, Seconds, Text

REVOKED = "revoked/"


class RevokedRecord(Record, frozen=True, kw_only=True):
    """``name``: what the key was called; ``checkpoint``: what it runs is checkpointed before it is ended."""

    v: int = SCHEMA
    name: Text
    public: Annotated[str, Meta(min_length=40, max_length=40)]
    role: Literal["user", "node", "operator"] = "user"
    when: Seconds = 0.0
    checkpoint: bool = False


def revoked_key(public: str) -> str:
    """Where the registry keeps it; ``public`` in Z85, of which not every character may stand in a key."""
    return REVOKED + public.encode("ascii").hex()
