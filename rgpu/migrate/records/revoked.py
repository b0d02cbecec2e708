"""``revoked/KEY``: a key that every node refuses, whatever is in its folder. Written once, never deleted."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rgpu.migrate.records.schema import SCHEMA, Record, Seconds, Text

REVOKED = "revoked/"


class RevokedRecord(Record, frozen=True, kw_only=True):
    """Revoked key. ``name``: the key's name; ``checkpoint``: its sessions are checkpointed before they are ended."""

    v: int = SCHEMA
    name: Text
    public: Annotated[str, Meta(min_length=40, max_length=40)]
    role: Literal["user", "node", "operator"] = "user"
    when: Seconds = 0.0
    checkpoint: bool = False


def revoked_key(public: str) -> str:
    """Registry key of a revocation; ``public`` in Z85, of which not every character is allowed in a registry key."""
    return REVOKED + public.encode("ascii").hex()
