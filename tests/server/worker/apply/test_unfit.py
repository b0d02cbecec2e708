"""A replay that this device cannot follow: the worker is ended, and the program is told of no error of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from rgpu.server.device.cpu import CpuDevice
from rgpu.server.worker.apply.calls.modules import standing_elsewhere
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import DeviceError
from rgpu.session.objects.module_table import GlobalVariable
from tests.support.worker.journal import Answers, Journal, opened

PTX = b""".version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .b8 table[64];
\0"""


class Ended(BaseException):
    """The worker's process would have ended here."""


@pytest.fixture
def runtime() -> Iterator[SessionRuntime]:
    device = CpuDevice(0, 64 << 20, 1, host="test")
    try:
        runtime = SessionRuntime("s", 1, device)

        def unfit(why: str) -> None:
            raise Ended(why)

        runtime.executor.unfit = unfit
        yield runtime
    finally:
        device.close()


def test_variables_that_stand_elsewhere(runtime: SessionRuntime) -> None:
    journal, answers = Journal(), Answers()
    runtime.attach(answers, 100)
    records = [*opened(journal), journal("module_load", PTX, module=31, context=16, library=0, options=b"")]
    runtime.feed(records)
    (stood,), seq = next(iter(runtime.loop.live.variables().values())), journal.seq
    again = journal("module_load", PTX, module=32, context=16, library=0, options=b"")
    runtime.executor.modules.places = {journal.seq: (dataclasses.replace(stood, address=stood.address + 4096),)}
    with pytest.raises(Ended, match=f"position {seq + 1}: variable 'table' is at 0x.*the program knows it at "
                                    f"{stood.address + 4096:#x}"):
        runtime.feed([again])
    assert seq + 1 not in answers, "the program is told nothing"


def test_variables_of_one_name_are_told_apart_by_their_addresses() -> None:
    """A module has local variables of the same name, one of each file that it was linked of."""
    both = (GlobalVariable("x", 4096, 4), GlobalVariable("x", 8192, 4), GlobalVariable("y", 512, 4))
    assert standing_elsewhere(both, both) == standing_elsewhere(both[::-1], both) == standing_elsewhere(both, ()) == ""
    moved = (both[0], GlobalVariable("x", 12288, 4), both[2])
    assert standing_elsewhere(moved, both) == "variable 'x' is at 0x1000, 0x3000, and the program knows it at 0x2000"
    assert "is at nowhere" in standing_elsewhere(both[2:], both)


@pytest.mark.parametrize("published", [100, 0])
def test_what_was_promised_and_is_not_to_be_had(runtime: SessionRuntime, monkeypatch: pytest.MonkeyPatch,
                                                published: int) -> None:
    """In a replay it is this worker's failure; a call that nobody had applied before is answered as ever."""
    def refuse(*arguments: object) -> None:
        raise DeviceError("no room", 2)

    monkeypatch.setattr(CpuDevice, "create_event", refuse)
    journal = Journal()
    runtime.attach(Answers(), published)
    records = [*opened(journal), journal("event_create", event=40, context=16, flags=0)]
    if published:
        with pytest.raises(Ended, match=f"event_create at position {journal.seq}: no room"):
            runtime.feed(records)
    else:
        runtime.feed(records)
        assert runtime.executor.error == 2
