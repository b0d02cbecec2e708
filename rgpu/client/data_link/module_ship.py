"""Module loads on the data link: a module binary that the node may have is named by its hash, not sent.

The stream of records stays the same; a CALLS_REF message stands for the
bytes of one payload in it (docs/developers/links/data-link.md, "The data link"). The agent
names a module binary without asking first, so a hit costs no round trip. A worker whose node
lacks it answers NEED and drops the messages that follow; the stream is sent again from that
place, this time with the bytes. Where several loads wait to be shipped (after
a reconnect, a move or the failure of a node) one HAVE asks for all of them before.

The answers hold for one connection only: another worker, or another node, is
asked anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3

from rgpu.link.data.module_refs import ASK_AT_ONCE
from rgpu.link.messages.data import NEEDED_LAYOUT
from rgpu.session.errors import Corrupt

if TYPE_CHECKING:
    from rgpu.client.journal.contents import Content
    from rgpu.client.journal.cursor import Cursor
    from rgpu.client.journal.kept import Journal

_PIECE = 8 << 20  #: bytes hashed at a time


class Stream(Protocol):
    """The part of the data link that this module uses."""

    @property
    def stream_offset(self) -> int:
        """Offset in the stream of the next byte to send."""

    def send_calls(self, buffers: list[Any]) -> None:
        """Send calls as they stand in the journal."""

    def send_reference(self, length: int, digest: bytes) -> None:
        """Send a digest in place of ``length`` bytes of the stream."""

    def send_have(self, digests: list[bytes]) -> None:
        """Ask which of these module binaries the node has."""

    def continue_at(self, offset: int) -> None:
        """Begin again at an earlier offset of the stream, bytes."""


@dataclass(frozen=True, slots=True)
class _Named:
    """A reference that was sent: its offset in the stream, and the place of its bytes in the journal."""

    stream_offset: int
    content: Content


class ModuleShip:
    """Ships the journal over one link after the other. Counters are of the whole session."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.named_bytes = 0  #: of payloads that were named and not sent
        self.sent_bytes = 0  #: of payloads that might have been named and were sent
        self._reset()

    def _reset(self) -> None:
        self._asked: list[bytes] = []  #: digests in the HAVE that was not answered yet
        self._absent: set[bytes] = set()  #: digests that the node lacks, as it answered
        self._refused = False  #: the node keeps no module binaries
        self._named: list[_Named] = []

    # -- a connection begins ------------------------------------------------------------
    def attached(self, link: Stream, cursor: Cursor) -> None:
        """Start at the cursor: ask once for all module binaries that wait to be shipped."""
        self._reset()
        waiting = self.journal.contents.all_after(cursor)[:ASK_AT_ONCE]
        digests = list(dict.fromkeys(self._digest(content) for content in waiting)) if len(waiting) > 1 else []
        if len(digests) > 1:
            self._asked = digests
            link.send_have(digests)

    # -- shipping -----------------------------------------------------------------------
    def ship(self, link: Stream, cursor: Cursor, limit: int) -> int:
        """Send the next message of records; return its length in stream bytes, 0 while an answer is needed first."""
        content = self.journal.contents.after(cursor)
        if content is None or content.place != (cursor.number, cursor.offset):
            return self._send(link, cursor, limit, content)
        digest = self._digest(content)
        if digest in self._asked:
            return 0
        if self._refused or digest in self._absent:
            self._absent.discard(digest)  # from now on the node has it
            self.sent_bytes += content.length
            return self._send(link, cursor, min(limit, content.length), None)
        self._named.append(_Named(link.stream_offset, content))
        self.named_bytes += content.length
        link.send_reference(content.length, digest)
        cursor.offset += content.length
        return content.length

    def _send(self, link: Stream, cursor: Cursor, limit: int, until: Content | None) -> int:
        buffers = self.journal.take(cursor, limit, until.place if until is not None else None)
        if buffers:
            link.send_calls(buffers)
        return sum(len(buffer) for buffer in buffers)

    def _digest(self, content: Content) -> bytes:
        if not content.digest:
            hasher = blake3()
            for piece in self._pieces(content):
                hasher.update(piece)
            content.digest = hasher.digest()
        return content.digest

    def _pieces(self, content: Content) -> Iterable[Any]:
        run = self.journal.run(content.number)
        end = content.offset + content.length
        for at in range(content.offset, end, _PIECE):
            yield from run.read(at, min(_PIECE, end - at))

    # -- messages of the worker ---------------------------------------------------------
    def present(self, body: Any) -> None:
        """Take the answer to HAVE. Raises :class:`Corrupt`."""
        if len(body) != len(self._asked):
            raise Corrupt(f"{len(body)} answers for {len(self._asked)} hashes", reason="present")
        self._absent.update(digest for digest, there in zip(self._asked, body, strict=True) if not there)
        self._asked = []

    def need(self, link: Stream, cursor: Cursor, body: Any) -> None:
        """Go back to a payload that the node lacks. Raises :class:`Corrupt` for an offset at which none was named."""
        if len(body) != NEEDED_LAYOUT.size:
            raise Corrupt("a NEED of impossible length", reason="need")
        offset, keeps = NEEDED_LAYOUT.unpack(body)
        index = next((i for i, named in enumerate(self._named) if named.stream_offset == offset), None)
        if index is None or self._named[index].content.number < self.journal.first_number:
            raise Corrupt(f"the worker needs bytes at offset {offset}, where nothing was named that is still kept",
                          offset=offset, reason="need")
        content = self._named[index].content
        self.named_bytes -= sum(named.content.length for named in self._named[index:])
        del self._named[index:]
        self._absent.add(self._digest(content))
        self._refused = self._refused or not keeps
        cursor.number, cursor.offset = content.place
        link.continue_at(offset)

    def statistics(self) -> dict[str, int]:
        """Return the bytes of module binaries that were sent and saved, as ``rgpu ps`` shows them."""
        return {"module_bytes": self.sent_bytes, "module_bytes_saved": self.named_bytes}
