"""When the GPU did the work of calls, many of them under way in several streams."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rgpu.server.device.cuda.times import activity, timing
from rgpu.session.objects.spans import CALL
from tests.support.fake_driver.support import ADD_ONE, BASE, BINARY, RECORDED, SIZE, WAIT_FLAG, cupti, device

__all__ = ["cupti", "device"]

MODULE, STREAMS, CALLS = 17, (18, 19, 20), 300


class Timed:
    """Timed launches on a device, and what was answered."""

    def __init__(self, device: Any) -> None:
        self.device, self.told, self._here = device, {}, threading.Lock()  # type: ignore[var-annotated]
        device.map(BASE, SIZE)
        device.allocate(BASE, SIZE)
        device.load(MODULE, BINARY, b"", False)
        for stream in STREAMS:
            device.create_stream(stream, 16, 1, 0)

    def launch(self, seq: int, function: int, parameters: bytes, stream: int) -> None:
        self.device.timed(seq, stream, partial(
            self.device._work.call, "launch", seq, module=MODULE, function=function, grid_x=1, grid_y=1, grid_z=1,
            block_x=1, block_y=1, block_z=1, shared=0, flags=0, stream=stream, parameters=parameters,
            attributes=b""), partial(self._done, seq))

    def add_one(self, seq: int, stream: int = STREAMS[0]) -> None:
        self.launch(seq, ADD_ONE, struct.pack("<QI", BASE + 64 * stream, 4), stream)

    def _done(self, seq: int, result: int, spans: Any, data: Any) -> None:
        with self._here:
            self.told[seq] = result, spans, time.monotonic_ns()

    def length(self, seq: int) -> int:
        result, (span,), _ = self.told[seq]
        assert not result
        return int(span.end - span.start)

    def wait(self, seconds: float, until: Callable[[], Any]) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)


@pytest.mark.parametrize("recorded", [False, True])
def test_each_call_has_its_time_and_a_stream_its_order(device: Any, recorded: bool,
                                                       request: pytest.FixtureRequest) -> None:
    if recorded:
        request.getfixturevalue("cupti")
    timed = Timed(device)
    begun = time.monotonic_ns()
    for seq in range(1, CALLS + 1):
        timed.add_one(seq, STREAMS[seq % len(STREAMS)])
    assert device.drain(20) and sorted(timed.told) == list(range(1, CALLS + 1))
    for stream in STREAMS:
        ended = 0
        for seq in (seq for seq in timed.told if STREAMS[seq % len(STREAMS)] == stream):
            result, (span,), answered = timed.told[seq]
            assert not result and span.kind == CALL
            assert begun <= span.start + 1_000_000 and span.end <= answered + 1_000_000
            assert ended <= span.start < span.end, seq
            ended = span.start
    assert bytes(device.read(BASE + 64 * STREAMS[0], 4)) == struct.pack("<I", CALLS // len(STREAMS))
    lengths = [timed.length(seq) for seq in timed.told]
    assert all(length == RECORDED for length in lengths) if recorded else RECORDED not in lengths


def test_it_records_only_while_calls_are_timed(device: Any, cupti: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activity, timing):
        monkeypatch.setattr(module, "IDLE", 0.2)
    timed = Timed(device)
    assert not cupti.fake_cupti_records()
    for seq in (1, 2):
        timed.add_one(seq)
        assert cupti.fake_cupti_records() and device.drain(20) and timed.length(seq) == RECORDED
        timed.wait(20, lambda: not cupti.fake_cupti_records())


def test_what_is_not_recorded_is_timed_by_events(device: Any, cupti: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that CUPTI lost are waited for now and then, not for each call."""
    monkeypatch.setattr(timing, "AGAIN", 0.1)
    timed = Timed(device)
    cupti.fake_cupti_lose(1)
    for seq in range(1, 101):
        timed.add_one(seq)
    assert device.drain(10) and len(timed.told) == 100
    assert RECORDED not in map(timed.length, timed.told)
    cupti.fake_cupti_lose(0)
    seqs = iter(range(101, 1000))

    def recorded_again() -> bool:
        timed.add_one(seq := next(seqs))
        return bool(device.drain(20)) and timed.length(seq) == RECORDED

    timed.wait(20, recorded_again)


def test_one_collection_serves_many_calls(device: Any, cupti: Any) -> None:
    timed, before = Timed(device), cupti.fake_cupti_flushes()
    for seq in range(1, CALLS + 1):
        timed.add_one(seq)
    assert device.drain(60) and len(timed.told) == CALLS
    assert set(map(timed.length, timed.told)) == {RECORDED} and cupti.fake_cupti_flushes() - before < CALLS / 3


def test_a_kernel_that_does_not_end_holds_up_nobody(device: Any, cupti: Any) -> None:
    """CUPTI delivers no record of a buffer in which one is not complete."""
    timed = Timed(device)
    timed.launch(1, WAIT_FLAG, struct.pack("<Q", BASE), STREAMS[1])
    for seq in range(2, 12):
        timed.add_one(seq)
    timed.wait(20, lambda: len(timed.told) == 10)
    assert RECORDED not in map(timed.length, timed.told)
    device.write(BASE, b"\1\0\0\0")
    assert device.drain(20) and timed.length(1) > 0  # by its record or by events: none was waited for just now


@pytest.mark.parametrize("setting", ["off", "/nowhere/libcupti.so"])
def test_a_node_without_cupti(device: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
                              setting: str) -> None:
    monkeypatch.setenv("RGPU_CUPTI", setting)
    timed = Timed(device)
    timed.add_one(1)
    assert device.drain(20) and timed.length(1) != RECORDED
    assert "cupti.absent" in "".join(capfd.readouterr())
