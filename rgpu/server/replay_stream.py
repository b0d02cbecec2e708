"""The second half of a move by replay, worker to worker: calls since the cut, then what differs.

It follows the page stream (:mod:`rgpu.server.page_stream`) on the same sealed
link, once the destination has verified every page of the cut. All integers are
little-endian.

=========  ==========================================================  ===============
type       body                                                        direction
=========  ==========================================================  ===============
48 REPLAY  msgpack {position}: the cut's; the calls follow             source → dest
49 CALLS   u8 (1: a stream begins anew, with a whole record), bytes    source → dest
50 PING    u64 number                                                  source → dest
51 LAST    piece of the msgpack of a SessionState (u8 last, bytes)     source → dest
56 PONG    u64 number, u64 applied: all before the ping was applied    dest → source
57 WANT    msgpack [[region address, [page, …]], …]: what differs      dest → source
=========  ==========================================================  ===============

The state of LAST holds the hash of every page at the last pause, the answers
that the program may not have, events and clock; its ``live`` is
{"digest": …}, of :func:`objects_digest`. After WANT the page stream goes on as
in any last round: LAYOUT, PAGES, ROUND, a STATE without regions, DONE. FAILED
may come at any time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import blake3
import msgspec

from rgpu.checkpoint.state import SessionState
from rgpu.session.errors import Corrupt

REPLAY, CALLS, PING, LAST = 48, 49, 50, 51
PONG, WANT = 56, 57
PIECE = 1 << 20
MAX_REGIONS = 1 << 20

_PING = struct.Struct("<Q")
_PONG = struct.Struct("<QQ")


def objects_digest(objects: dict[str, Any]) -> bytes:
    """What tells one session's live objects from others: of :meth:`LiveObjects.to_dict`, contents by their hash."""
    digests = [blake3.blake3(payload).digest() for payload in objects["payloads"]]
    calls = [[seq, call, thread, flags, bytes(args), digests[payload] if isinstance(payload, int) and payload >= 0
              else blake3.blake3(payload).digest() if isinstance(payload, bytes) else payload]
             for seq, call, thread, flags, args, payload in objects["calls"]]
    whole = msgspec.msgpack.encode([objects["position"], calls, sorted(objects["answers"])])
    return blake3.blake3(whole).digest()


def pieces(state: SessionState) -> Iterator[tuple[bytes, memoryview]]:
    """The bodies of LAST."""
    data = memoryview(state.encode())
    for at in range(0, max(1, len(data)), PIECE):
        yield bytes([at + PIECE >= len(data)]), data[at:at + PIECE]


def ping(number: int) -> bytes:
    return _PING.pack(number)


def pong(number: int, applied: int) -> bytes:
    return _PONG.pack(number, applied)


def read_ping(body: Any) -> int:
    """Raises :class:`Corrupt`."""
    if len(body) != _PING.size:
        raise Corrupt(f"a ping of {len(body)} bytes", reason="length")
    return int(_PING.unpack(body)[0])


def read_pong(body: Any) -> tuple[int, int]:
    """(number, applied). Raises :class:`Corrupt`."""
    if len(body) != _PONG.size:
        raise Corrupt(f"a pong of {len(body)} bytes", reason="length")
    number, applied = _PONG.unpack(body)
    return int(number), int(applied)


def read_replay(body: Any) -> int:
    """The cut's position. Raises :class:`Corrupt`."""
    try:
        return int(msgspec.msgpack.decode(body, type=dict[str, int])["position"])
    except (msgspec.MsgspecError, KeyError) as error:
        raise Corrupt(f"the beginning of a replay cannot be read: {error}", reason="msgpack") from error


def read_want(body: Any) -> dict[int, list[int]]:
    """{region address: pages}. Raises :class:`Corrupt`."""
    try:
        rows = msgspec.msgpack.decode(body, type=list[tuple[int, list[int]]])
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the list of wanted pages cannot be read: {error}", reason="msgpack") from error
    if len(rows) > MAX_REGIONS:
        raise Corrupt(f"pages of {len(rows)} regions are wanted", reason="length")
    return dict(rows)
