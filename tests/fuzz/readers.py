"""The readers that take bytes from outside, each as one function of bytes: for atheris and for hypothesis alike.

``TARGETS``: name → (function, seeds). A function returns for bytes that are
taken and for those that are refused in order (an :class:`RgpuError`); anything
else that it raises is a finding. Where it can, it also checks what was taken:
what decodes must encode to the same, lengths must not go beyond the input.
"""

from __future__ import annotations

import functools
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.manifest import manifest as manifests
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.ring import HostRing
from rgpu.checkpoint.session.snapshot import Snapshot
from rgpu.link.data.sealing import Opener, Sealer
from rgpu.link.messages.pages import (
    BEGIN,
    GRANT,
    LAYOUT,
    LZ4,
    PAGES,
    PROBE_ENTRY_LAYOUT,
    PULL,
    RAW,
    ROUND,
    RUN_LAYOUT,
    STATE,
    ZERO,
    Ask,
    Grant,
)
from rgpu.migrate.transfer import frames as page_frames
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer import replay_link as wire
from rgpu.migrate.transfer.receiver import PageReceiver
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import LinkError, RgpuError
from rgpu.session.journal.journal_file import JournalFileWriter, verify
from rgpu.session.journal.record import Record, RecordReader, pack, pack_record
from rgpu.session.journal.recording import ANSWERS_HEAD, parse_answers
from rgpu.session.objects import ahead, graphs
from rgpu.session.objects.live import LiveObjects
from tests.fuzz import gangs, outside

CORPORA = Path(__file__).parents[1] / "session" / "corpora"
MAX_INPUT = 1 << 16  #: bytes; longer inputs find nothing that these do not

