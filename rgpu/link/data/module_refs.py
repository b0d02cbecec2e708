"""Payloads that the data link sends by hash, and the limits (docs/developers/links/data-link.md, "The data link")."""

from __future__ import annotations

from rgpu.session.calls.wire import BY_NAME

SMALLEST = 16 * 1024  #: payloads of fewer bytes are always sent
ASK_AT_ONCE = 4096  #: hashes in one HAVE
_LOAD = BY_NAME["module_load"].id


def is_content(call: int, payload: int) -> bool:
    """Whether a record carries a module binary that is large enough to be sent by hash."""
    return call == _LOAD and payload >= SMALLEST
