"""Plan of the pages that a destination on the same host pulls, and the messages about it. Pure.

A source whose device can export its memory offers that in BEGIN (``peer``), and
the destination answers in its first READY; docs/protocols/pages.md describes the messages
that follow.

ROUND of the last pause may contain ``known``: rows of (address, size, page numbers as
u32, their hashes) of regions for which the destination can derive every
hash of the source: the hashes that it sent itself (HASHES), with these replaced.
The state's row of such a region has no hashes. Every page of both sides is still
compared at the end, and the pause does not include sending the hashes that
both sides had before it.

The connection carries which pages changed, never their content: a destination hashes its
own memory after a pull, and the source compares that with its own. So a page
that a kernel wrote while it was copied is pulled again in the next round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from rgpu.checkpoint.device import Region
from rgpu.link.messages.pages import RUN_LAYOUT, Round
from rgpu.session.addresses import PAGE
from rgpu.session.errors import Corrupt

MOST_RUNS = 1 << 16  #: runs in one message
MOST_GRANTED = 64  #: regions in one message: one packet holds this many descriptors
#: Clean pages between dirty ones that are copied too: 512 KiB take about as long as the call for another run.
GAP = 8
#: Most runs of a region; beyond that more clean pages are copied too.
REGION_RUNS = 4096
MOST_KNOWN = 1 << 17  #: pages in ``known``: 2.5 MiB
FEW = 8  #: a region of which more than one page in this many changed is sent with all its hashes
HASHES_PIECE = 1 << 16  #: page hashes in one message: 1 MiB

Array = np.ndarray[Any, Any]
T = TypeVar("T")


def encode(value: msgspec.Struct) -> bytes:
    """Encode a message's body as msgpack."""
    return msgspec.msgpack.encode(value)


def decode(body: Any, kind: type[T]) -> T:
    """Decode a message's body from msgpack. Raises :class:`Corrupt`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a message about pulled pages cannot be read: {error}", reason="msgpack") from error


# -- runs -----------------------------------------------------------------------------------
def whole(region: Region) -> Array:
    """Return all of a region as one run."""
    return np.array([(region.address, region.size)], RUN_LAYOUT)


def runs_of(region: Region, indices: Array, *, gap: int = GAP, most: int = REGION_RUNS) -> Array:
    """Return runs that cover the pages ``indices`` (ascending) of a region of whole pages.

    Clean pages between them are included where that costs less than another run;
    the more runs there would be, the more clean pages are included.
    """
    if not len(indices):
        return np.zeros(0, RUN_LAYOUT)
    distances = np.diff(indices)
    while (breaks := np.flatnonzero(distances > gap + 1)).size >= most:
        gap = 2 * gap + 1
    firsts = indices[np.concatenate([[0], breaks + 1])].astype(np.uint64)
    lasts = indices[np.concatenate([breaks, [len(indices) - 1]])].astype(np.uint64)
    runs = np.empty(len(firsts), RUN_LAYOUT)
    runs["address"] = np.uint64(region.address) + firsts * np.uint64(PAGE)
    runs["bytes"] = (lasts - firsts + np.uint64(1)) * np.uint64(PAGE)
    return runs


def pieces(runs: Array, limit: int) -> Iterator[Array]:
    """Yield the runs in parts of at most ``limit`` bytes (whole pages) and MOST_RUNS rows; long runs are split."""
    limit = max(PAGE, limit // PAGE * PAGE)
    rows: list[tuple[int, int]] = []
    left = limit
    for address, size in runs.tolist():
        while size:
            part = min(size, left)
            rows.append((address, part))
            address, size, left = address + part, size - part, left - part
            if not left or len(rows) == MOST_RUNS:
                yield np.array(rows, RUN_LAYOUT)
                rows, left = [], limit
    if rows:
        yield np.array(rows, RUN_LAYOUT)


def pages_of(runs: Array) -> int:
    """Return the number of pages in runs."""
    return int(runs["bytes"].sum()) // PAGE


# -- bodies ---------------------------------------------------------------------------------
def pull(runs: Array, tell: bool) -> bytes:
    """Encode the body of PULL; ``tell``: the destination is to answer with hashes."""
    return bytes([tell]) + runs.tobytes()


def read_pull(body: Any) -> tuple[bool, Array]:
    """Decode a PULL: (whether hashes are requested, runs). Raises :class:`Corrupt` for anything but runs of pages."""
    view = memoryview(body)
    count, rest = divmod(len(view) - 1, RUN_LAYOUT.itemsize)
    if rest or not 1 <= count <= MOST_RUNS or view[0] > 1:
        raise Corrupt(f"a list of runs in {len(view)} bytes", reason="length")
    runs = np.frombuffer(view, RUN_LAYOUT, count, 1)
    page, most = np.uint64(PAGE - 1), np.uint64(1 << 62)
    bad = (runs["bytes"] == 0) | (runs["bytes"] > most) | (runs["address"] > most)
    bad |= ((runs["bytes"] | runs["address"]) & page) != 0
    if bad.any():
        row = runs[int(np.flatnonzero(bad)[0])]
        raise Corrupt(f"{int(row['bytes'])} bytes at {int(row['address']):#x} are no run of pages",
                      address=int(row["address"]), reason="run")
    return bool(view[0]), runs


def hashes(values: Array) -> Iterator[bytes]:
    """Yield the bodies of HASHES for ``values``, (n, 2)."""
    for at in range(0, max(1, len(values)), HASHES_PIECE):
        yield bytes([at + HASHES_PIECE >= len(values)]) + values[at:at + HASHES_PIECE].astype("<u8").tobytes()


def known(rows: Mapping[tuple[int, int], tuple[Array, Array]]) -> list[tuple[int, int, bytes, bytes]]:
    """Encode the known pages for ROUND."""
    return [(address, size, indices.astype("<u4").tobytes(), values.astype("<u8").tobytes())
            for (address, size), (indices, values) in rows.items()]


def read_known(body: Any) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Decode the known pages of a ROUND; empty if it has none. Raises :class:`Corrupt`."""
    found: dict[tuple[int, int], tuple[Array, Array]] = {}
    for address, size, indices, values in decode(body, Round).known:
        whole_rows = size > 0 and len(indices) % 4 == 0 and len(values) == 4 * len(indices)
        numbers = np.frombuffer(indices, "<u4") if whole_rows else np.zeros(0, "<u4")
        if not whole_rows or (len(numbers) and int(numbers.max()) >= size // PAGE):
            raise Corrupt(f"the known hashes of {size} bytes at {address:#x} are not valid",
                          address=address, reason="known")
        found[address, size] = numbers, np.frombuffer(values, "<u8").reshape(-1, 2)
    return found


def read_hashes(body: Any, left: int) -> tuple[bool, Array]:
    """Decode HASHES: (whether they are the last, (n, 2) hashes); ``left``: pages still due. Raises :class:`Corrupt`."""
    view = memoryview(body)
    count, rest = divmod(len(view) - 1, 16)
    if rest or not 1 <= count <= left or view[0] > 1 or bool(view[0]) != (count == left):
        raise Corrupt(f"{len(view)} bytes of page hashes where {left} hashes are due", reason="length")
    return bool(view[0]), np.frombuffer(view, "<u8", 2 * count, 1).reshape(count, 2)
