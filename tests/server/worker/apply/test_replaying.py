"""Recorded sessions replayed: what they hold and answer has not changed since they were recorded.

The corpora under tests/session/corpora are recordings of the example programs
(`rgpu run --record`), with the digests of what a replay of each held at some
positions. A difference means that a session recorded or stored before would be
brought back as another one. ``python -m tests.server.worker.apply.test_replaying`` writes
the digests anew: only after a change that is meant to make them differ;
``python -m tests.session.record_corpora`` records all of it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.checkpoint.session.snapshot import Snapshot, compare, of_checkpoint
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore
from rgpu.server.device.spec import make_device
from rgpu.server.worker.apply.replaying import Replay, Replayed
from rgpu.session.answers import BLAKE3, XXH3, XXH3_LEAVES
from rgpu.session.errors import Corrupt, RecoveryFailed, VersionMismatch
from rgpu.session.journal.journal_file import JournalFileWriter
from rgpu.session.journal.record import Record
from rgpu.session.journal.recording import ANSWERS_HEAD, HEADS, RecordedAnswers, Recording, answer_line, parse_answers

CORPORA = Path(__file__).parents[3] / "session" / "corpora"
NAMES = sorted(path.stem for path in CORPORA.glob("*.rgpuj"))
MEMORY = 256 << 20


def positions(recording: Recording) -> list[int]:
    """Four within, spread over the session; the end comes by itself."""
    last = recording.verify().last_seq
    return [last * part // 5 for part in range(1, 5)]


def replay(path: Path, at: list[int] | None = None, device: str = "cpu:0", checkpoint: tuple[Path, str] | None = None
           ) -> Replayed:
    recording = Recording(path)
    made = make_device(device, MEMORY)
    try:
        replaying = Replay(recording, made)
        done = replaying.run(positions(recording) if at is None else at)
        if checkpoint is not None:
            replaying.write_checkpoint(*checkpoint)
        return done
    finally:
        made.close()


def facts(done: Replayed) -> dict[str, Any]:
    return {"session": done.session, "position": done.position, "answers": done.answers, "error": done.error,
            "answers_digest": done.answers_digest,
            "snapshots": [json.loads(found.encode()) for found in done.snapshots]}


@pytest.fixture(scope="module")
def replayed() -> Iterator[dict[str, Replayed]]:
    yield {}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_session_is_the_same_today(name: str, replayed: dict[str, Replayed]) -> None:
    done = replayed[name] = replay(CORPORA / f"{name}.rgpuj")
    assert done.divergences == [] and done.answers_compared >= 3, "the answers that the program was given"
    kept = json.loads((CORPORA / f"{name}.json").read_text())
    for now, before in zip(done.snapshots, kept["snapshots"], strict=True):
        found = compare(Snapshot.decode(json.dumps(before).encode()), now)
        assert found.equal, found
        assert now.position < done.position or found.pages == 0, "the program gave everything back"
    assert any(region["pages"] for region in kept["snapshots"][2]["regions"]), "nothing was compared"
    assert facts(done) == kept


def test_corpora_are_there() -> None:
    assert set(NAMES) == {"heat", "numba_life", "cudart_saxpy"}
    assert all((CORPORA / f"{name}.rgpuj").stat().st_size < 64 << 10 for name in NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_replays_it_alike(name: str) -> None:
    """Every page and object of the cpu device's replay, on cuda:0. Addresses of module variables are the device's."""
    kept = json.loads((CORPORA / f"{name}.json").read_text())
    done = replay(CORPORA / f"{name}.rgpuj", device="cuda:0")
    assert done.error == 0, done.error_detail
    for now, before in zip(done.snapshots, kept["snapshots"], strict=True):
        found = compare(Snapshot.decode(json.dumps(before).encode()), now)
        assert not found.pages_differing and not found.objects, f"position {now.position}: {found}"


def test_a_changed_payload_is_found_where_it_went(tmp_path: Path) -> None:
    """One bit of one copy: diff names the page, and the later answers diverge."""
    source, changed = CORPORA / "heat.rgpuj", tmp_path / "heat.rgpuj"
    payloads = 0
    with JournalFileWriter(changed, "heat") as writer:
        for record in Recording(source):
            payload = bytes(record.payload)
            if len(payload) == 24 * 24 * 8:  # the plate at its start
                payloads += 1
                payload = payload[:-1] + bytes([payload[-1] ^ 0x40])  # 0.0 becomes 2.0
            writer.append(Record(record.seq, record.call_id, bytes(record.args), payload, record.thread, record.flags))
    (tmp_path / "heat.answers").write_bytes((CORPORA / "heat.answers").read_bytes())
    assert payloads == 1
    was, now = replay(source, [23]), replay(changed, [23])
    assert was.divergences == []
    found = compare(was.snapshots[0], now.snapshots[0])
    assert not found.equal and found.first_page is not None and found.objects == [] and found.regions == []
    assert found.first_page["address"] & ~0xFFFF == found.first_page["address"] and found.pages_differing >= 1
    assert now.divergences and now.divergences[0].call == "memcpy_d2h"


def test_objects_are_compared(tmp_path: Path) -> None:
    """A stream less, another position: both are named."""
    done = replay(CORPORA / "heat.rgpuj", [22, 23])
    before, after = done.snapshots[0], done.snapshots[1]
    assert not compare(before, after).equal, "positions differ"
    objects = {name: digest for name, digest in after.objects.items() if not name.startswith("stream")}
    found = compare(after, Snapshot(session="heat", position=23, regions=after.regions, objects=objects))
    assert found.objects and all("only in A" in line and line.startswith("stream") for line in found.objects)
    fewer = Snapshot(session="heat", position=23, regions=after.regions[1:], objects=after.objects)
    assert compare(after, fewer).regions == [f"mapped range {after.regions[0].address:#x}+{after.regions[0].size:#x} "
                                             "is only in A"]


def test_a_checkpoint_of_the_end_compares_equal(tmp_path: Path) -> None:
    """Stop before memory is given back: the checkpoint written there holds what the replay holds."""
    cut = tmp_path / "cut.rgpuj"
    with JournalFileWriter(cut, "heat") as writer:
        for record in Recording(CORPORA / "heat.rgpuj"):
            if record.seq <= 55:
                writer.append(Record(record.seq, record.call_id, bytes(record.args), bytes(record.payload),
                                     record.thread, record.flags))
    done = replay(cut, [], checkpoint=(tmp_path / "store", "end"))
    with DirectoryStore(tmp_path / "store").open("end") as checkpoint:
        found = compare(done.snapshots[-1], of_checkpoint(checkpoint))
    assert found.equal and found.pages > 1, found


def test_a_journal_without_its_beginning_is_refused(tmp_path: Path) -> None:
    with JournalFileWriter(tmp_path / "late.rgpuj", "late", 7):
        pass
    device = make_device("cpu:0", MEMORY)
    try:
        with pytest.raises(RecoveryFailed, match="begins with position 7"):
            Replay(Recording(tmp_path / "late.rgpuj"), device)
    finally:
        device.close()


def test_files_that_follow_one_another_are_one_recording(tmp_path: Path) -> None:
    records = [Record(r.seq, r.call_id, bytes(r.args), bytes(r.payload), r.thread, r.flags)
               for r in Recording(CORPORA / "cudart_saxpy.rgpuj")]
    for first, last in ((0, 10), (10, 11), (11, len(records))):
        with JournalFileWriter(tmp_path / f"{first:04d}.rgpuj", "cudart_saxpy", first + 1) as writer:
            for record in records[first:last]:
                writer.append(record)
    report = Recording(tmp_path).verify()
    assert (report.records, report.last_seq, len(report.files)) == (len(records), len(records), 3)
    assert [record.seq for record in Recording(tmp_path)] == list(range(1, len(records) + 1))
    (tmp_path / "0010.rgpuj").unlink()
    with pytest.raises(Corrupt, match="begins with position 12, where 11 should be"):
        Recording(tmp_path).verify()
    with pytest.raises(Corrupt, match="begins with position 12, where 11 should be"):
        list(Recording(tmp_path))


def test_answers_are_read_strictly() -> None:
    one, two = answer_line(3, bytes(16)), answer_line(4, bytes(range(16)))
    assert parse_answers(one + two[:-3]) == RecordedAnswers(BLAKE3, {3: bytes(16)}), "of an old recording; a torn line"
    assert parse_answers(ANSWERS_HEAD + one + two[:-3]) == RecordedAnswers(XXH3_LEAVES, {3: bytes(16)})
    assert parse_answers(b"rgpu answers 2 xxh3-128\n" + one) == RecordedAnswers(XXH3, {3: bytes(16)})
    for bad in (b"\n", one + one, b"0 " + b"0" * 32 + b"\n", one.upper().replace(b"0", b"A"), b"3 00\n", b"x\n"):
        for head in (b"", *HEADS):
            with pytest.raises(Corrupt):
                parse_answers(head + bad)
    with pytest.raises(VersionMismatch, match="begins with b'rgpu answers 3 sum"):
        parse_answers(b"rgpu answers 3 sum\n" + one)
    assert parse_answers(ANSWERS_HEAD[:-3]) == parse_answers(ANSWERS_HEAD) == RecordedAnswers()


@pytest.mark.parametrize("change", [{"snapshot": 2}, {"position": -1}, {"regions": [
    {"address": 0, "size": 65536, "kind": "mapped", "owner": 0, "name": "", "pages": "00"}]}, {"regions": 3}])
def test_hostile_snapshots_are_refused(change: dict[str, Any]) -> None:
    good = {"snapshot": 1, "session": "s", "position": 3, "regions": [], "objects": {}}
    Snapshot.decode(json.dumps(good).encode())
    with pytest.raises(Corrupt):
        Snapshot.decode(json.dumps({**good, **change}).encode())


def write_digests() -> None:
    """What a replay of each corpus gives today becomes what it must give."""
    for each in NAMES:
        (CORPORA / f"{each}.json").write_text(json.dumps(facts(replay(CORPORA / f"{each}.rgpuj"))) + "\n")


if __name__ == "__main__":
    write_digests()
