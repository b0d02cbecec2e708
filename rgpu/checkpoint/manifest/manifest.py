"""A checkpoint's manifest: format, limits, checks. Pure, no I/O. Offsets: docs/developers/image-format.md.

The manifest records the session, the chunk of each page of each region and the
pack in which each chunk lies. It is written last, so a checkpoint exists exactly
when its manifest does. Since version 2 it begins with a summary that has its own
checksum and holds what listings and garbage collection need, without the pages.
Version 1 is read as well.
"""

from __future__ import annotations

import secrets
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from rgpu.checkpoint.codec import chunk
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.session.addresses import PAGE
from rgpu.session.errors import Corrupt, VersionMismatch

MAGIC = b"RGPUIMG1"
VERSION = 2
MINIMUM_READER = 2
MAX_BODY = 1 << 30
APART = 64 * 1024  #: size from which on a module binary is not copied in encoding; larger than msgpack's bin 16
ZERO_PAGE = 0xFFFFFFFF  #: in place of a chunk number

_HEADER = struct.Struct("<8sIIQ8s32s")  # magic, version, minimum reader, body length, key id, checksum
HEADER_SIZE = _HEADER.size
_SUMMARY = struct.Struct("<II32s")  # length, zero, checksum of header fields and summary
SUMMARY_AT = HEADER_SIZE + _SUMMARY.size
#: A first read of this many bytes holds most summaries whole.
FIRST_READ = 64 * 1024
assert HEADER_SIZE == 64 and SUMMARY_AT == 104

T = TypeVar("T")

#: Key of checkpoints whose store has no key: detects damage, does not authenticate.
DEFAULT_KEY = blake3(b"", derive_key_context="rgpu 2026 image v1: integrity without a secret").digest()


class Pack(msgspec.Struct, frozen=True):
    """A pack: ``name`` (32 hexadecimal digits), ``size``: whole length in bytes, ``hash`` at its end (version 1: none).
    """

    name: str
    size: int
    hash: bytes = b""


class Chunks(msgspec.Struct, frozen=True):
    """Columns over all chunks of the checkpoint: 32-byte names, pack index (u32), offset in it (u64), length there
    (u32).
    """

    names: bytes
    packs: bytes
    offsets: bytes
    lengths: bytes


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """A checkpoint without its pages. ``memory``: bytes of its regions; ``stored``: bytes that it added to the
    store.
    """

    image: str
    created: float  #: Unix time, s, by the writer's clock: for people, never for order
    session: str
    position: int
    epoch: int
    memory: int
    pages: int
    stored: int
    base: str = ""  #: the checkpoint whose packs it refers to as well
    facts: dict[str, Any] = {}  #: of the session: quota, device, program …
    packs: list[Pack] = []


