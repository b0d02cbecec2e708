"""Shared memory from a shim that cannot be trusted; the journal's keeping, spilling and releasing."""

from __future__ import annotations

import fcntl
import os
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.client.journal.cursor import Cursor
from rgpu.client.journal.keeping import Facts, decide, full_reason
from rgpu.client.journal.kept import Journal, Policy
from rgpu.client.journal.spill import write_segment
from rgpu.client.shim_link.local import NewSegment
from rgpu.client.shim_link.segments import MAX_LOG
from rgpu.session.errors import Corrupt, RgpuError
from rgpu.session.journal.journal_file import verify
from rgpu.session.journal.record import RecordReader
from tests.support.agent import fake_shim
from tests.support.agent.fake_shim import SEALS, FakeSegment

ARGS = struct.pack("<QQ", 0x2000_0000_0000, 0)  #: of memcpy_h2d


def offered(segment: FakeSegment) -> NewSegment:
    return NewSegment(segment.index, segment.kind, segment.size, os.dup(segment.fd))


def pair(policy: Policy | None = None, **sizes: int) -> tuple[Journal, fake_shim.Journal]:
    journal = Journal(policy or Policy())
    return journal, fake_shim.Journal(lambda segment: journal.offer(offered(segment)), **sizes)


def _facts(journal: Journal) -> Facts:
    return Facts(journal.memory_bytes, journal.kept_bytes, journal.last_seq, journal.protected,
                 spill_error=journal.spill_error)


def _full(journal: Journal) -> str:
    return full_reason(journal.policy.rules, _facts(journal))


def drain(journal: Journal, cursor: Cursor, limit: int = 1000) -> bytes:
    found = []
    while not journal.at_end(cursor):
        buffers = journal.take(cursor, limit)
        assert 0 < sum(len(buffer) for buffer in buffers) <= limit
        found += [bytes(buffer) for buffer in buffers]
    return b"".join(found)


def fill(shim: fake_shim.Journal, count: int, seed: int = 1) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.random()
        if kind < 0.1:
            shim.append("memcpy_h2d", ARGS, chance.randbytes(chance.randrange(1, 90_000)), external=True)
        elif kind < 0.3:
            shim.append("memcpy_h2d", ARGS, chance.randbytes(chance.randrange(0, 700)))
        else:
            shim.append("stream_synchronize", bytes(8), awaited=chance.random() < 0.2)


def test_the_stream_is_what_was_written_from_every_position() -> None:
    journal, shim = pair()
    fill(shim, 300)
    calls = journal.advance()
    assert [seq for seq, _, _ in calls] == list(range(1, 301))
    assert journal.last_seq == 300 and not journal.stalled
    assert drain(journal, journal.cursor(1)) == b"".join(shim.wire)
    for seq in (1, 2, 77, 150, 299, 300, 301):
        assert drain(journal, journal.cursor(seq), 777) == b"".join(shim.wire[seq - 1:])
    for seq in (0, 302):
        with pytest.raises(Corrupt):
            journal.cursor(seq)
    assert journal.total_bytes == journal.memory_bytes == sum(map(len, shim.wire))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 9), st.integers(1, 5000))
def test_a_cursor_follows_what_grows(parts: list[int], seed: int, limit: int) -> None:
    journal, shim = pair()
    cursor, got = journal.cursor(1), b""
    for number, part in enumerate(parts):
        fill(shim, part, seed + number)
        journal.advance()
        got += drain(journal, cursor, limit)
        assert journal.shipped(cursor) == journal.last_seq
    assert got == b"".join(shim.wire)
    assert [record.seq for record in RecordReader().feed(got)] == list(range(1, sum(parts) + 1))


def test_a_payload_segment_is_kept_until_the_log_that_refers_to_it_was_seen() -> None:
    """The first one is full, and closed, before the message about the log has been read."""
    offers: list[FakeSegment] = []
    journal, shim = Journal(Policy()), fake_shim.Journal(offers.append)
    for _ in range(3):
        shim.append("memcpy_h2d", ARGS, bytes(100_000), external=True)
    assert [segment.kind for segment in offers] == [1, 0, 1]
    for number, segment in enumerate(offers):
        journal.offer(offered(segment))
        calls = journal.advance()
        assert journal.released() == [] and len(calls) == (0, 2, 1)[number]
    assert drain(journal, journal.cursor(1)) == b"".join(shim.wire)


