"""When the GPU did the work of calls, many of them under way in several streams."""

from __future__ import annotations

import struct
import threading
import time
from functools import partial
from typing import Any

from rgpu.session.objects.spans import CALL
from tests.support.fake_driver.support import BASE, SIZE, device

__all__ = ["device"]

MODULE, STREAMS, CALLS = 17, (18, 19, 20), 300


def test_each_call_has_its_time_and_a_stream_its_order(device: Any) -> None:
    device.map(BASE, SIZE)
    device.allocate(BASE, SIZE)
    device.load(MODULE, b"add_one 12\n", b"", False)
    for stream in STREAMS:
        device.create_stream(stream, 16, 1, 0)
    told: dict[int, Any] = {}
    here = threading.Lock()

    def done(seq: int, result: int, spans: Any, data: Any) -> None:
        with here:
            told[seq] = result, spans, time.monotonic_ns()

    begun = time.monotonic_ns()
    for seq in range(1, CALLS + 1):
        stream = STREAMS[seq % len(STREAMS)]
        parameters = struct.pack("<QI", BASE + 64 * stream, 4)
        device.timed(seq, stream, partial(
            device._work.call, "launch", seq, module=MODULE, function=0, grid_x=1, grid_y=1, grid_z=1, block_x=1,
            block_y=1, block_z=1, shared=0, flags=0, stream=stream, parameters=parameters, attributes=b""),
            partial(done, seq))
    assert device.drain(20) and sorted(told) == list(range(1, CALLS + 1))
    for stream in STREAMS:
        ended = 0
        for seq in (seq for seq in told if STREAMS[seq % len(STREAMS)] == stream):
            result, (span,), answered = told[seq]
            assert not result and span.kind == CALL
            assert begun <= span.start + 1_000_000 and span.end <= answered + 1_000_000
            assert ended <= span.start < span.end, seq
            ended = span.start
    assert bytes(device.read(BASE + 64 * STREAMS[0], 4)) == struct.pack("<I", CALLS // len(STREAMS))
