"""A rebuild tells the device where the variables of each module stood, and when all of them are loaded."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.objects import ahead
from tests.support.worker.journal import Answers, Journal, opened

PTX = b""".version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .b8 table[64];
.visible .entry nothing() { ret; }
\0"""


@pytest.mark.parametrize("before_the_pause", [False, True])
def test_a_load_is_told_where_its_variables_stood(monkeypatch: pytest.MonkeyPatch, before_the_pause: bool) -> None:
    first, journal = CpuDevice(0, 64 << 20, 1, host="test"), Journal()
    try:
        runtime = SessionRuntime("s", 1, first)
        runtime.attach(Answers(), 0)
        runtime.feed([*opened(journal), journal("module_load", PTX, module=31, context=16, library=0, options=b"")])
        runtime.quiesce(5)
        state = SessionState.decode(cut.take(
            first, session="s", epoch=1, position=runtime.applied, hash_key=runtime.hash_key, live=runtime.objects(),
            answers=runtime.answers(), printed=runtime.text.state()).encode())
        sent = ahead.Ahead.decode(ahead.of(runtime.live).encode())
        (stood,) = runtime.live.variables().values()
    finally:
        first.close()
    assert [variable.name for variable in stood] == ["table"]

    said: list[Any] = []
    load, placed = CpuDevice.load, CpuDevice.placed
    monkeypatch.setattr(CpuDevice, "load", lambda self, *a: (said.append(a[5]), load(self, *a))[1])
    monkeypatch.setattr(CpuDevice, "placed", lambda self: (said.append("all"), placed(self))[1])
    second = CpuDevice(0, 64 << 20, 1, host="test")
    try:
        rebuilt = SessionRuntime("s", 2, second, state.hash_key)
        if before_the_pause:
            rebuilt.make(sent)
            assert said == [stood]
        rebuilt.restore(state, (), ahead=sent if before_the_pause else None)
        assert said == [stood, "all"]
    finally:
        second.close()
