"""Journal files: round trip, torn tails, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.journal.journal_file import JournalFileReader, JournalFileWriter, decode_header, encode_header, verify
from rgpu.session.journal.record import Record, pack_record


def _record(seq: int, name: str, payload: bytes = b"", **values: object) -> Record:
    return Record(seq, BY_NAME[name].id, decoders.encode_args(name, **values), payload, thread=1)


def _records(first: int = 1) -> list[Record]:
    return [
        _record(first, "session_open", version=1, pid=7, environment=b"A=1\0"),
        _record(first + 1, "memcpy_h2d", b"x" * 5000, destination=1 << 45, stream=0),
        _record(first + 2, "completed", observed=first + 1),
    ]


def _write(path: Path, records: list[Record], close: bool = True) -> bytes:
    writer = JournalFileWriter(path, "run-1", records[0].seq if records else 1)
    for record in records:
        writer.append(record)
    if close:
        writer.close()
    else:
        writer.abandon()
    return path.read_bytes()


def _owned(path: Path) -> list[Record]:
    with JournalFileReader(path) as reader:
        return [Record(r.seq, r.call_id, bytes(r.args), bytes(r.payload), r.thread, r.flags) for r in reader]


def test_round_trip_and_report(tmp_path: Path) -> None:
    path = tmp_path / "j"
    _write(path, _records(40))
    assert path.stat().st_mode & 0o777 == 0o600
    assert _owned(path) == _records(40)
    report = verify(path)
    assert (report.session, report.first_seq, report.last_seq, report.records) == ("run-1", 40, 42, 3)
    assert report.complete and report.torn_offset is None and report.payload_bytes == 5000
    assert report.calls == {"completed": 1, "memcpy_h2d": 1, "session_open": 1}
    assert report.record_bytes == sum(len(pack_record(r)) for r in _records(40))
    assert report.as_dict()["complete"] is True


def test_empty_journal(tmp_path: Path) -> None:
    _write(tmp_path / "j", [])
    report = verify(tmp_path / "j")
    assert (report.records, report.first_seq, report.last_seq, report.complete) == (0, 1, 0, True)


def test_packed_pieces(tmp_path: Path) -> None:
    stream = b"".join(pack_record(r) for r in _records())
    with JournalFileWriter(tmp_path / "j", "s", 1) as writer:
        writer.append_packed((memoryview(stream)[:13], stream[13:]), 1, 3)
        with pytest.raises(ValueError):
            writer.append(_records(9)[0])
        writer.append(_record(4, "completed", observed=2))
    assert verify(tmp_path / "j").records == 4


def test_an_exception_leaves_no_trailer(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), JournalFileWriter(tmp_path / "j", "s") as writer:
        writer.append(_records()[0])
        raise RuntimeError
    report = verify(tmp_path / "j")
    assert not report.complete and report.records == 1 and report.torn_offset is None


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        JournalFileWriter(tmp_path / "j", "s")


def test_torn_anywhere(tmp_path: Path) -> None:
    path, torn = tmp_path / "j", tmp_path / "torn"
    whole = _write(path, _records())
    start = len(encode_header("run-1", 1))
    edges = [start]
    for record in _records():
        edges.append(edges[-1] + len(pack_record(record)))
    for size in [*range(start, start + 200), *range(edges[2] - 50, len(whole))]:
        torn.write_bytes(whole[:size])
        report = verify(torn)
        good = sum(edge <= size for edge in edges[1:])
        assert not report.complete and report.records == good
        rest = size - edges[good]
        assert (report.torn_offset, report.torn_bytes) == ((edges[good], rest) if rest else (None, 0))
    for size in range(start):
        torn.write_bytes(whole[:size])
        with pytest.raises(Corrupt) as caught:
            verify(torn)
        assert caught.value.detail["reason"] == "truncated"


def test_unwritten_blocks_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = _write(path, _records(), close=False)
    path.write_bytes(data + bytes(4096))
    report = verify(path)
    assert report.records == 3 and (report.torn_offset, report.torn_bytes) == (len(data), 4096)
    path.write_bytes(data + bytes(4096) + b"x")
    with pytest.raises(Corrupt):
        verify(path)


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    path, bad = tmp_path / "j", tmp_path / "bad"
    small = [_records()[0], _record(2, "memcpy_h2d", b"12345", destination=3, stream=0), _records()[2]]
    whole = _write(path, small)
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(data)
        with pytest.raises((Corrupt, VersionMismatch)):
            verify(bad)


def test_other_damage(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = _write(path, _records())
    for data, reason in [
        (whole + b"more", "magic"),
        (whole[:40] + whole[40 + len(pack_record(_records()[0])):], "sequence"),
        (whole[:-40] + pack_record(_record(9, "completed", observed=1)) + whole[-40:], "sequence"),
        (whole[:-40] + pack_record(_record(4, "completed", observed=1)) + whole[-40:], "trailer"),
        (whole[:-40] + pack_record(Record(4, 999, b"")), "unknown call"),
        (whole[:-40] + pack_record(Record(4, 2, b"1234567")), "8 bytes expected"),
        (whole[:-40] + pack_record(Record(4, 2, bytes(8), b"payload")), "payload"),
        (b"not a journal at all, but a text that is long enough", "magic"),
    ]:
        path.write_bytes(data)
        with pytest.raises(Corrupt) as caught:
            verify(path)
        assert caught.value.detail["reason"] == reason


@pytest.mark.parametrize(("session", "first"), [("", 1), ("x" * 256, 1), ("s", 0), ("s", 1 << 63)])
def test_impossible_headers(session: str, first: int) -> None:
    with pytest.raises(ValueError):
        encode_header(session, first)


def test_header_round_trip() -> None:
    for name in ("a", "seven77", "eight888", "ü" * 100):
        header = decode_header(encode_header(name, 12) + b"rest")
        assert (header.session, header.first_seq, header.size % 8) == (name, 12, 0)