def test_without_recovery_what_was_applied_goes_back() -> None:
    journal, shim = pair()
    fill(shim, 400)
    journal.advance()
    cursor = journal.cursor(1)
    journal.applied(400, cursor)
    assert journal.released() == []  # nothing was shipped: nothing is dropped, whoever says what
    drain(journal, cursor)
    journal.applied(400, cursor)
    journal.advance()
    released = journal.released()
    assert shim.log is not None and shim.bulk is not None
    assert sorted(released) == sorted(set(range(shim.index)) - {shim.log.index, shim.bulk.index})
    assert journal.released() == []
    fill(shim, 50, 3)
    journal.advance()
    assert drain(journal, cursor) == b"".join(shim.wire[400:])


def test_with_recovery_only_a_binary_lets_go() -> None:
    journal, shim = pair(Policy(recover=True))
    fill(shim, 400)
    journal.advance()
    cursor = journal.cursor(1)
    drain(journal, cursor)
    journal.applied(400, cursor)
    assert journal.released() == [] and journal.first_seq == 1
    journal.cut(200, cursor)
    assert 100 < journal.first_seq <= 201
    assert drain(journal, journal.cursor(201)) == b"".join(shim.wire[200:])
    assert journal.released()
    with pytest.raises(Corrupt):
        journal.cursor(1)


def test_a_bulk_segment_that_may_still_be_written_is_kept() -> None:
    journal, shim = pair()
    shim.append("memcpy_h2d", ARGS, bytes(70_000), external=True)
    journal.advance()
    cursor = journal.cursor(1)
    drain(journal, cursor)
    journal.applied(1, cursor)
    journal.advance()
    assert journal.released() == []
    assert shim.bulk is not None and shim.log is not None
    shim.bulk.set(32, 1)
    journal.advance()
    journal.applied(1, cursor)
    assert journal.released() == [shim.bulk.index]


def test_spilled_calls_are_read_from_files(tmp_path: Path) -> None:
    journal, shim = pair(Policy(recover=True, limit=400_000, directory=tmp_path))
    fill(shim, 500)
    journal.advance()
    cursor = journal.cursor(1)
    journal.take(cursor, 100_001)  # in the middle of something
    before, rest = 100_001, b"".join(shim.wire)
    files = 0
    while (job := journal.spill_job()) is not None:
        assert journal.spill_job() is None, "one at a time"
        file, error = write_segment(job, "s/1")
        journal.spilled(job, file, error)
        files += 1
    assert files and journal.filed_bytes and journal.memory_bytes <= 200_000
    assert journal.kept_bytes == len(rest)
    assert journal.released(), "bulk memory goes back to the shim"
    assert drain(journal, cursor, 4096) == rest[before:]
    assert drain(journal, journal.cursor(1)) == rest
    assert drain(journal, journal.cursor(123)) == b"".join(shim.wire[122:])
    for path in tmp_path.iterdir():
        assert verify(path).complete
    assert verify(max(tmp_path.iterdir())).session == "s/1"
    journal.cut(500, cursor)
    assert list(tmp_path.iterdir()) == [] and journal.filed_bytes == 0


def test_what_is_left_of_a_segment_holds_all_of_it(tmp_path: Path) -> None:
    """The shim counts whole segments: the agent must act on what it counts, or the program waits for ever."""
    journal, shim = pair(Policy(recover=True, limit=100_000, directory=tmp_path))
    for _ in range(30):
        shim.append("memcpy_h2d", ARGS, bytes(3000), external=True)
    journal.advance()
    journal.cut(29, None)
    kept = journal.memory_bytes
    assert kept < 10_000 and journal.held_bytes == kept, "an open segment is closed by the shim when it waits"
    assert shim.bulk is not None and shim.log is not None
    shim.bulk.set(32, 1)
    journal.advance()
    assert journal.held_bytes > 90_000 and not journal.released()
    facts = Facts(journal.held_bytes, journal.held_bytes, kept_calls=1)
    assert decide(journal.policy.rules, facts).checkpoint and full_reason(journal.policy.rules, facts)
    job = journal.spill_job()
    assert job is not None, "the newest call cannot grow any more: it may go to a file"
    journal.spilled(job, *write_segment(job, "s"))
    assert journal.released() and journal.held_bytes < 1000