_KEY = bytes(32)
_SCRATCH = Path(os.environ.get("TMPDIR", "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()))


# -- journal ---------------------------------------------------------------------------
def records(data: bytes) -> None:
    """A stream of records, cut where its first byte says; what is taken packs to the same bytes."""
    if not data:
        return
    cut, stream = data[0] + 1, data[1:]
    reader = RecordReader()
    taken = b""
    try:
        for at in range(0, len(stream), cut):
            for record in reader.feed(stream[at:at + cut]):
                taken += pack_record(record)
                if record.call_id in BY_ID:
                    decoders.decode(record.call_id, record.args)
    except RgpuError:
        pass
    assert stream.startswith(taken), "a record was taken that its bytes do not say"
    assert reader.pending <= len(stream)


def arguments(data: bytes) -> None:
    """Arguments of any call: two bytes of call id, then the arguments."""
    if len(data) < 2:
        return
    call_id = struct.unpack_from("<H", data)[0] % (max(BY_ID) + 2)
    try:
        decoders.decode(call_id, data[2:])
    except RgpuError:
        pass


def journal_file(data: bytes) -> None:
    """A whole journal file."""
    path = _SCRATCH / f"fuzz-{os.getpid()}.rgpuj"
    path.write_bytes(data)
    try:
        report = verify(path)
        assert report.record_bytes + report.torn_bytes <= len(data)
    except RgpuError:
        pass
    finally:
        path.unlink()


def answers(data: bytes) -> None:
    try:
        parse_answers(data)
    except RgpuError:
        pass


def graph_nodes(data: bytes) -> None:
    """Nodes of a graph, and changes to one."""
    for decode in (graphs.decode, graphs.decode_changes):
        try:
            decode(data)
        except RgpuError:
            pass


def live_objects(data: bytes) -> None:
    """The live objects of a checkpoint; what is taken says the same again."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    try:
        live = LiveObjects.from_dict(value)
    except RgpuError:
        return
    again = LiveObjects.from_dict(live.to_dict())
    assert again.inventory() == live.inventory()


def objects_ahead(data: bytes) -> None:
    """Two bytes of length, objects made ahead, then the live objects of the last pause, which name their contents."""
    if len(data) < 2:
        return
    end = 2 + struct.unpack_from("<H", data)[0]
    try:
        made = ahead.Ahead.decode(data[2:end])
        assert ahead.Ahead.decode(made.encode()) == made
        for record in made.calls():
            decoders.decode(record.call_id, record.args)
        live = LiveObjects.from_dict(made.lengthen(msgspec.msgpack.decode(data[end:]))[0])
        left = made.rest(live.structural_calls())
        assert not {call.seq for call in left} & {row.seq for row in made.rows}
    except (RgpuError, msgspec.DecodeError, ValueError, RecursionError):
        pass


# -- frames ----------------------------------------------------------------------------
def frames(data: bytes) -> None:
    """What a peer without the key may send to an open link: nothing of it is ever taken."""
    opener = Opener(_KEY, 0, 1, "fuzz")
    _feed(opener, data)


def sealed_frames(data: bytes) -> None:
    """Good frames with something done to them: only what was sealed comes out, in order."""
    if len(data) < 4:
        return
    count, spot, change = data[0] % 4 + 1, int.from_bytes(data[1:3], "little"), data[3]
    body = data[4:]
    sealer = Sealer(_KEY, 0, 1, "fuzz")
    sent = [bytes([number]) + body[number::count] for number in range(1, count + 1)]
    stream = b"".join(bytes(sealer.seal(message[0], [message[1:]])) for message in sent)
    if change:
        spot %= len(stream)
        stream = stream[:spot] + bytes([stream[spot] ^ change]) + stream[spot + 1:]
    got = _feed(Opener(_KEY, 0, 1, "fuzz"), stream)
    assert got == sent[:len(got)], "a frame was taken that was not sent"
    assert change or len(got) == count


def _feed(opener: Opener, data: bytes) -> list[bytes]:
    """Messages with their types in front, up to the first that is refused."""
    got: list[bytes] = []
    at = 0
    try:
        while True:
            while (message := opener.next(None)) is not None:
                got.append(bytes([message[0]]) + bytes(message[1]))
            if at >= len(data):
                return got
            room = opener.room()
            count = min(len(room), len(data) - at)
            room[:count] = data[at:at + count]
            opener.received(count)
            at += count
    except LinkError:
        return got


# -- checkpoints ----------------------------------------------------------------------------
def manifest(data: bytes) -> None:
    """A manifest with a right checksum, so that what is behind it is reached; and as it stands."""
    for whole in (data, _signed(data)):
        for pages_alone in (False, True):
            try:
                manifests.decode(whole, checkpoint_key(), "fuzz", pages_alone)
            except RgpuError:
                pass


def checkpoint_key() -> bytes:
    return bytes(getattr(manifests, "DEFAULT_KEY", _KEY))


def _signed(body: bytes) -> bytes:
    head = struct.pack("<8sIIQ8s", manifests.MAGIC, manifests.VERSION, manifests.MINIMUM_READER, len(body),
                       manifests.key_id(checkpoint_key()))
    return head + manifests._checksum(head, body, key=checkpoint_key()) + body


def session_state(data: bytes) -> None:
    try:
        found = SessionState.decode(data)
    except RgpuError:
        return
    assert SessionState.decode(found.encode()) == found


def snapshot(data: bytes) -> None:
    try:
        found = Snapshot.decode(data)
    except RgpuError:
        return
    assert Snapshot.decode(found.encode()) == found


# -- the page stream -------------------------------------------------------------------
class _Pages:
    """A link that gives messages and takes answers."""

    def __init__(self, messages: list[tuple[int, bytes]]) -> None:
        self._messages = iter(messages)

    def recv(self, room: Any = None) -> tuple[int, memoryview]:
        for kind, body in self._messages:
            return kind, memoryview(body)
        raise LinkError("the peer closed the connection")

    def send(self, kind: int, *parts: Any) -> None:
        pass

    def close(self) -> None:
        pass


@functools.cache
def _ring() -> HostRing:
    return HostRing()


class _Memory:
    """Checks that nothing is written outside of what was mapped."""

    def __init__(self) -> None:
        self.ranges: set[tuple[int, int]] = set()

    def map(self, address: int, size: int) -> None:
        self.ranges.add((address, size))

    def unmap(self, address: int, size: int) -> None:
        self.ranges.remove((address, size))

    def page_ring(self) -> HostRing:
        return _ring()

    def write_pages(self, runs: Any) -> None:
        for address, size, data in runs:
            assert data is None or len(data) == size
            assert any(start <= address and address + size <= start + length for start, length in self.ranges)


def page_stream(data: bytes) -> None:
    """Messages of a page link, each u8 type, u16 length, body."""
    messages, at = [], 0
    while at + 3 <= len(data):
        length = int.from_bytes(data[at + 1:at + 3], "little")
        messages.append((data[at], data[at + 3:at + 3 + length]))
        at += 3 + length
    receiver = PageReceiver(_Pages(messages), _Memory())  # type: ignore[arg-type]
    try:
        receiver.receive()
    except RgpuError:
        pass
    assert sum(map(len, receiver.received.pages.values())) <= len(messages) * 4096 * PAGE


def replay_stream(data: bytes) -> None:
    """The messages of a replay with bodies of their own; what is taken says the same again."""
    for read, write in ((wire.read_probe, wire.probe), (wire.read_probed, wire.probed), (wire.read_pong, wire.pong)):
        try:
            assert write(*read(data)) == data  # type: ignore[operator, arg-type]
        except RgpuError:
            pass
    for other in (wire.read_ping, wire.read_want, wire.read_replay):
        try:
            other(data)
        except RgpuError:
            pass


# -- seeds -----------------------------------------------------------------------------
def _recorded() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPORA.glob("*.rgpuj"))]


def _record_seeds() -> list[bytes]:
    short = pack(1, 2, b"\x10" * 8) + pack(2, 3, bytes(24), b"payload", 1, 2)
    return [b"\x07" + short, b"\xff" + short, *(b"\xff" + data[40:40 + MAX_INPUT - 1] for data in _recorded())]


def _argument_seeds() -> list[bytes]:
    found = {}
    for data in _recorded():
        reader = RecordReader()
        for record in reader.feed(data[struct.unpack_from("<I", data, 12)[0]:-40]):
            found[record.call_id] = struct.pack("<H", record.call_id) + bytes(record.args)
    return list(found.values())


def _state() -> SessionState:
    hashes = bytes(16) * pagehash.page_count(2 * PAGE)
    return SessionState(session="fuzz", epoch=1, position=3, hash_key=_KEY,
                        regions=[RegionState(1 << 45, 2 * PAGE, "mapped", hashes=hashes)], live=None, answers=[])


def _page_seeds() -> list[bytes]:
    import lz4.block

    def message(kind: int, body: bytes) -> bytes:
        return bytes([kind]) + len(body).to_bytes(2, "little") + body

    encode = msgspec.msgpack.encode
    def page(address: int, data: bytes, codec: int, stored: bytes) -> tuple[Any, bytes]:
        hashes = pagehash.hash_pages(data, _KEY)
        return page_frames.table([address], hashes, size=len(data), stored=len(stored), codec=codec), stored

    zeros = bytes(PAGE)
    begin = message(BEGIN, encode({"session": "fuzz", "move": "m", "hash_key": _KEY, "lanes": 0}))
    layout = message(LAYOUT, encode({"regions": [[1 << 45, 2 * PAGE, "mapped", 0], [1 << 44, 100, "global", 7]]}))
    packed = lz4.block.compress(zeros, store_size=False)
    parts = [page(1 << 45, zeros, ZERO, b""), page(1 << 44, b"page", RAW, b"page"),
             page((1 << 45) + PAGE, zeros, LZ4, packed)]
    body = page_frames.head(np.concatenate([entries for entries, _ in parts])) + b"".join(data for _, data in parts)
    pages = message(PAGES, body)
    asking = message(BEGIN, encode({"session": "fuzz", "move": "m", "hash_key": _KEY, "lanes": 0,
                                    "peer": Ask("boot", "cpu", "here", "there")}))
    run = np.array([(1 << 45, 2 * PAGE)], RUN_LAYOUT)
    known = plan.known({(1 << 45, 2 * PAGE): (np.array([1]), np.zeros((1, 2), np.uint64))})
    bare = SessionState(session="fuzz", epoch=1, position=3, hash_key=_KEY, live=None, answers=[],
                        regions=[RegionState(1 << 45, 2 * PAGE, "mapped")])
    pulled = [asking + layout + message(GRANT, plan.encode(Grant([(1 << 45, 2 * PAGE, 1)]))),
              asking + layout + message(PULL, plan.pull(run, True)),
              asking + layout + message(ROUND, encode({"round": 1, "known": known}))
              + message(STATE, b"\1" + bare.encode())]
    return [begin + layout + pages + message(ROUND, encode({"round": 1})) + message(STATE, b"\1" + _state().encode()),
            layout + pages, begin, *pulled]


def _live_seeds() -> list[bytes]:
    found = []
    for data in _recorded():
        live = LiveObjects()
        for record in RecordReader().feed(data[struct.unpack_from("<I", data, 12)[0]:-40]):
            if record.seq > 20:
                break
            live.apply(Record(record.seq, record.call_id, bytes(record.args), bytes(record.payload)[:200],
                              record.thread))
        found.append(msgspec.msgpack.encode(live.to_dict()))
    return found


def _journal_seeds() -> list[bytes]:
    path = _SCRATCH / f"seed-{os.getpid()}.rgpuj"
    path.unlink(missing_ok=True)
    with JournalFileWriter(path, "fuzz") as writer:
        writer.append(Record(1, 2, b"\x10" * 8))
    short = path.read_bytes()
    path.unlink()
    return [short, short[:-40], short[:-40] + bytes(64), *_recorded()]


def _manifest_seeds() -> list[bytes]:
    from tests.support.checkpoint.fake_device import FakeDevice  # noqa: F401 - checkpoints are made on it where the store's API allows

    return [_state().encode(), _signed(_state().encode())]


def _snapshot_seeds() -> list[bytes]:
    kept = [path.read_bytes() for path in sorted(CORPORA.glob("*.json"))]
    return [msgspec.json.encode(msgspec.json.decode(data)["snapshots"][2]) for data in kept]


def _answer_seeds() -> list[bytes]:
    return [head + path.read_bytes() for path in sorted(CORPORA.glob("*.answers")) for head in (b"", ANSWERS_HEAD)]


def _ahead_seeds() -> list[bytes]:
    seeds = []
    for seed in _live_seeds():
        live = LiveObjects.from_dict(msgspec.msgpack.decode(seed))
        made = ahead.of(live)
        encoded = made.encode()
        if len(encoded) < 1 << 16:
            shortened = msgspec.msgpack.encode(made.shorten(live.to_dict()))
            seeds.append(struct.pack("<H", len(encoded)) + encoded + shortened)
    return seeds


Target = tuple[Callable[[bytes], None], Callable[[], list[bytes]]]
TARGETS: dict[str, Target] = {
    "records": (records, _record_seeds), "arguments": (arguments, _argument_seeds),
    "journal_file": (journal_file, _journal_seeds), "answers": (answers, _answer_seeds),
    "graph_nodes": (graph_nodes, lambda: [bytes(8), struct.pack("<II", 1, 0), struct.pack("<IIIII", 1, 1, 5, 0, 0)]),
    "live_objects": (live_objects, _live_seeds), "objects_ahead": (objects_ahead, _ahead_seeds),
    "frames": (frames, lambda: [bytes(Sealer(_KEY, 0, 1, "fuzz").seal(1, [b"hello"])), bytes(64)]),
    "sealed_frames": (sealed_frames, lambda: [b"\2\0\0\0hello, world", b"\3\x40\0\1hello, world"]),
    "manifest": (manifest, _manifest_seeds), "session_state": (session_state, lambda: [_state().encode()]),
    "snapshot": (snapshot, _snapshot_seeds), "page_stream": (page_stream, _page_seeds),
    "replay_stream": (replay_stream, lambda: [wire.probe(1, 2, np.zeros(2, PROBE_ENTRY_LAYOUT)), wire.probed(1, 2, 1),
                                              msgspec.msgpack.encode([[1 << 45, [0, 3]]]),
                                              msgspec.msgpack.encode({"position": 7})]),
    **outside.TARGETS, **gangs.TARGETS,
}
