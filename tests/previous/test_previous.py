"""Records, checkpoints and journals of earlier versions of the package are read by this one, and mean what they
meant.
"""

from __future__ import annotations

import queue
import re
from typing import Any

import msgspec
import pytest

from rgpu.checkpoint.manifest import cut
from rgpu.migrate.records.schema import SessionRecord, decode, encode
from rgpu.server.device.spec import make_device
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.answers import answer_digest
from tests.support.previous import FOLDER, SESSION, VERSIONS, Previous

MEMORY = 256 << 20


class Here:
    """A worker's runtime without its process; answers are kept."""

    def __init__(self, previous: Previous) -> None:
        self.device = make_device("cpu:0", MEMORY)
        self.runtime = SessionRuntime(SESSION, 1, self.device)
        self.previous = previous
        self._answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self.given: dict[int, bytes] = {}

    def deliver(self, seq: int, result: int, reply: bytes, payload: Any) -> None:
        self._answers.put((seq, answer_digest(result, reply, payload, self.previous.kind)))

    def serve(self, until: int) -> None:
        """Apply the calls up to there, and have the answers of all that the program was answered."""
        runtime = self.runtime
        for answer in runtime.attach(self.deliver, len(self.previous.calls)):
            self.deliver(*answer)
        wanted = {seq for seq in self.previous.answers if runtime.applied < seq <= until}
        runtime.open_stream()(b"".join(self.previous.calls[runtime.applied:until]))
        while wanted - set(self.given):
            seq, digest = self._answers.get(timeout=20)
            self.given[seq] = digest
        assert runtime.applied == until


@pytest.fixture(params=VERSIONS)
def previous(request: pytest.FixtureRequest) -> Previous:
    return Previous.load(request.param)


def test_there_is_one() -> None:
    assert "v0.1.0" in VERSIONS


def test_its_record_is_read_and_written(previous: Previous) -> None:
    record = previous.record
    assert (record.name, record.state, record.v) == (SESSION, "running", 1) and record.live
    assert 0 < previous.position < len(previous.calls) and record.usable_checkpoints == [record.checkpoint]
    assert previous.record.journal_from <= previous.position
    changed = record.replace(epoch=record.epoch + 1, state="recovering")
    was, now = (msgspec.msgpack.decode(data) for data in ((previous.folder / "record").read_bytes(), encode(record)))
    assert encode(changed) and _has(now, was), "nothing of it is lost"
    assert decode(encode(record), SessionRecord, SESSION) == record


def _has(now: Any, was: Any) -> bool:
    """Whether what was written stands in what is written now, which may have further fields."""
    if isinstance(was, dict):
        return isinstance(now, dict) and all(name in now and _has(now[name], was[name]) for name in was)
    if isinstance(was, list):
        return isinstance(now, list) and len(now) == len(was) and all(map(_has, now, was))
    return bool(now == was)


def test_its_checkpoint_is_whole(previous: Previous) -> None:
    assert previous.record.checkpoint is not None
    counts = previous.store().verify(previous.record.checkpoint.name)
    assert counts["pages"] >= 1


def test_it_is_restored_served_and_moved(previous: Previous) -> None:
    """From the checkpoint the session goes on by its journal, is cut in the middle, and goes on in another worker."""
    assert previous.record.checkpoint is not None
    last, first = len(previous.calls), Here(previous)
    try:
        with previous.store().open(previous.record.checkpoint.name) as checkpoint:
            first.runtime.restore(checkpoint.state, checkpoint.pages())
        assert first.runtime.applied == previous.position
        middle = (previous.position + last) // 2
        first.serve(middle)
        first.runtime.quiesce(10.0)
        runtime = first.runtime
        state = cut.take(runtime.device, session=SESSION, epoch=1, position=runtime.applied, hash_key=runtime.hash_key,
                         live=runtime.objects(), answers=runtime.answers())
        pages = [(page.region.address, page.index, page.data) for page in cut.pages(runtime.device, state)]
    finally:
        first.device.close()  # a process has one device at a time at these addresses
    second = Here(previous)
    try:
        second.runtime.restore(state, pages)
        second.serve(last)
    finally:
        second.device.close()
    given = {**first.given, **second.given}
    served = {seq: digest for seq, digest in previous.answers.items() if seq > previous.position}
    assert {seq: given[seq] for seq in served} == served and len(served) > 5


def test_no_recording_holds_a_path_of_the_machine_that_made_it() -> None:
    found = {path.relative_to(FOLDER) for path in FOLDER.glob("v*/**/*") if path.is_file()
             and re.search(rb"/(home|root|work|tmp|build|Users)/", path.read_bytes())}
    assert not found
