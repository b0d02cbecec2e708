"""The journal record: round trips cut anywhere, and everything that must be refused."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import (
    AWAITED,
    EXTERNAL,
    HEADER,
    HEADER_SIZE,
    MAX_ARGS,
    MAX_PAYLOAD,
    Record,
    RecordReader,
    pack,
    pack_record,
)

blobs = st.binary(max_size=70)
bodies = st.lists(
    st.tuples(st.integers(1, 60), blobs, st.one_of(st.just(b""), st.binary(max_size=300)), st.integers(0, 9),
              st.sampled_from([0, AWAITED])), max_size=8)


def _records(items: list[tuple[int, bytes, bytes, int, int]], first: int = 1) -> list[Record]:
    return [Record(first + n, call, args, payload, thread, flags)
            for n, (call, args, payload, thread, flags) in enumerate(items)]


def _read(pieces: list[bytes], reader: RecordReader | None = None) -> list[Record]:
    reader = reader or RecordReader()
    return [record for piece in pieces for record in reader.feed(piece)]


@given(bodies, st.lists(st.integers(0, 3000), max_size=12))
def test_round_trip_cut_anywhere(items: list[tuple[int, bytes, bytes, int, int]], cuts: list[int]) -> None:
    records = _records(items)
    stream = b"".join(pack_record(record) for record in records)
    assert len(stream) % 8 == 0
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    reader = RecordReader(next_seq=1)
    assert _read(pieces, reader) == records
    assert reader.offset == len(stream) and not reader.pending
    reader.finish()


def test_byte_by_byte() -> None:
    records = _records([(14, b"abc", b"payload", 1, 0), (2, b"", b"", 0, AWAITED), (23, bytes(9), bytes(1000), 3, 0)])
    stream = b"".join(pack_record(record) for record in records)
    assert _read([bytes([byte]) for byte in stream]) == records


def test_views_are_not_copied() -> None:
    data = pack(1, 14, b"arguments", b"payload")
    (record,) = _read([data])
    assert isinstance(record.args, memoryview) and record.args.obj is data
    assert isinstance(record.payload, memoryview) and record.payload.obj is data


def test_every_flipped_bit_is_refused() -> None:
    good = pack(7, 14, b"argument bytes", b"some payload", 2, AWAITED) + pack(8, 2, bytes(8))
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        reader = RecordReader()
        with pytest.raises(Corrupt) as caught:
            _read([bytes(bad)], reader)
            reader.finish()
        assert caught.value.detail["reason"]
        assert caught.value.detail["offset"] in (0, len(good) - 48)
        with pytest.raises(Corrupt):  # and it stays so
            list(reader.feed(good))


def test_a_record_before_the_damage_is_still_given() -> None:
    reader = RecordReader()
    found = reader.feed(pack(1, 2, bytes(8)) + b"x" * 64)
    assert next(found).seq == 1
    with pytest.raises(Corrupt) as caught:
        next(found)
    assert caught.value.detail["offset"] == 48 and caught.value.detail["reason"] == "magic"


def test_truncation_everywhere() -> None:
    good = pack(1, 14, b"abc", b"payload")
    for size in range(1, len(good)):
        reader = RecordReader()
        assert _read([good[:size]], reader) == []
        assert reader.pending == size
        with pytest.raises(Corrupt) as caught:
            reader.finish()
        assert caught.value.detail["reason"] == "truncated"


def _forge(seq: int = 1, flags: int = 0, args_len: int = 0, payload_len: int = 0, payload_crc: int = 0) -> bytes:
    """A header with a good checksum over whatever it says."""
    prefix = HEADER.pack(0x4C434752, 2, flags, seq, 0, args_len, payload_len, payload_crc, 0)[:-4]
    return prefix + zlib.crc32(prefix).to_bytes(4, "little")


@pytest.mark.parametrize(("forged", "reason"), [
    (_forge(args_len=MAX_ARGS + 1), "length"),
    (_forge(args_len=0xFFFFFFFF), "length"),
    (_forge(payload_len=MAX_PAYLOAD + 1), "length"),
    (_forge(payload_len=(1 << 64) - 1), "length"),
    (_forge(flags=EXTERNAL), "flags"),
    (_forge(flags=0x8000), "flags"),
    (_forge(seq=0), "sequence"),
    (_forge(payload_crc=1), "payload checksum"),
])
def test_absurd_headers(forged: bytes, reason: str) -> None:
    with pytest.raises(Corrupt) as caught:
        _read([forged])
    assert caught.value.detail["reason"] == reason


def test_a_claimed_length_allocates_nothing() -> None:
    reader = RecordReader()
    assert _read([_forge(payload_len=MAX_PAYLOAD), bytes(100)], reader) == []
    assert reader.pending == HEADER_SIZE + 100
    # a bad header is refused without waiting for the payload that it claims
    with pytest.raises(Corrupt):
        _read([_forge(payload_len=MAX_PAYLOAD)[:-1] + b"\xff"])


def test_gap_in_the_sequence() -> None:
    stream = pack(5, 2, bytes(8)) + pack(7, 2, bytes(8))
    assert len(_read([stream])) == 2
    with pytest.raises(Corrupt) as caught:
        _read([stream], RecordReader(next_seq=5))
    assert caught.value.detail["reason"] == "sequence" and caught.value.detail["offset"] == 48
    with pytest.raises(Corrupt):
        _read([stream], RecordReader(next_seq=4))


@pytest.mark.parametrize("wrong", [{"seq": 0}, {"flags": EXTERNAL}, {"args": bytes(MAX_ARGS + 1)}])
def test_pack_refuses_what_no_reader_takes(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        pack(**{"seq": 1, "call_id": 2, "args": b"", **wrong})  # type: ignore[arg-type]
