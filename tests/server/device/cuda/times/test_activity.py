"""CUPTI in a worker: which library, for how long it records. What its records say: ``timing_cases.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

pytest.importorskip("cuda.bindings.driver")

from rgpu.server.device.cuda.times import activity  # noqa: E402
from rgpu.server.device.cuda.times.activity import Activity, libraries  # noqa: E402


class Engine:
    """The engine's functions for CUPTI."""

    def __init__(self, why: str = "", refuses: int = 0) -> None:
        self.why, self.refuses = why, refuses
        self.opened: list[str] = []
        self.recorded: list[int] = []
        self.work: dict[int, tuple[int, int]] = {}  #: (start, end) by correlation, ns
        self.complete = 0

    def activity_open(self, path: bytes, why: Any, size: int) -> int:
        self.opened.append(path.decode())
        why.value = self.why.encode()
        return not self.why

    def activity_record(self, on: int) -> int:
        self.recorded.append(on)
        return self.refuses if on else 0

    def activity_take(self, correlation: int, complete: int, start: Any, end: Any) -> int:
        self.complete = complete
        if correlation not in self.work:
            return 0
        start._obj.value, end._obj.value = self.work[correlation]
        return 1


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "libcupti.so.13"
    path.touch()
    monkeypatch.setenv("RGPU_CUPTI", str(path))
    return path


def test_when_the_work_was_done_and_when_it_was_complete() -> None:
    engine = Engine()
    engine.work[7] = (1_000_000, 9_000_000)
    known = Activity(engine)  # type: ignore[arg-type]
    assert known.take(8, 2.5) is None and engine.complete == 2_500_000_000
    assert known.take(7, 0.0) == (1_000_000, 9_000_000)


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
    known = Activity(engine)  # type: ignore[arg-type]
    assert known.record()
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