class Body(msgspec.Struct, kw_only=True):
    """The whole contents of a manifest; version 1 stores exactly this.

    ``pages``: for each region of ``state`` one u32 a page, a chunk number or ZERO_PAGE.
    """

    image: str
    created: float
    state: SessionState
    pages: list[bytes]
    packs: list[Pack]
    chunks: Chunks
    statistics: dict[str, Any] = {}
    base: str = ""
    facts: dict[str, Any] = {}

    def summary(self) -> Summary:
        """Make the summary that is stored before the pages."""
        state = self.state
        return Summary(
            image=self.image, created=self.created, session=state.session, position=state.position, epoch=state.epoch,
            memory=sum(region.size for region in state.regions), pages=sum(len(column) // 4 for column in self.pages),
            stored=int(self.statistics.get("stored_bytes") or 0), base=self.base, facts=self.facts, packs=self.packs)


class _Pages(msgspec.Struct, kw_only=True):
    """The part of the manifest behind the summary."""

    state: SessionState
    pages: list[bytes]
    chunks: Chunks
    statistics: dict[str, Any] = {}


class _StateOfPages(msgspec.Struct, kw_only=True):
    """The fields of a :class:`SessionState` that describe its pages; other fields of the map are skipped."""

    version: int
    session: str
    epoch: int
    position: int
    hash_key: bytes
    regions: list[RegionState]


class _PagesAlone(msgspec.Struct, kw_only=True):
    """The fields of :class:`_Pages` that the next checkpoint builds on."""

    state: _StateOfPages
    pages: list[bytes]
    chunks: Chunks


class Table:
    """The body with its columns as arrays, checked: every index and offset in it is in range."""

    def __init__(self, body: Body) -> None:
        self.body = body
        columns = body.chunks
        self.count = len(columns.names) // chunk.NAME_SIZE
        self._names = columns.names
        self.packs = np.frombuffer(columns.packs, "<u4")
        self.offsets = np.frombuffer(columns.offsets, "<u8")
        self.lengths = np.frombuffer(columns.lengths, "<u4")
        self.pages = [np.frombuffer(column, "<u4") for column in body.pages]

    def name(self, number: int) -> bytes:
        """Return the 32-byte name of chunk ``number``."""
        return self._names[number * chunk.NAME_SIZE:(number + 1) * chunk.NAME_SIZE]


def key_id(key: bytes) -> bytes:
    """Return 8 bytes that identify a key without revealing it."""
    return blake3(b"rgpu image key id", key=key).digest(length=8)


def encode(body: Body, key: bytes) -> bytes:
    """Return the manifest's bytes. Raises :class:`ValueError` above MAX_BODY."""
    return b"".join(encode_pieces(body, key))


def encode_pieces(body: Body, key: bytes) -> list[bytes]:
    """Return the manifest in pieces, one behind the other; module binaries are not copied, since that holds the GIL.

    With 128 MiB of binaries encoded in one piece, other threads waited for 80 ms (docs/benchmarks.md) while the session
    ran.
    Raises :class:`ValueError` above MAX_BODY.
    """
    summary = msgspec.msgpack.encode(body.summary())
    state, apart = _without_contents(body.state)
    pages = msgspec.msgpack.encode(_Pages(state=state, pages=body.pages, chunks=body.chunks,
                                          statistics=body.statistics))
    pieces = _put_back(pages, apart)
    length = _SUMMARY.size + len(summary) + sum(map(len, pieces))
    if length > MAX_BODY:
        raise ValueError(f"a manifest of {length} bytes; {MAX_BODY} are allowed")
    head = struct.pack("<8sIIQ8s", MAGIC, VERSION, MINIMUM_READER, length, key_id(key))
    pieces.insert(0, _SUMMARY.pack(len(summary), 0, _checksum(head, summary, key=key)) + summary)
    return [head + _checksum(head, *pieces, key=key), *pieces]


def state_pieces(state: SessionState) -> list[bytes]:
    """Return the bytes of :meth:`SessionState.encode` in pieces, as :func:`encode_pieces` does."""
    bare, apart = _without_contents(state)
    return _put_back(msgspec.msgpack.encode(bare), apart)


def _without_contents(state: SessionState) -> tuple[SessionState, list[tuple[bytes, bytes]]]:
    """Return the state with a token in place of each large module binary, and (token, binary) … in their order."""
    contents = state.live.get("payloads") if isinstance(state.live, dict) else None
    if not isinstance(contents, list):
        return state, []
    apart, kept = [], []
    for content in contents:
        if isinstance(content, bytes) and len(content) >= APART:
            apart.append((secrets.token_bytes(32), content))
            kept.append(msgspec.Raw(apart[-1][0]))
        else:
            kept.append(content)
    return msgspec.structs.replace(state, live={**state.live, "payloads": kept}), apart


def _put_back(encoded: bytes, apart: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return ``encoded`` split at the tokens, with msgpack's ``bin 32`` of each binary in their place."""
    pieces, at = [], 0
    for token, content in apart:
        found = encoded.index(token, at)
        pieces += [encoded[at:found] + b"\xc6" + struct.pack(">I", len(content)), content]
        at = found + len(token)
    return [*pieces, encoded[at:]]


def _checksum(*pieces: Any, key: bytes) -> bytes:
    hasher = blake3(key=key)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def _header(header: bytes, name: str) -> tuple[int, int]:
    """Check the header and return (version, body length). Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    if len(header) < HEADER_SIZE:
        raise Corrupt(f"checkpoint {name}: cut short in the manifest's header", offset=len(header), reason="cut short")
    magic, version, minimum, length, _, _ = _HEADER.unpack(header)
    if magic != MAGIC:
        raise Corrupt(f"checkpoint {name}: not a manifest", offset=0, reason="magic")
    if minimum > VERSION:
        raise VersionMismatch(f"checkpoint {name} is of version {version} and needs a reader of version {minimum}; "
                              f"this "
                              f"one supports {VERSION}", found=version, needed=minimum, known=VERSION)
    if length > MAX_BODY:
        raise Corrupt(f"checkpoint {name}: a body of {length} bytes; {MAX_BODY} are allowed", offset=16,
                      reason="length")
    return int(version), int(length)


def _check_key(header: bytes, key: bytes, name: str) -> bytes:
    """Return the manifest's checksum. Raises :class:`Corrupt` for a manifest of another key."""
    *_, stored_id, checksum = _HEADER.unpack(header)
    if stored_id != key_id(key):
        raise Corrupt(f"checkpoint {name} was written under another key", offset=24, reason="key")
    return bytes(checksum)


def decode(data: bytes, key: bytes, name: str, pages_alone: bool = False) -> Table:
    """Check and decode a manifest. Raises :class:`Corrupt` (offset, reason), :class:`VersionMismatch`.

    ``pages_alone``: decode only the part of the state that describes its pages; module binaries are not copied, see
    :func:`encode_pieces`.
    """
    version, length = _header(data[:HEADER_SIZE], name)
    if len(data) != HEADER_SIZE + length:
        raise Corrupt(f"checkpoint {name}: the manifest has {len(data)} bytes, {HEADER_SIZE + length} wanted",
                      offset=min(len(data), HEADER_SIZE + length), reason="length")
    checksum = _check_key(data[:HEADER_SIZE], key, name)
    body = memoryview(data)[HEADER_SIZE:]
    if _checksum(data[:32], body, key=key) != checksum:
        raise Corrupt(f"checkpoint {name}: the manifest's checksum does not verify", offset=32, reason="checksum")
    if version == 1:
        return _checked(_unpacked(body, Body, name, HEADER_SIZE), name)
    summary = decode_summary(data, key, name)
    assert isinstance(summary, Summary)  # the data is whole
    end = SUMMARY_AT + _SUMMARY.unpack_from(data, HEADER_SIZE)[0]
    pages = _pages_alone(data, end, name) if pages_alone else _unpacked(memoryview(data)[end:], _Pages, name, end)
    whole = Body(image=summary.image, created=summary.created, state=pages.state, pages=pages.pages,
                 packs=summary.packs, chunks=pages.chunks, statistics=pages.statistics, base=summary.base,
                 facts=summary.facts)
    if not pages_alone and whole.summary() != summary:
        raise Corrupt(f"checkpoint {name}: its summary is not that of its pages", offset=SUMMARY_AT, reason="summary")
    return _checked(whole, name)


def _pages_alone(data: bytes, at: int, name: str) -> _Pages:
    found = _unpacked(memoryview(data)[at:], _PagesAlone, name, at)
    state = SessionState(**{field: getattr(found.state, field) for field in found.state.__struct_fields__})
    return _Pages(state=state, pages=found.pages, chunks=found.chunks)


def decode_summary(data: bytes, key: bytes, name: str) -> Summary | int:
    """Decode the summary at the manifest's beginning; or return how many bytes are needed: all for version 1.

    Raises :class:`Corrupt`, :class:`VersionMismatch`. Only the summary is checked.
    """
    version, length = _header(data[:HEADER_SIZE], name)
    whole = HEADER_SIZE + length
    if version == 1:
        return decode(data, key, name).body.summary() if len(data) >= whole else whole
    _check_key(data[:HEADER_SIZE], key, name)
    if len(data) < SUMMARY_AT:
        raise Corrupt(f"checkpoint {name}: cut short before its summary", offset=len(data), reason="cut short")
    size, zero, checksum = _SUMMARY.unpack_from(data, HEADER_SIZE)
    end = SUMMARY_AT + size
    if zero or end > whole:
        raise Corrupt(f"checkpoint {name}: a summary of {size} bytes", offset=HEADER_SIZE, reason="summary length")
    if len(data) < end:
        return end
    summary = memoryview(data)[SUMMARY_AT:end]
    if _checksum(data[:32], summary, key=key) != checksum:
        raise Corrupt(f"checkpoint {name}: its summary's checksum does not verify", offset=HEADER_SIZE + 8,
                      reason="summary checksum")
    decoded = _unpacked(summary, Summary, name, SUMMARY_AT)
    _check_packs(decoded.packs, name)
    return decoded


def _unpacked(data: Any, kind: type[T], name: str, offset: int) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"checkpoint {name}: the manifest does not decode: {error}", offset=offset,
                      reason="msgpack") from error


def _check_packs(packs: list[Pack], name: str) -> None:
    for pack in packs:
        if len(pack.name) != 32 or not set(pack.name) <= set("0123456789abcdef"):
            raise Corrupt(f"checkpoint {name}: a pack's name is not 32 hexadecimal digits", offset=HEADER_SIZE,
                          reason="pack name")
        if not 0 <= pack.size < 1 << 63 or len(pack.hash) not in (0, 32):
            raise Corrupt(f"checkpoint {name}: pack {pack.name} has {pack.size} bytes", offset=HEADER_SIZE,
                          reason="pack size")


def _checked(body: Body, name: str) -> Table:
    def bad(reason: str) -> Corrupt:
        return Corrupt(f"checkpoint {name}: {reason}", offset=HEADER_SIZE, reason=reason)

    body.state.check()
    columns = body.chunks
    count, odd = divmod(len(columns.names), chunk.NAME_SIZE)
    if odd or (len(columns.packs), len(columns.offsets), len(columns.lengths)) != (4 * count, 8 * count, 4 * count):
        raise bad("the chunk columns have different lengths")
    _check_packs(body.packs, name)
    if len(body.pages) != len(body.state.regions):
        raise bad("the page lists do not match the regions")
    for region, column in zip(body.state.regions, body.pages, strict=True):
        pages = pagehash.page_count(region.size)
        if len(column) != 4 * pages or len(region.hashes) != 16 * pages:
            raise bad(f"the page list of region {region.address:#x} has a wrong length")
    table = Table(body)
    _check_places(table, bad)
    return table


def _check_places(table: Table, bad: Any) -> None:
    if table.count:
        sizes = np.array([pack.size for pack in table.body.packs], np.uint64)
        if not len(sizes) or int(table.packs.max()) >= len(sizes):
            raise bad("a chunk in a pack that is not listed")
        limits = sizes[table.packs]
        lengths = table.lengths.astype(np.uint64)
        if (lengths < chunk.CHUNK_HEADER).any() or (lengths > chunk.CHUNK_HEADER + 2 * PAGE).any():
            raise bad("a chunk's length is out of range")
        if (table.offsets < chunk.PACK_HEADER).any() or (table.offsets > limits).any() \
                or (lengths > limits - table.offsets).any():
            raise bad("a chunk outside its pack")
    for column in table.pages:
        used = column[column != ZERO_PAGE]
        if len(used) and int(used.max()) >= table.count:
            raise bad("a page names a chunk that is not listed")
