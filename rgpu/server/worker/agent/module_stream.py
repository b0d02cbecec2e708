"""The worker's end of the record stream: where the agent named a module binary, the node's cache provides its bytes.

CALLS contains bytes, CALLS_REF a hash in place of bytes. Bytes that the cache lacks
are requested with NEED; until the stream is sent again from that offset,
everything behind it is dropped, for the agent sends it again
(docs/developers/links/data-link.md, "The data link"). The record reader that follows gets the same
bytes either way, and checks the payload's checksum in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rgpu.link.data.module_refs import ASK_AT_ONCE
from rgpu.link.messages.data import (
    CALLS,
    CALLS_REF,
    DIGEST,
    NEED,
    NEEDED_LAYOUT,
    POSITION_LAYOUT,
    PRESENT,
    REFERENCE_LAYOUT,
)
from rgpu.server.module_cache import ModuleCache
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import MAX_PAYLOAD


class ModuleStream:
    """One connection's stream. ``say(type, body)`` sends a message to the agent, in order with all others."""

    def __init__(self, cache: ModuleCache | None, say: Callable[[int, bytes], None]) -> None:
        self._cache = cache
        self._say = say
        self._expected = 0  #: stream offset of the next byte
        self._came = 0.0  #: seconds that the node's cache took for the binary named last
        self._asked: float | None = None  #: when bytes were requested that are not loaded yet
        self.waiting = False  #: bytes were requested: a PING is not answered, since calls ahead of it were dropped

    def take(self, kind: int, body: Any) -> Any:
        """Return the bytes that a CALLS or CALLS_REF stands for; None while they are not available.

        Raises :class:`Corrupt` for a gap, or a message of impossible length.
        """
        if len(body) < POSITION_LAYOUT.size or kind == CALLS_REF and len(body) != REFERENCE_LAYOUT.size:
            raise Corrupt(f"a message of type {kind} with {len(body)} bytes", type=kind, reason="length")
        (offset,) = POSITION_LAYOUT.unpack_from(body)
        if not self._follows(offset):
            return None
        data = body[POSITION_LAYOUT.size:] if kind == CALLS else self._named(body)
        if data is None:
            self.waiting, self._asked = True, time.monotonic()
            keeps = self._cache is not None and self._cache.limit > 0
            self._say(NEED, NEEDED_LAYOUT.pack(self._expected, keeps))
            return None
        self._expected += len(data)
        return data

    @property
    def expected(self) -> int:
        """Stream offset of the next byte."""
        return self._expected

    def continue_at(self, offset: int) -> None:
        """Continue behind bytes of CALLS that other code has taken."""
        self._expected = offset

    def take_placed(self, offset: int, length: int) -> bool:
        """Note that the next ``length`` bytes lie in shared memory. Return False when they are to be dropped.

        Raises :class:`Corrupt`.
        """
        if not self._follows(offset):
            return False
        self._expected += length
        return True

    def _follows(self, offset: int) -> bool:
        """Whether the stream continues at ``offset``; False: the message was sent before the agent read NEED."""
        if offset > self._expected and self.waiting:
            return False
        if offset != self._expected:
            raise Corrupt(f"the record stream jumps from {self._expected} to {offset}", offset=self._expected,
                          reason="gap")
        self.waiting = False
        return True

    def _named(self, body: Any) -> bytes | None:
        _, length, digest = REFERENCE_LAYOUT.unpack(body)
        if not 0 < length <= MAX_PAYLOAD:
            raise Corrupt(f"a reference to {length} bytes", reason="length")
        began = time.monotonic()
        data = self._cache.get(digest) if self._cache is not None else None
        self._came += time.monotonic() - began
        return data if data is not None and len(data) == length else None

    def travelled(self) -> float:
        """Return the seconds from the mention by hash of the module binary to be loaded next until it was here.

        It was read from the cache or, where it was requested, from the client. A binary sent in full counts as 0.
        """
        since, self._asked, came, self._came = self._asked, None, self._came, 0.0
        return came if since is None else came + time.monotonic() - since

    def have(self, body: Any) -> None:
        """Answer HAVE with PRESENT: one byte for each hash, 1 where the node has it. Raises :class:`Corrupt`."""
        count, rest = divmod(len(body), DIGEST)
        if rest or not 0 < count <= ASK_AT_ONCE:
            raise Corrupt(f"a HAVE of {len(body)} bytes", reason="length")
        cache = self._cache
        self._say(PRESENT, bytes(cache is not None and cache.has(bytes(body[at:at + DIGEST]))
                                 for at in range(0, len(body), DIGEST)))