def test_a_cut_while_a_spill_is_under_way(tmp_path: Path) -> None:
    journal, shim = pair(Policy(recover=True, limit=1000, directory=tmp_path))
    fill(shim, 300)
    journal.advance()
    cursor = journal.cursor(1)
    drain(journal, cursor)
    job = journal.spill_job()
    assert job is not None
    bulks = {segment.index for run in job.runs for segment in run.segments if segment.kind == 1}
    journal.cut(300, cursor)
    assert bulks and not bulks & set(journal.released())
    assert shim.bulk is not None
    journal.spilled(job, *write_segment(job, "s"))
    assert bulks - {shim.bulk.index} <= set(journal.released())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_blocks_and_says_why(tmp_path: Path) -> None:
    journal, shim = pair(Policy(recover=True, limit=1000, directory=tmp_path / "missing"))
    fill(shim, 300)
    journal.advance()
    job = journal.spill_job()
    assert job is not None
    journal.spilled(job, *write_segment(job, "s"))
    assert "No such file" in _full(journal) and journal.spill_job() is None
    assert drain(journal, journal.cursor(1)) == b"".join(shim.wire)
    assert decide(journal.policy.rules, _facts(journal)).checkpoint
    journal.unprotect()
    assert "server has not taken" in _full(journal)


# -- hostile ------------------------------------------------------------------------


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_SHRINK])
def test_memory_that_could_shrink_is_refused(seals: int) -> None:
    with pytest.raises(Corrupt, match="sealed"):
        Journal(Policy()).offer(offered(FakeSegment(0, 0, 4096, 1, seals)))


def test_other_bad_offers() -> None:
    good = FakeSegment(0, 0, 8192, 1)
    for offer in (NewSegment(0, 0, 4096, os.dup(good.fd)), NewSegment(0, 2, 8192, os.dup(good.fd)),
                  NewSegment(1, 0, 8192, os.dup(good.fd)), NewSegment(0, 1, 8192, os.dup(good.fd)),
                  NewSegment(0, 0, MAX_LOG + 8, os.dup(good.fd)), NewSegment(0, 0, 64, os.dup(good.fd)),
                  NewSegment(0, 0, 8192, os.open("/dev/zero", os.O_RDONLY)),
                  NewSegment(0, 0, 8192, os.open("/dev", os.O_RDONLY))):
        with pytest.raises(Corrupt):
            Journal(Policy()).offer(offer)
        with pytest.raises(OSError):
            os.fstat(offer.fd)  # closed, not leaked
    sparse = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(sparse, 8192)
    fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(Corrupt, match="allocated"):
        Journal(Policy()).offer(NewSegment(0, 0, 8192, sparse))
    journal = Journal(Policy())
    journal.offer(offered(good))
    with pytest.raises(Corrupt, match="twice"):
        journal.offer(offered(good))


@pytest.mark.parametrize(("offset", "value"), [
    (24, 1 << 20), (24, 63), (24, 0), (24, 72), (24, (1 << 64) - 8), (32, 1), (64, 0), (72, 2), (70, 0x80),
    (84, 1 << 30), (88, 1 << 40), (88, 5000), (24, 64 + 41)])
def test_a_hostile_log(offset: int, value: int) -> None:
    journal, shim = pair()
    shim.append("stream_synchronize", bytes(8))
    assert shim.log is not None
    layout = {64: "<I", 70: "<H", 84: "<I"}.get(offset, "<Q")
    struct.pack_into(layout, shim.log.map, offset, value)
    with pytest.raises(Corrupt):
        journal.advance()


@pytest.mark.parametrize(("segment", "zero", "offset"), [(0, 0, 0), (1, 0, 1 << 40), (1, 0, 200_000), (1, 7, 64)])
def test_a_payload_outside_of_its_segment(segment: int, zero: int, offset: int) -> None:
    journal, shim = pair()
    shim.append("stream_synchronize", bytes(8))
    shim.append("memcpy_h2d", ARGS, bytes(100_000), external=True)
    assert shim.log is not None
    struct.pack_into("<IIQ", shim.log.map, shim.log.used - 16, segment, zero, offset)
    if segment == 0:
        journal.advance()  # a segment that was not announced (0 is a log): waited for
        assert journal.stalled and journal.last_seq == 1
    else:
        with pytest.raises(Corrupt):
            journal.advance()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_never_does_worse_than_corrupt(data: st.DataObject) -> None:
    journal, shim = pair(log_size=8192)
    fill(shim, 40, data.draw(st.integers(0, 5)))
    assert shim.log is not None
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, shim.log.size - 1))
        shim.log.map[at] = data.draw(st.integers(0, 255))
    try:
        journal.advance()
        cursor = journal.cursor(1)
        stream = drain(journal, cursor, 100_000)
        shim.log.map[64:] = bytes(shim.log.size - 64)  # changed behind our back
        assert len(drain(journal, journal.cursor(1), 100_000)) == len(stream)
        journal.cursor(journal.last_seq)
    except RgpuError:
        pass
    journal.close(keep_files=False)
