"""CUPTI's records as a worker keeps them: which library, which clock, what is kept for how long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

pytest.importorskip("cuda.bindings.driver")

from rgpu.server.device.cuda.times import activity  # noqa: E402
from rgpu.server.device.cuda.times.activity import Activity, libraries  # noqa: E402

AHEAD = 1_000_000_000_000  #: ns that CUPTI's clock is ahead


class Engine:
    """The engine's functions for CUPTI."""

    def __init__(self, why: str = "", refuses: int = 0) -> None:
        self.why, self.refuses = why, refuses
        self.opened: list[str] = []
        self.recorded: list[int] = []
        self.work: list[tuple[int, int, int]] = []  #: (correlation, start, end) on the monotonic clock

    def activity_open(self, path: bytes, why: Any, size: int) -> int:
        self.opened.append(path.decode())
        why.value = self.why.encode()
        return not self.why

    def activity_record(self, on: int) -> int:
        self.recorded.append(on)
        return self.refuses if on else 0

    def activity_now(self) -> int:
        return time.monotonic_ns() + AHEAD

    def activity_collect(self, out: Any, room: int) -> int:
        given, self.work = self.work[:room], self.work[room:]
        for at, (correlation, start, end) in enumerate(given):
            out[at].correlation, out[at].start, out[at].end = correlation, start + AHEAD, end + AHEAD
        return len(given)


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "libcupti.so.13"
    path.touch()
    monkeypatch.setenv("RGPU_CUPTI", str(path))
    monkeypatch.setattr(activity, "COLLECT", 0.0)
    return path


def collected(engine: Engine) -> Activity:
    found = Activity(engine)  # type: ignore[arg-type]
    assert found.record()
    found.collect()
    return found


def test_a_call_has_all_of_its_work_on_our_clock() -> None:
    engine = Engine()
    engine.work = [(7, 1_000_000, 2_000_000), (8, 5, 6), (7, 1_500_000, 9_000_000)]
    found = collected(engine).take(7, 0.0)
    assert found is not None
    assert abs(found[0] - 1_000_000) < 500_000 and found[1] - found[0] == 8_000_000


def test_what_was_collected_before_the_work_was_complete_does_not_count() -> None:
    engine = Engine()
    engine.work = [(7, 1, 2)]
    known = collected(engine)
    complete = time.monotonic()
    assert known.take(7, complete) is None
    known.collect()
    assert known.take(7, complete) is not None and known.take(7, complete) is None


def test_records_that_nobody_takes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "KEPT", 100)
    engine = Engine()
    engine.work = [(number, 1, 2) for number in range(activity.ROOM + 500)]
    known = collected(engine)
    assert not engine.work
    assert known.take(0, 0.0) is None and known.take(activity.ROOM + 499, 0.0) is not None


@pytest.mark.parametrize("engine, event", [(Engine(why="no such symbol"), "cupti.not_loaded"),
                                           (Engine(refuses=39), "cupti.refused")])
def test_a_library_that_does_not_serve_is_not_tried_again(engine: Engine, event: str, library: Path) -> None:
    with capture_logs() as logs:
        found = Activity(engine)  # type: ignore[arg-type]
        assert not found.record() and not found.record()
    assert event in [line["event"] for line in logs]
    assert engine.opened == [str(library)] and engine.recorded in ([], [1])


def test_it_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    known = collected(engine)
    known.rest()
    assert engine.recorded == [1]
    monkeypatch.setattr(activity, "IDLE", 0.0)
    known.rest()
    known.stop()
    assert engine.recorded == [1, 0] and known.record() and engine.recorded == [1, 0, 1]


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    assert list(libraries()) == [library]
    monkeypatch.setenv("RGPU_CUPTI", "off")
    assert not list(libraries())
    monkeypatch.delenv("RGPU_CUPTI")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    found = [str(path) for path in libraries()]
    assert "/opt/cuda/extras/CUPTI/lib64/libcupti.so.13" in found
    assert not any("rgpu/client" in path for path in found), "the client's own library is none"
