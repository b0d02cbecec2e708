"""The second half of a move by replay, worker to worker: calls since the snapshot, then the pages that differ.

It follows the page stream (:mod:`rgpu.migrate.transfer.receiver`) on the same sealed
link, once the destination has verified every page of the snapshot. The messages are in
docs/protocols/pages.md.

The state in LAST holds the hash of every page at the last pause, the answers
that the program might not have, events and clock; its ``live`` is
{"digest": …}, by :func:`objects_digest`. After WANT the page stream continues as
in any last round: LAYOUT, PAGES, ROUND, a STATE without regions, DONE. FAILED
may be received at any time. A PROBE stands among the calls at the position at which the source
hashed those pages; the replay hashes and compares its own pages at that position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import blake3
import msgspec
import numpy as np

from rgpu.checkpoint.manifest.state import SessionState
from rgpu.link.messages.pages import (
    PING_LAYOUT,
    PONG_LAYOUT,
    PROBE_ENTRY_LAYOUT,
    PROBE_HEAD_LAYOUT,
    PROBED_LAYOUT,
    Replay,
)
from rgpu.migrate.transfer.pieces import in_pieces
from rgpu.session.addresses import PAGE
from rgpu.session.errors import Corrupt

PIECE = 1 << 20  #: bytes of calls that may wait when a replay has caught up
MAX_REGIONS = 1 << 20
MOST_PROBED = 1 << 14  #: most pages of one sample


def objects_digest(objects: dict[str, Any]) -> bytes:
    """Return a digest of live objects as :meth:`LiveObjects.to_dict` gives them; payloads count by their hash."""
    digests = [blake3.blake3(payload).digest() for payload in objects["payloads"]]
    calls = [[seq, call, thread, flags, bytes(args), digests[payload] if isinstance(payload, int) and payload >= 0
              else blake3.blake3(payload).digest() if isinstance(payload, bytes) else payload]
             for seq, call, thread, flags, args, payload in objects["calls"]]
    whole = msgspec.msgpack.encode([objects["position"], calls, sorted(objects["answers"])])
    return blake3.blake3(whole).digest()


def pieces(state: SessionState) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the bodies of LAST."""
    return in_pieces(state.encode())


def ping(number: int) -> bytes:
    """Encode the body of PING."""
    return PING_LAYOUT.pack(number)


def pong(number: int, applied: int) -> bytes:
    """Encode the body of PONG: the number of the PING, and the position applied."""
    return PONG_LAYOUT.pack(number, applied)


def read_ping(body: Any) -> int:
    """Decode the number of a PING. Raises :class:`Corrupt`."""
    if len(body) != PING_LAYOUT.size:
        raise Corrupt(f"a ping of {len(body)} bytes", reason="length")
    return int(PING_LAYOUT.unpack(body)[0])


def read_pong(body: Any) -> tuple[int, int]:
    """Decode a PONG: (number, position applied). Raises :class:`Corrupt`."""
    if len(body) != PONG_LAYOUT.size:
        raise Corrupt(f"a pong of {len(body)} bytes", reason="length")
    number, applied = PONG_LAYOUT.unpack(body)
    return int(number), int(applied)


def probe(number: int, position: int, entries: np.ndarray[Any, Any]) -> bytes:
    """Encode the body of PROBE: its number, a position, entries of sampled pages."""
    return PROBE_HEAD_LAYOUT.pack(number, position) + entries.tobytes()


def read_probe(body: Any) -> tuple[int, int, np.ndarray[Any, Any]]:
    """Decode a PROBE: (number, position, entries). Raises :class:`Corrupt`."""
    view = memoryview(body)
    count, rest = divmod(len(view) - PROBE_HEAD_LAYOUT.size, PROBE_ENTRY_LAYOUT.itemsize)
    if rest or not 0 <= count <= MOST_PROBED:
        raise Corrupt(f"a sample of pages in {len(view)} bytes", reason="length")
    entries = np.frombuffer(view, PROBE_ENTRY_LAYOUT, count, PROBE_HEAD_LAYOUT.size)
    bad = (entries["size"] < 1) | (entries["size"] > PAGE) | (entries["address"] > np.uint64(2**63))
    if bad.any():
        row = entries[int(np.flatnonzero(bad)[0])]
        raise Corrupt(f"{row['size']} bytes at {int(row['address']):#x} are no page", address=int(row["address"]),
                      reason="size")
    number, position = PROBE_HEAD_LAYOUT.unpack_from(view)
    return int(number), int(position), entries


def probed(number: int, compared: int, differing: int) -> bytes:
    """Encode the body of PROBED: its number, pages compared, pages that differ."""
    return PROBED_LAYOUT.pack(number, compared, differing)


def read_probed(body: Any) -> tuple[int, int, int]:
    """Decode a PROBED: (number, pages compared, pages that differ). Raises :class:`Corrupt`."""
    if len(body) != PROBED_LAYOUT.size:
        raise Corrupt(f"the result of a sample in {len(body)} bytes", reason="length")
    number, compared, differing = PROBED_LAYOUT.unpack(body)
    if differing > compared:
        raise Corrupt(f"{differing} of {compared} pages differ", reason="count")
    return int(number), int(compared), int(differing)


def read_replay(body: Any) -> int:
    """Decode the journal position of the snapshot. Raises :class:`Corrupt`."""
    try:
        return msgspec.msgpack.decode(body, type=Replay).position
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the beginning of a replay cannot be read: {error}", reason="msgpack") from error


def read_want(body: Any) -> dict[int, list[int]]:
    """Decode {region address: pages}. Raises :class:`Corrupt`."""
    try:
        rows = msgspec.msgpack.decode(body, type=list[tuple[int, list[int]]])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the list of wanted pages cannot be read: {error}", reason="msgpack") from error
    if len(rows) > MAX_REGIONS:
        raise Corrupt(f"pages of {len(rows)} regions are wanted", reason="length")
    return dict(rows)
