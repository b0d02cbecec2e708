"""A worker writes down what it applies and answers, in order; and takes a higher epoch when an operator says so."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from rgpu.link import effects as writing
from rgpu.server.device.spec import make_device
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.main import Worker
from rgpu.session.effects import Kind, unpack
from rgpu.session.errors import Fenced
from rgpu.session.journal.record import pack_record
from rgpu.session.journal.recording import Recording
from tests.support.effects.check import check

CORPUS = Path(__file__).parents[2] / "session" / "corpora" / "cudart_saxpy.rgpuj"
MEMORY = 64 << 20


class Link:
    """What an agent's link is to its worker."""

    def __init__(self, runtime: SessionRuntime) -> None:
        self.runtime = runtime
        self.said: list[tuple[str, int]] = []
        self.finished = False

    def notice(self, kind: str, **values: Any) -> None:
        self.said.append((kind, self.runtime.epoch))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(writing, "_FOLDER", str(tmp_path))
    device = make_device("cpu:0", MEMORY)
    made = Worker("s", 3, device, "running", host="node-a")
    yield made
    device.close()


def written(folder: Path) -> Any:
    (path,) = folder.glob("worker-node~a-s-*.effects")
    history = unpack(path.read_bytes())
    assert history is not None
    return history


def test_a_recorded_session_leaves_no_gap(worker: Worker, tmp_path: Path) -> None:
    runtime, answers = worker.runtime, queue.SimpleQueue[int]()

    def deliver(seq: int, *_: Any) -> None:
        runtime.answering(seq)
        answers.put(seq)

    runtime.attach(deliver, 0)
    recording = Recording(CORPUS)
    wanted = set(recording.answers().digests)
    data = b"".join(pack_record(record) for record in recording)
    take = runtime.open_stream()
    for at in range(0, len(data), 700):  # cut anywhere
        take(data[at:at + 700])
    while wanted:
        wanted.discard(answers.get(timeout=20))
    runtime.effect(Kind.OVER, "ended")
    history = written(tmp_path)
    assert check([history], []) == []
    last = runtime.applied
    applied = [effect for effect in history.effects if effect.kind is Kind.APPLIED]
    assert applied[0].first == 1 and applied[-1].last == last and 1 < len(applied) < last
    assert [effect.first for effect in history.effects if effect.kind is Kind.OVER] == [last]
    position = 0
    for effect in history.effects:
        position = effect.last if effect.kind is Kind.APPLIED else position
        assert effect.kind is not Kind.ANSWERED or effect.first <= position, "an answer before its call"


def test_an_operator_raises_the_epoch(worker: Worker, tmp_path: Path) -> None:
    link = worker.link = Link(worker.runtime)  # type: ignore[assignment]
    worker.do_adopt(7)
    assert link.said == [("moved", 3)] and link.finished, "the agent hears it at the epoch that it knows"  # type: ignore[attr-defined]
    assert (worker.runtime.epoch, worker.state, worker.link) == (7, "running", None)
    for epoch in (7, 6):
        with pytest.raises(Fenced, match="cannot serve epoch"):
            worker.do_adopt(epoch)
    worker.runtime.pause()
    worker.state = "paused"
    worker.do_adopt(9)
    assert (worker.state, worker.runtime.paused) == ("running", False), "what a move had offered goes on"
    worker.state = "incoming"
    with pytest.raises(Fenced):
        worker.do_adopt(11)
    assert [(e.kind, e.epoch) for e in written(tmp_path).effects] == [
        (Kind.BEGUN, 3), (Kind.ACTIVE, 7), (Kind.RESUMED, 9), (Kind.ACTIVE, 9)]
